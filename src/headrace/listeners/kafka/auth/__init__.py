"""Authentication (SASL) and authorization of Kafka clients, with the broker's users.

gate.py decides which user a connection is, access.py what that user may do; the other modules are SASL's mechanisms and
the requests of a login. All handlers use access.py, through KafkaContext.access_of.
"""
