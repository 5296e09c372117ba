"""Reading logs: in the broker (`reader.py`), from other processes (`external.py`), and leases of segments.

Used by `log.py` and, for `external.py`, by Spark and the pipelines. May use log/disk, log/segments and log/tier.
"""
