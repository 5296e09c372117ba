"""Code that the listeners share: listening sockets, TLS, client addresses, connection limits and back-pressure.

Knows no protocol. May use `broker` and `config`.
"""
