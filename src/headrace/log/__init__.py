"""The log: durable, append-only storage of all partitions of one data folder (a shard).

The broker, the embedded API, the CLI and offline tools use it; only `errors`, `clock`, `config` and `record` are below
it. Start with shard.py and log.py. Sub-packages are layered, from `disk` at the bottom to `shard.py` at the top.
"""
