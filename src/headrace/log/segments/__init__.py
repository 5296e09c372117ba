"""Segments: the files of a log, their indexes and seals, and the interface of their storage (`source.py`).

Used by everything in log/ above it. May use log/disk, the counters and settings, and record/.
"""
