"""Handlers that move records: Produce, Fetch, offsets of logs, and producers with transactions.

Produce and Fetch are the listener's hot paths. They are called by the dispatch tables only.
"""
