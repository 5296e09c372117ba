"""The handlers of the AMQP methods, one module per class of methods; table.py maps methods to handlers.

Called by the dispatcher. A handler takes a channel and a decoded method, checks permissions and writes the reply.
"""
