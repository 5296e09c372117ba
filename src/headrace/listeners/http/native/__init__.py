"""Handlers of Headrace's own HTTP API: topics, messages, cursors, bulk reads, sinks, pipelines, standbys, status.

`types.py` has the request and response bodies. Routes are in `server/app.py`; handlers use the broker and `server/`.
"""
