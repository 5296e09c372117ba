"""Streams: named sets of partitions, and everything that reads or appends to them.

`Partition` is the port to a log, `Appender` the entry point for batches. Listeners and all later packages of the broker
use it; it uses catalog, types and log/.
"""
