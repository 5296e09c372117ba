"""Codecs of the protocols: AMQP 0-9-1, Kafka and HTTP. Used by the listeners, the client and the demo.

They convert between bytes and values and do no I/O. They may use `record` and `errors`. The hot paths are Cython and
append to, or encode from, record batches directly.
"""
