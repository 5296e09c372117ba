"""The shard's key-value state, which changes together with appends: tables in memory, checkpointed to two files.

The broker reads it through the StateStore protocol and changes it through atomic groups. It may use `disk` only.
"""
