"""Handlers of the group APIs: classic groups, consumer groups (KIP-848), share groups (KIP-932) and their offsets.

The state machines of groups are in broker/groups; these handlers translate requests and responses. They are called by
the dispatch tables only.
"""
