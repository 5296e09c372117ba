"""Sends the TLS alert of a failed handshake, which asyncio and uvloop omit.

OpenSSL writes an alert such as `certificate required` to the output buffer when a handshake fails. uvloop and asyncio
close the connection without sending the buffer, so that the client does not learn the reason.
"""

import contextlib
import socket
import ssl
from contextvars import ContextVar
from typing import Any

# The socket of the handshake in this context: the event loop offers no way to pass it to the SSLObject.
handshaking: ContextVar[socket.socket | None] = ContextVar("handshaking", default=None)


class AlertingObject(ssl.SSLObject):
    pending_alert: tuple[ssl.MemoryBIO, socket.socket] | None = None

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError:
            if self.pending_alert is not None:
                outgoing, sock = self.pending_alert
                with contextlib.suppress(OSError):
                    sock.send(outgoing.read())
            raise
        self.pending_alert = None


class AlertingContext(ssl.SSLContext):
    sslobject_class = AlertingObject

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *more: Any, **named: Any) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, *more, **named)
        sock = handshaking.get()
        if sock is not None and isinstance(made, AlertingObject):
            made.pending_alert = (outgoing, sock)
        return made
