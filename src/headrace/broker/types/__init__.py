"""Value types that several packages of the broker share: messages, ranges of offsets, aborted transactions.

Imports nothing else of the broker.
"""
