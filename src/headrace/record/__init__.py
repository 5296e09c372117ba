"""Kafka record batches (version 2): building, checking, decoding, filtering and compressing them, and their columns.

Most other layers use this package, mainly through `codec`, `layout` and `types`; it may use only `headrace.errors`.
"""
