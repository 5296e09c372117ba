"""One client's connection: who it is, how it is held back and how it ends. Its requests and answers: see pipe.pyx."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from headrace.broker.streams.partition import FileRange
from headrace.errors import HeadraceError, MalformedRequest, StorageError
from headrace.listeners.common.addresses import source_of
from headrace.listeners.kafka.auth import login
from headrace.listeners.kafka.data.fetch_sessions import end_session
from headrace.listeners.kafka.groups.share_sessions import end_session as end_share_session
from headrace.listeners.kafka.request_pipeline import Request, RequestPipeline
from headrace.listeners.kafka.sendfile import FileSending, Piece, descriptor_of
from headrace.wire.kafka.frames import REQUEST_BYTES_MAX

if TYPE_CHECKING:
    from headrace.listeners.kafka.auth.access import Access
    from headrace.listeners.kafka.auth.mechanism import Exchange
    from headrace.listeners.kafka.listener import KafkaListener

logger = logging.getLogger("headrace.kafka")

LOGIN_TIMEOUT_S = 10.0  # as at the AMQP listener

Handler = Callable[["KafkaListener", Request], None]
AsyncHandler = Callable[["KafkaListener", Request, Any], Awaitable[dict[str, Any] | None]]


class Connection(RequestPipeline, asyncio.BufferedProtocol):
    def __init__(self, listener: "KafkaListener") -> None:
        self.user = ""
        self.has_logged_in = False  # and is not guest because nobody asked
        self.mechanism = ""  # of its login, if there was one
        self.exchange: Exchange | None = None  # while it logs in
        self.access: Access | None = None  # None also while the broker is open
        self.client_host = ""
        self.peer: tuple[str, int] = ("", 0)
        self.source = ""
        self.connected_ms = listener.broker.clock.now_ms()
        self.local_address: tuple[str, int] = ("", 0)
        self.watches: dict[int, Any] = {}  # by log id, kept from one fetch to the next
        self.fetch_waiters: list[Callable[[], None]] = []
        self.fetch_sessions: set[int] = set()  # that end with it, see sessions.py
        self.share_sessions: set[tuple[str, str]] = set()  # the same, by group and member, see share_sessions.py
        self._descriptor = -1  # of the socket, if parts of files can be sent to it

    # What the event loop calls.

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
        if not self._listener.admit(self):
            self._transport.abort()
        elif self._listener.gate.user_of(self) is None:
            self._ask_for_login()

    def eof_received(self) -> bool:
        """It may still read: what the transport has is sent before it closes, and so is what it does not know of."""
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
            end_session(self._listener, session_id)
        for key in list(self.share_sessions):
            end_share_session(self._listener, self._listener.share_sessions[key])
            self._listener.coordination.shares.release(*key)
        self._forget_requests()
        self._listener.forget(self)

    # Under pressure; see listeners/common/backpressure.py.

    def hold_reading(self, reason: str, held: bool) -> None:
        (self._holds.add if held else self._holds.discard)(reason)
        self._pause_or_resume()

    def tell_blocked(self, reason: str | None) -> None:
        """Kafka has no word for it: answers say how long to wait, and the socket is not read."""

    def fileno(self) -> int:
        sock = self._transport.get_extra_info("socket")
        return -1 if sock is None else int(sock.fileno())

    def abort_for(self, reason: str) -> None:
        logger.warning("%s: closed: %s", self.client_host, reason)
        self._listener.stats.count("shed")
        self._transport.abort()

    @property
    def has_tls(self) -> bool:
        return self._transport.get_extra_info("ssl_object") is not None

    @property
    def is_sending(self) -> bool:
        return self._frames.held_bytes > 0

    @property
    def buffered_bytes(self) -> int:
        """In memory; what waits in files to be sent is not."""
        sending = 0 if self._files is None else self._files.held_bytes
        pieces = (piece for request in self._waiting for piece in request.pieces if isinstance(piece, FileRange))
        answers = self._answer_bytes - sum(map(len, pieces))
        return self._transport.get_write_buffer_size() + answers + self._frames.held_bytes + sending

    # Parts of files; see sending.py.

    @property
    def takes_files(self) -> bool:
        return self._descriptor >= 0

    def _send_files(self, pieces: Sequence[Piece]) -> None:
        """Answers with parts of files in them, or after such as are not all sent."""
        if self._files is None:
            self._files = FileSending(self._descriptor, self._listener.loop, self._flush, self._transport.abort)
        if self._transport.get_write_buffer_size():
            # What the transport has goes first, and only it knows when that is gone.
            assert not self._files.unsent_bytes, "one of the two writes at a time"
            try:
                self._transport.writelines([one.read() if isinstance(one, FileRange) else one for one in pieces])
            except OSError as error:
                self.abort(StorageError(f"an answer cannot be read: {error}"))
        else:
            self._files.send(pieces)

    def _write(self, data: bytes) -> None:
        if self._files is not None and self._files.unsent_bytes:
            self._files.send([data])
        else:
            self._transport.write(data)

    def throttle(self, wait_ms: int) -> None:
        """Do not read for a while: a client that was told to wait and does not, waits all the same."""
        if wait_ms <= 0 or self._throttled is not None or self.is_closed:
            return
        self._throttled = self._listener.loop.call_later(wait_ms / 1000, self._throttle_over)
        self._pause_or_resume()

    def _throttle_over(self) -> None:
        self._throttled = None
        self._pause_or_resume()

    # Logins; see login.py.

    def _ask_for_login(self) -> None:
        """Until then it can neither make us keep large requests nor stay for long."""
        self._is_narrow = True
        self._limit_requests(login.TOKEN_BYTES_MAX)
        self._listener.loop.call_later(LOGIN_TIMEOUT_S, self._login_timeout)
        self._listener.expect_login(self)

    def _widen(self) -> None:
        is_known = self.has_logged_in or self.admitted_at >= 0
        if is_known and not self._frames.waiting:  # half a request stays where it is
            self._is_narrow = False
            self._limit_requests(REQUEST_BYTES_MAX)

    def _login_timeout(self) -> None:
        if not self.is_closed and self._listener.gate.user_of(self) is None:
            self._listener.stats.count("handshake_timeouts")
            self._transport.abort()

    def _take_token(self, token: bytes) -> None:
        login.take_raw_token(self._listener, self, token)

    def send_token(self, token: bytes) -> None:
        """The answer to a token that was no request."""
        self._flush()
        if self._waiting:
            self.abort(MalformedRequest("a login before what was asked earlier is answered"))
        elif not self.is_closed:
            self._write(len(token).to_bytes(4, "big") + token)

    def end(self) -> None:
        """Nothing that comes after is started, and the last answer is the last."""
        self._is_over = True

    def refuse(self, reason: str) -> None:
        """Somebody we do not know, or not any more."""
        if not self._is_over and not self.is_closed:
            self._is_over = True
            logger.warning("%s: closed: %s", self.client_host, reason)
            self._transport.abort()

    def abort(self, error: BaseException) -> None:
        """Close at once. A client's mistake is a line for those who look for it, ours is an error."""
        if self.is_closed:
            return
        self._is_over = True
        if isinstance(error, HeadraceError):
            logger.info("%s: closed: %s", self.client_host, error)
        else:
            logger.error("%s: closed after a bug", self.client_host, exc_info=error)
        self._transport.abort()

    async def close(self) -> None:
        """Answers that are ready are sent, the rest is not waited for."""
        self._flush()
        if self.is_closed:
            return
        if self._files is not None and self._files.unsent_bytes:
            try:
                self._transport.writelines(self._files.take_back())
            except OSError as error:
                self.abort(StorageError(f"an answer cannot be read: {error}"))
        self._transport.close()
