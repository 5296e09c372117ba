"""The schema registry: its state is a view of the topic `_schemas`; parsing runs in a thread.

The HTTP listener uses it. It uses streams and the schema languages in headrace.schemas.
"""
