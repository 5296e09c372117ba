"""One client's connection: authentication, back-pressure, file responses and its end.

Connection inherits the compiled RequestPipeline, which handles each request and response; request_pipeline.pyx states
the contract between the two.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

from headrace.broker.broker import Broker
from headrace.broker.streams.partition import FileRange
from headrace.config import Config
from headrace.errors import HeadraceError, MalformedRequest, StorageError
from headrace.listeners.common.addresses import source_of
from headrace.listeners.common.backpressure import Flow
from headrace.listeners.common.per_source_limit import PerSourceLimit
from headrace.listeners.kafka.auth.access import Access
from headrace.listeners.kafka.auth.mechanism import Exchange
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.request_pipeline import PipelineGroup, RequestPipeline
from headrace.listeners.kafka.sendfile import FileSending, Piece, descriptor_of
from headrace.wire.kafka.frames import REQUEST_BYTES_MAX

logger = logging.getLogger("headrace.kafka")

LOGIN_TIMEOUT_S = 10.0  # the AMQP listener's value
TOKEN_BYTES_MAX = 512 * 1024  # Kafka's sasl.server.max.receive.size: the limit of requests before the login


class Connections:
    """The open connections of a listener, and the limits on how many there may be."""

    def __init__(self, broker: Broker, config: Config) -> None:
        self._broker = broker
        self._config = config
        self._open: set[Connection] = set()
        self._unauthenticated: PerSourceLimit[Connection] = PerSourceLimit(
            lambda: self.room() + len(self._unauthenticated)
        )
        self._stats = broker.stats.listener("kafka")
        self.flow = Flow("kafka", broker.pressure, self._open, slows=False)
        broker.users.on_removed(self._user_removed)

    def __iter__(self) -> Iterator["Connection"]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def room(self) -> int:
        """How many more connections are accepted."""
        return max(0, min(self._broker.connections_left, self._config.connections_max - len(self._open)))

    def admit(self, connection: "Connection") -> bool:
        self._stats.connections_total += 1
        if not self.room():
            self._stats.count("connections_refused")
            return False
        self._open.add(connection)
        self._stats.connections = len(self._open)
        return True

    def expect_login(self, connection: "Connection") -> None:
        oldest = self._unauthenticated.enter(connection.source, connection)
        if oldest is not None:
            self._stats.count("connections_refused")
            self.forget(oldest)  # at once: its place is taken
            oldest.abort(HeadraceError("too many unauthenticated connections from this address"))

    def logged_in(self, connection: "Connection") -> None:
        self._unauthenticated.leave(connection.source, connection)

    def forget(self, connection: "Connection") -> None:
        self._open.discard(connection)
        self._unauthenticated.leave(connection.source, connection)
        self.flow.forget(connection)
        self._stats.connections = len(self._open)

    def _user_removed(self, name: str) -> None:
        for connection in list(self._open):
            if connection.user == name:
                connection.refuse(f"user {name!r} was deleted")


class Connection(RequestPipeline, asyncio.BufferedProtocol):
    def __init__(self, pipelines: PipelineGroup, context: KafkaContext, connections: Connections) -> None:
        self._context = context
        self._connections = connections
        self.user = ""
        self.has_logged_in = False  # False also for guest without a login
        self.mechanism = ""  # of its login, if there was one
        self.exchange: Exchange | None = None  # while it logs in
        self.access: Access | None = None  # None also while the broker is open
        self.client_host = ""
        self.peer: tuple[str, int] = ("", 0)
        self.source = ""
        self.connected_ms = context.broker.clock.now_ms()
        self.local_address: tuple[str, int] = ("", 0)
        self.watches: dict[int, Any] = {}  # fetch.Watch by log id, kept from one fetch to the next
        self.fetch_waiters: list[Callable[[], None]] = []
        self.fetch_sessions: set[int] = set()  # end with the connection, see data/fetch_sessions.py
        self.share_sessions: set[tuple[str, str]] = set()  # by group and member, see groups/share_sessions.py
        self._descriptor = -1  # of the socket, if file ranges can be sent to it

    # Called by the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it
        self._descriptor = descriptor_of(transport)
        peer = transport.get_extra_info("peername")
        self.client_host = f"/{peer[0]}" if peer else ""
        if peer:
            self.peer = (peer[0], peer[1])
            self.source = source_of(peer[0])
        own = transport.get_extra_info("sockname")
        if own:
            self.local_address = (own[0], own[1])
        if not self._connections.admit(self):
            self._transport.abort()
        elif self._context.gate.user_of(self) is None:
            self._expect_login()

    def eof_received(self) -> bool:
        """The client may still read its responses. A closing transport sends its own buffer, but not the pieces of
        FileSending, so it stays open until those are sent."""
        if self._files is None or not self._files.unsent_bytes:
            return False
        self._flush()
        self._forget_requests()
        self.end()
        return True

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = self._is_over = True
        if self._files is not None:
            self._files.close()
        if self._throttled is not None:
            self._throttled.cancel()
        for watch in self.watches.values():
            watch.cancel()
        self.watches.clear()
        for session_id in list(self.fetch_sessions):
            self._context.fetch_sessions.end(session_id)
        self._context.share_sessions.end_all(self.share_sessions)
        self._forget_requests()
        self._connections.forget(self)

    # Back-pressure; see listeners/common/backpressure.py.

    def hold_reading(self, reason: str, held: bool) -> None:
        (self._holds.add if held else self._holds.discard)(reason)
        self._pause_or_resume()

    def tell_blocked(self, reason: str | None) -> None:
        """The Kafka protocol has no such notification: responses carry a throttle time, and the socket is not read."""

    def fileno(self) -> int:
        sock = self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    def abort_for(self, reason: str) -> None:
        logger.warning("%s: closed: %s", self.client_host, reason)
        self._context.stats.count("shed")
        self._transport.abort()

    @property
    def has_tls(self) -> bool:
        return self._transport.get_extra_info("ssl_object") is not None

    @property
    def is_sending(self) -> bool:
        return self._frames.held_bytes > 0

    @property
    def buffered_bytes(self) -> int:
        """Bytes in memory, in both directions. File ranges that wait to be sent are not in memory."""
        sending = 0 if self._files is None else self._files.held_bytes
        pieces = (piece for request in self._waiting for piece in request.pieces if isinstance(piece, FileRange))
        answers = self._answer_bytes - sum(map(len, pieces))
        return self._transport.get_write_buffer_size() + answers + self._frames.held_bytes + sending

    def throttle(self, wait_ms: int) -> None:
        """Stop reading for a while. Responses carry the same throttle time; this enforces it."""
        if wait_ms <= 0 or self._throttled is not None or self.is_closed:
            return
        self._throttled = self._context.loop.call_later(wait_ms / 1000, self._throttle_over)
        self._pause_or_resume()

    def _throttle_over(self) -> None:
        self._throttled = None
        self._pause_or_resume()

    # File ranges; see sendfile.py.

    @property
    def takes_files(self) -> bool:
        return self._descriptor >= 0

    def _send_files(self, pieces: Sequence[Piece]) -> None:
        """Send responses that contain file ranges, or that follow such responses which are not completely sent."""
        if self._files is None:
            self._files = FileSending(self._descriptor, self._context.loop, self._flush, self._transport.abort)
        if self._transport.get_write_buffer_size():
            # The transport's buffer goes first, and only the transport knows when it is empty.
            assert not self._files.unsent_bytes, "only one of the two writes at a time"
            try:
                self._transport.writelines([one.read() if isinstance(one, FileRange) else one for one in pieces])
            except OSError as error:
                self.abort(StorageError(f"cannot read the records of a response: {error}"))
        else:
            self._files.send(pieces)

    def _write(self, data: bytes) -> None:
        if self._files is not None and self._files.unsent_bytes:
            self._files.send([data])
        else:
            self._transport.write(data)

    # Authentication; see auth/login.py.

    def _expect_login(self) -> None:
        """Until it logs in, a connection can neither send large requests nor stay for long."""
        self._is_narrow = True
        self._limit_requests(TOKEN_BYTES_MAX)
        self._context.loop.call_later(LOGIN_TIMEOUT_S, self._login_timeout)
        self._connections.expect_login(self)

    def _widen(self) -> None:
        is_known = self.has_logged_in or self.admitted_at >= 0
        if is_known and not self._frames.waiting:  # a partial request stays in its buffer
            self._is_narrow = False
            self._limit_requests(REQUEST_BYTES_MAX)

    def _login_timeout(self) -> None:
        if not self.is_closed and self._context.gate.user_of(self) is None:
            self._context.stats.count("handshake_timeouts")
            self._transport.abort()

    def logged_in(self) -> None:
        self._connections.logged_in(self)

    def send_token(self, token: bytes) -> None:
        """Answer a raw token, which is not a request."""
        self._flush()
        if self._waiting:
            self.abort(MalformedRequest("a login token was sent before earlier requests were answered"))
        elif not self.is_closed:
            self._write(len(token).to_bytes(4, "big") + token)

    # The end.

    def end(self) -> None:
        """Start no more requests; close after the last response."""
        self._is_over = True

    def refuse(self, reason: str | None) -> None:
        """Close at once, because the user is unknown or was deleted. Without a reason, it has been logged already."""
        if not self._is_over and not self.is_closed:
            self._is_over = True
            if reason is not None:
                logger.warning("%s: closed: %s", self.client_host, reason)
            self._transport.abort()

    def abort(self, error: BaseException) -> None:
        """Close at once. A client's mistake is logged as info, a bug of the broker as an error."""
        if self.is_closed:
            return
        self._is_over = True
        if isinstance(error, HeadraceError):
            logger.info("%s: closed: %s", self.client_host, error)
        else:
            logger.error("%s: closed after a bug", self.client_host, exc_info=error)
        self._transport.abort()

    async def close(self) -> None:
        """Send the responses that are ready, without waiting for the others."""
        self._flush()
        if self.is_closed:
            return
        if self._files is not None and self._files.unsent_bytes:
            try:
                self._transport.writelines(self._files.take_back())
            except OSError as error:
                self.abort(StorageError(f"cannot read the records of a response: {error}"))
        self._transport.close()
