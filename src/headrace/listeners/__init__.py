"""The listeners: each accepts the connections of one protocol (AMQP 0-9-1, Kafka, HTTP) and calls the broker.

Only the server starts them. They use `wire` for bytes and `broker` for everything else, and never each other; code that
several of them share is in `common`.
"""
