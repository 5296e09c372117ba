"""The HTTP listener: the native API, RabbitMQ's management API, the schema registry, metrics and the dashboard.

`listener.py` starts it; `server/` is shared by all APIs. It uses the broker and `wire.http`, and no other listener.
"""
