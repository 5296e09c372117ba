"""The broker: streams, groups, transactions, exchanges, queues, virtual hosts, and their upkeep, over one shard.

Listeners use it; it uses log/, record/ and schemas/, and knows no protocol. The sub-packages may import each other only
in the order that tests/test_architecture.py lists.
"""
