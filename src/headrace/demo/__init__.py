"""The demo: a small shop that generates traffic on every listener, started by `headrace demo` or `serve --demo`.

It contains minimal AMQP and Kafka clients, so that it needs no other package. It uses headrace.client for HTTP and
headrace.pipelines for the revenue pipeline.
"""
