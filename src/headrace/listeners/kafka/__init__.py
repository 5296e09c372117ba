"""The Kafka listener: topics, consumer groups, share groups and transactions for Kafka clients.

The server starts it (`listener.start`); no other listener imports it. It uses `broker` for all state and `wire.kafka`
for the protocol's bytes. To add an API: wire/kafka/apis.py, dispatch.py and auth/access.py have one table each.
"""
