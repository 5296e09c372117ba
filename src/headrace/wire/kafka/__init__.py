"""The Kafka protocol as bytes: frames, primitive types, schemas, and hand-written codecs for the hot requests.

Nothing here does I/O or knows the broker. listeners/kafka uses it, and so do the project's own Kafka clients.
"""
