"""Handlers of the admin APIs: topics, configs, metadata and the cluster.

They are called by the dispatch tables only. topic_index.py, which decides what streams are Kafka topics, serves all
other handlers, too.
"""
