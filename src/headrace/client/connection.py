"""A keep-alive connection to a broker's HTTP listener, blocking."""

import contextlib
import select
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from headrace.client import forks
from headrace.client.exchange import Endpoint, Response, ResponseReader, request_bytes
from headrace.client.retry import Attempts, Fate, Outcome
from headrace.errors import BrokerUnreachable

if TYPE_CHECKING:
    import ssl

RECEIVE_BYTES = 256 * 1024
CONNECT_S_MAX = 5.0
# A server closes idle connections whenever it likes, and a publish that meets the closing is lost in doubt.
# So an idle one is not trusted for long.
IDLE_S_MAX = 3.0


class Connection:
    """One request at a time, from one thread at a time. Connects when needed and stays connected.

    `timeout_s` is how long an answer may take; `retry_s` how long to keep trying where that is safe.
    """

    def __init__(self, endpoint: Endpoint, *, timeout_s: float = 30.0, retry_s: float = 10.0) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._socket: socket.socket | None = None
        self._idle_since = 0.0
        self._tls: ssl.SSLContext | None = None
        forks.tell(self)

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str | int | None] | None = None,
        headers: Mapping[str, str] | None = None,
        body: bytes = b"",
        wait_s: float = 0.0,
    ) -> Response:
        """The broker's answer, whatever its status. `wait_s` is how long the broker was asked to wait."""
        data = request_bytes(self.endpoint, method, path, query=query, headers=headers, body=body)
        attempts = Attempts(self.endpoint, method, self._retry_s)
        while True:
            outcome = self._attempt(data, self._timeout_s + wait_s)
            if (delay_s := attempts.delay_s(outcome)) is None:
                assert isinstance(outcome, Response)
                return outcome
            time.sleep(delay_s)

    def stream(
        self,
        path: str,
        *,
        query: Mapping[str, str | int | None] | None = None,
        headers: Mapping[str, str],
        body: bytes = b"",
    ) -> "Stream":
        """An answer that goes on, over a connection of its own. An error answer is raised by the caller."""
        method = "POST" if body else "GET"
        return Stream(self, request_bytes(self.endpoint, method, path, query=query, headers=headers, body=body))

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None

    def forked(self) -> None:
        self.close()  # ours only: two processes on one connection would read each other's answers

    def _attempt(self, data: bytes, timeout_s: float) -> Outcome:
        reader = ResponseReader(to_head=data.startswith(b"HEAD "))
        sent = False
        try:
            connected = self._usable()
            if connected is None:
                connected = self._socket = self.connect()
            connected.settimeout(timeout_s)
            sent = True  # from here on nobody knows how much of it arrived
            # Whoever is refused on the way is told why, and hung up on: the answer may be here all the same.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connected.sendall(data)
            while reader.response is None:
                piece = connected.recv(RECEIVE_BYTES)
                if not piece:
                    raise ConnectionResetError("the connection was closed")
                reader.feed(piece)
        except OSError as error:
            self.close()
            self._refuse_if_final(error)
            return (Fate.LOST if sent else Fate.NOT_SENT), reason_of(error)
        except BrokerUnreachable:
            self.close()
            raise
        except BaseException:
            self.close()  # interrupted half-way: what would come next belongs to nobody
            raise
        if reader.keep_alive:
            self._idle_since = time.monotonic()
        else:
            self.close()
        return reader.response

    def _refuse_if_final(self, error: OSError) -> None:
        if self.endpoint.tls:
            from headrace.client.tls import refuse_if_final

            refuse_if_final(self.endpoint, error)

    def _usable(self) -> socket.socket | None:
        """The open connection, unless it has idled too long or the other side closed it."""
        if self._socket is None:
            return None
        if time.monotonic() - self._idle_since < IDLE_S_MAX:
            poll = select.poll()
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(0):
                return self._socket
        self.close()
        return None

    def connect(self) -> socket.socket:
        made = socket.create_connection(
            (self.endpoint.host, self.endpoint.port), timeout=min(CONNECT_S_MAX, self._timeout_s)
        )
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.endpoint.tls:
            made = self._secure(made)
        made.settimeout(self._timeout_s)
        return made

    def _secure(self, made: socket.socket) -> socket.socket:
        from headrace.client.tls import context_of

        if self._tls is None:
            self._tls = context_of(self.endpoint.trust)
        return self._tls.wrap_socket(made, server_hostname=self.endpoint.host)


class Stream:
    """An answer that goes on until somebody ends it. `response` is set when the broker refused instead."""

    def __init__(self, connection: Connection, request: bytes) -> None:
        self._pieces: list[bytes] = []
        self._reader = ResponseReader(self._pieces.append)
        self._socket: socket.socket | None = None
        forks.tell(self)
        try:
            self._socket = connection.connect()
            self._socket.sendall(request)
        except OSError:
            self.close()  # ended before it began: read() says so

    @property
    def response(self) -> Response | None:
        return self._reader.response

    def read(self, wait_s: float) -> bytes | None:
        """What came within `wait_s`, b"" when nothing did, None when it has ended. The caller knows where to
        go on from."""
        if self._socket is None:
            return None
        try:
            self._socket.settimeout(max(wait_s, 0.001))
            data = self._socket.recv(RECEIVE_BYTES)
        except TimeoutError:
            return b""
        except OSError:
            data = b""
        if data:
            self._reader.feed(data)
        if not data or self._reader.response is not None:
            self.close()
        pieces = b"".join(self._pieces)
        self._pieces.clear()
        return pieces if data else None

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None

    forked = close


def reason_of(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
        return "connection refused"  # asyncio says it in its own way, and lists every address it tried
    return (error.strerror or str(error) or type(error).__name__).lower()
