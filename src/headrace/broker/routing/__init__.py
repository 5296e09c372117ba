"""Exchanges, bindings and routes from a message to queues.

Used by queues and vhosts. May use types only; the type of queues is a type parameter.
"""
