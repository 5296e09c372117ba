"""Encodings of the HTTP API without any I/O: messages as JSON and NDJSON, strict JSON, content negotiation, events.

Used by the HTTP listener; imports only errors and the record layer.
"""
