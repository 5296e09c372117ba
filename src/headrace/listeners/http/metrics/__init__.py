"""Prometheus metrics: Headrace's own, and the same numbers under the names of RabbitMQ and Kafka's exporter.

Reads the counters of the broker at scrape time; nothing else uses this package.
"""
