"""AMQP message properties as stored in a record header: encoding, validation and trace headers.

Used by the broker, the wire formats, the listeners and the batch kernels; may use only `headrace.errors` and `record`.
"""
