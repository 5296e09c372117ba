"""The catalog protocol, its implementation as files, and the JSON form of AMQP arguments.

Every registry of the broker stores its documents here. It uses log/catalog and log/disk only.
"""
