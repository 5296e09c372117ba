"""Replication of a data folder to standbys, byte for byte: the leader's change feed, its wire format, the follower.

The broker, the standby command and everything that opens a data folder use it. It may use `disk` only.
"""
