"""Commands that manage a running broker: one module per kind of object (queue, topic, user, ...).

They call the broker's HTTP management API through headrace.client; only `headrace user --data-dir` opens a data folder.
"""
