"""The Python client: producers, consumers and administration over the broker's HTTP listener.

Logic is written once, without I/O (`publishing`, `reading`, `positions`, `exchange`, `retry`); the blocking and the
asyncio classes only drive it. Used by programs, the CLI and the Spark connector; uses `errors`, `record` and `wire`.
"""
