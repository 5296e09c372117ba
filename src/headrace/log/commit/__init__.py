"""The write path: staged appends become rounds, journal entries, segments and checkpoints.

shard.py, log.py, maintenance and recovery use it; the broker uses only tickets and atomic groups. It may use `disk`,
`segments` and `state`.
"""
