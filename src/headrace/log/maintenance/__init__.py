"""Maintenance of logs: retention, deletion, compaction, archiving and truncation.

The shard owns one `Maintenance`; the broker's upkeep uses its parts. May use everything in log/ up to `log.py`.
"""
