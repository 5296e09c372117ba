"""TLS for all listeners: the certificate and its reload, the handshake of accepted connections, and alerts.

Used by the listeners when they start. Certificates are read here and nowhere else.
"""
