"""A blocking keep-alive connection to the broker's HTTP listener."""

import contextlib
import select
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.client import forks
from headrace.client.conversation import Ask, Conversation, Follow, Get, Listen, Pause, Post, T
from headrace.client.exchange import Endpoint, Response, ResponseReader, request_bytes
from headrace.client.retry import Attempts, Fate, Outcome
from headrace.errors import BrokerUnreachable

if TYPE_CHECKING:
    import ssl

RECEIVE_BYTES = 256 * 1024
CONNECT_S_MAX = 5.0
# The server may close an idle connection at any time, and a publish that races with the close is unconfirmed.
# So a connection is reused only if it has not been idle for long.
IDLE_S_MAX = 3.0


class Connection:
    """One request at a time, from one thread at a time. Connects on demand and stays connected.

    `timeout_s` limits the time to a response; `retry_s` is how long to retry where that is safe.
    """

    def __init__(self, endpoint: Endpoint, *, timeout_s: float = 30.0, retry_s: float = 10.0) -> None:
        self.endpoint = endpoint
        self._timeout_s = timeout_s
        self._retry_s = retry_s
        self._socket: socket.socket | None = None
        self._idle_since = 0.0
        self._tls: ssl.SSLContext | None = None
        forks.register(self)

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
        """Return the broker's response, even an error. `wait_s` is how long the request asks the broker to wait."""
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
        """A response without an end, over its own connection. The caller handles an error response."""
        method = "POST" if body else "GET"
        return Stream(self, request_bytes(self.endpoint, method, path, query=query, headers=headers, body=body))

    def close(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.close()
            self._socket = None

    def forked(self) -> None:
        self.close()  # closes our copy only; two processes on one connection would read each other's responses

    def _attempt(self, data: bytes, timeout_s: float) -> Outcome:
        reader = ResponseReader(to_head=data.startswith(b"HEAD "))
        sent = False
        try:
            connected = self._usable()
            if connected is None:
                connected = self._socket = self.connect()
            connected.settimeout(timeout_s)
            sent = True  # from here on, the broker may have received part or all of it
            # A broker that refuses a request early responds and closes: the response may still be readable.
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
            self.close()  # interrupted: the rest of this response must not be read as the next one
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
        """The open connection, unless it was idle for too long or the server closed it."""
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


def run(connection: Connection, conversation: Conversation[T]) -> T:
    """Perform the requests of a conversation and return its result."""
    step: Callable[[], Ask] = partial(next, conversation)
    while True:
        try:
            ask = step()
        except StopIteration as done:
            result: T = done.value
            return result
        try:
            step = partial(conversation.send, _perform(connection, ask))
        except Exception as error:  # noqa: BLE001 - the conversation decides what a failed request means
            step = partial(conversation.throw, error)


def _perform(connection: Connection, ask: Ask) -> Any:
    match ask:
        case Get(path, query, wait_s):
            return connection.request("GET", path, query=query, wait_s=wait_s)
        case Post(path, headers, body):
            return connection.request("POST", path, headers=headers, body=body)
        case Follow(path, headers):
            return connection.stream(path, headers=headers)
        case Listen(stream, wait_s):
            return stream.read(wait_s)
        case Pause(wait_s):
            return time.sleep(wait_s)


class Stream:
    """A response without an end. `response` is set if the broker refused the request."""

    def __init__(self, connection: Connection, request: bytes) -> None:
        self._pieces: list[bytes] = []
        self._reader = ResponseReader(self._pieces.append)
        self._socket: socket.socket | None = None
        forks.register(self)
        try:
            self._socket = connection.connect()
            self._socket.sendall(request)
        except OSError:
            self.close()  # read() then reports the end of the stream

    @property
    def response(self) -> Response | None:
        return self._reader.response

    def read(self, wait_s: float) -> bytes | None:
        """The bytes that arrived within `wait_s`, b"" if none did, None if the stream has ended."""
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
        return "no response in time"
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
        return "connection refused"  # asyncio uses another text, which lists every address it tried
    return (error.strerror or str(error) or type(error).__name__).lower()
