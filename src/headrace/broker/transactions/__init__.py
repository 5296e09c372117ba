"""Idempotent producers and Kafka transactions: sequence numbers, the coordinator, and markers in the logs.

The Kafka listener uses it through `Coordination`; queues ask it for aborted transactions. It uses groups and streams.
"""
