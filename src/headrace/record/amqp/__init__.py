"""AMQP messages as records: the codec of properties and tables, their validation, and trace headers.

Used by the AMQP codec in `wire`, and by the broker where it reads or changes the properties of a message.
"""
