"""The tier: sealed segments archived as Parquet files, and the choice of a source for an archived segment.

Used by read, maintenance and recovery, and by the commands that archive and restore. May use log/disk and
log/segments.
"""
