"""Consumer groups and share groups, as Kafka defines them: membership, assignment, committed offsets.

`coordinator.py` is the entry point; `classic/` is the protocol since 2015, `consumer/` is KIP-848, `share/` is KIP-932.
Used by transactions, the broker and the Kafka listener; uses `access`, `streams` and `types`.
"""
