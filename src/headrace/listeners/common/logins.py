"""Logins that fail, where clients try again by themselves."""

# A login that failed is answered this late, as Kafka does: clients of Kafka and AMQP try again at once, and for ever.
# No more than that, unlike the HTTP listener: one with an old password would lock out all the others at its address.
FAILURE_DELAY_S = 0.1
