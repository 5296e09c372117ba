"""AMQP queues over logs: views, delivery, limits, dead letters, delayed messages and the flush to the log.

Used by vhosts and by the AMQP and HTTP listeners, mostly through Queue. May use routing, streams and types, but neither
vhosts nor the broker: what queues need of their vhost is in vhost_services.py.
"""
