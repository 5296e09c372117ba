"""Schemas of messages: what the three languages say, what may follow what, and which are known. No I/O here."""
