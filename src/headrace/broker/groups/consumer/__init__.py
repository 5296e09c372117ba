"""The consumer group protocol of KIP-848: one heartbeat, and the broker assigns partitions.

Used by `groups.coordinator`; uses `groups.classic` for members that still speak the old protocol.
"""
