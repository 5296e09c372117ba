"""Shared by all HTTP APIs: application, connections, authentication, authorization, request parsing, problems.

Uses the broker and `wire.http`; only `app.py` knows the packages of the single APIs.
"""
