"""Virtual hosts: declarations, storage of queues and bindings, policies, settings, and definitions.

Used by the broker and the listeners. May use queues, routing, streams and access.
"""
