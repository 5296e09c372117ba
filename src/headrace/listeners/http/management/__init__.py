"""The management API under /api: RabbitMQ's paths and fields, for its tools, and /api/headrace for the dashboard.

`routes.py` lists all endpoints with the permission each one needs. Only the application in `server/` uses this package;
it uses the broker and `server/`.
"""
