"""Share groups (KIP-932): members acquire single records of shared partitions, like consumers of a queue.

Used by the broker and the Kafka listener; uses the settle sets of `broker.types`.
"""
