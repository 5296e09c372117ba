"""Exactly-once sinks and bulk readers such as Spark: uploads, the sink ledger, read leases, pipeline reports.

The HTTP listener uses it. It uses streams and log/.
"""
