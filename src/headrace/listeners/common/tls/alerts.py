"""Tells a client why its handshake failed, which the event loops forget.

TLS has words for it, such as `certificate required`, and OpenSSL has written them down when a handshake fails: into
the buffer of what is to be sent. uvloop and asyncio close the connection without sending it, so that the client only
sees a connection that ends, and its owner looks in the wrong place.
"""

import contextlib
import socket
import ssl
from contextvars import ContextVar
from typing import Any

# Of the handshake that begins in this context: the loops make the rest, and hand nothing through.
arriving: ContextVar[socket.socket | None] = ContextVar("arriving", default=None)


class TalkingObject(ssl.SSLObject):
    last_words: tuple[ssl.MemoryBIO, socket.socket] | None = None

    def do_handshake(self) -> None:
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError:
            if self.last_words is not None:
                outgoing, sock = self.last_words
                with contextlib.suppress(OSError):
                    sock.send(outgoing.read())
            raise
        self.last_words = None


class TalkingContext(ssl.SSLContext):
    sslobject_class = TalkingObject

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *more: Any, **named: Any) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, *more, **named)
        sock = arriving.get()
        if sock is not None and isinstance(made, TalkingObject):
            made.last_words = (outgoing, sock)
        return made
