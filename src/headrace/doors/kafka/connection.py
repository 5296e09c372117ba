"""One client's connection: requests in, answers out in the order of the requests.

Requests are started as they arrive and may end in any order; an answer waits until those before it have
been sent. Answers that are ready in one turn of the event loop leave in one gathering write.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

from headrace.doors.kafka import login
from headrace.doors.kafka.login import Stage
from headrace.errors import HeadraceError, MalformedRequest
from headrace.wire.kafka import hot
from headrace.wire.kafka.apis import VERSIONS, Api, has_header_tags
from headrace.wire.kafka.codec import encode
from headrace.wire.kafka.frames import FrameReader
from headrace.wire.kafka.schema import response_struct

if TYPE_CHECKING:
    from headrace.doors.kafka.access import Access
    from headrace.doors.kafka.door import KafkaDoor

logger = logging.getLogger("headrace.kafka")

REQUESTS_MAX = 128  # of one connection that are not answered; more are not read
REQUEST_BYTES_WAITING_MAX = 16 << 20  # of one connection
DOOR_BYTES_WAITING_MAX = 64 << 20  # of all: more would wait for the disk all the same, in memory touched for it
FAIR_BYTES_MIN = 1 << 20  # what one connection may have waiting, however many there are
JOIN_BYTES_MAX = 16 << 10  # answers smaller than this, together, are cheaper copied than gathered
HEAVY_BYTES = 64 << 10  # who has less waiting takes nobody's share
ANSWER_BYTES_AHEAD = 1 << 20  # ready before they are written: more requests wait to see whether the client reads
COLD_REQUEST_BYTES_MAX = 8 << 20  # of every API but Produce
LOGIN_TIMEOUT_S = 10.0  # as at the AMQP door
RAW_TOKEN = Stage.RAW_TOKEN
OFFERED = {int(api): (api, versions) for api, versions in VERSIONS.items()}
Piece = bytes | bytearray | memoryview


class Request:
    """One request, and the place where its answer goes. buffer[position:size] is the body."""

    __slots__ = (
        "answered",
        "api",
        "buffer",
        "client_id",
        "connection",
        "correlation_id",
        "pieces",
        "position",
        "size",
        "version",
    )

    def __init__(self, connection: "Connection", buffer: bytearray, size: int) -> None:
        key, version, correlation_id, client_id, position = hot.parse_header(buffer, size)
        self.connection = connection
        self.buffer = buffer
        self.size = size
        self.version = version
        self.correlation_id = correlation_id
        self.client_id = client_id or ""
        self.pieces: Sequence[Piece] = ()
        self.answered = False
        offered = OFFERED.get(key)
        if offered is None:
            raise MalformedRequest(f"no API {key}")
        api, (lowest, highest, flexible_from) = offered
        self.api = api
        if not lowest <= version <= highest and api is not Api.API_VERSIONS:
            raise MalformedRequest(f"{api.name} has no version {version}")
        if size > COLD_REQUEST_BYTES_MAX and api is not Api.PRODUCE:
            raise MalformedRequest(f"{api.name} of {size:,} bytes")
        if flexible_from <= version <= highest:
            position = hot.skip_header_tags(buffer, position, size)
        self.position = position

    @property
    def body(self) -> memoryview:
        return memoryview(self.buffer)[: self.size]

    def answer(self, pieces: Sequence[Piece]) -> None:
        """The whole answer. Empty: there is none (Produce with acks=0)."""
        assert not self.answered, "a request is answered once"
        self.pieces = pieces
        self.answered = True
        self.connection.answer_ready(pieces)

    def reply(self, values: dict[str, Any]) -> None:
        """The answer, as fields."""
        api, version = self.api, self.version
        tagged = has_header_tags(api, version)
        self.answer([encode(response_struct(api, version), values, self.correlation_id, tagged)])

    def fail(self, error: BaseException) -> None:
        """Nothing that Kafka has a code for in this answer: the client finds out by the connection's end."""
        self.connection.abort(error)


Handler = Callable[["KafkaDoor", Request], None]
AsyncHandler = Callable[["KafkaDoor", Request, Any], Awaitable[dict[str, Any] | None]]


class Connection(asyncio.BufferedProtocol):
    def __init__(self, door: "KafkaDoor") -> None:
        self._door = door
        self._frames = FrameReader(door.pool, door.scratch)
        self._is_narrow = False  # large requests are not taken yet
        self._waiting: deque[Request] = deque()
        self._waiting_bytes = 0
        self._answer_bytes = 0
        self._not_started: deque[Request] = deque()
        self._holds: set[str] = set()
        self._flush_planned = False
        self._reading_paused = False
        self._writing_paused = False
        self._throttled: asyncio.TimerHandle | None = None
        self._is_over = False  # nothing more is started
        self.is_closed = False
        self.login = Stage.NONE
        self.user = ""
        self.has_logged_in = False  # and is not guest because nobody asked
        self.admitted_at = -1  # the version of the users that let it in
        self.access: Access | None = None  # None also while the broker is open
        self.client_host = ""
        self.peer: tuple[str, int] = ("", 0)
        self.client_id = ""
        self.requests = 0
        self.connected_ms = door.broker.clock.now_ms()
        self.local_address: tuple[str, int] = ("", 0)
        self.watches: dict[int, Any] = {}  # by log id, kept from one fetch to the next
        self.fetch_waiters: list[Callable[[], None]] = []
        self.on_close: list[Callable[[], None]] = []

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's do not inherit from it
        peer = transport.get_extra_info("peername")
        self.client_host = f"/{peer[0]}" if peer else ""
        if peer:
            self.peer = (peer[0], peer[1])
        own = transport.get_extra_info("sockname")
        if own:
            self.local_address = (own[0], own[1])
        if not self._door.admit(self):
            self._transport.abort()
        elif self._door.gate.user_of(self) is None:
            self._ask_for_login()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._frames.target()

    def buffer_updated(self, count: int) -> None:
        try:
            for buffer, size in self._frames.arrived(count):
                if self.login is RAW_TOKEN:
                    login.take_raw_token(self._door, self, bytes(memoryview(buffer)[:size]))
                    continue
                request = Request(self, buffer, size)
                if self._not_started or self._is_full:
                    self._not_started.append(request)  # of one read: the next read waits
                else:
                    self._start(request)
            if self._is_narrow:
                self._widen()
            self._pause_or_resume()
            self._door.flow.received(self, count)
        except MalformedRequest as error:
            self.abort(error)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.is_closed = self._is_over = True
        if self._throttled is not None:
            self._throttled.cancel()
        for watch in self.watches.values():
            watch.cancel()
        self.watches.clear()
        for callback in self.on_close:
            callback()
        self.on_close.clear()
        self._weigh(-self._waiting_bytes)
        self._waiting.clear()
        self._not_started.clear()
        self._door.forget(self)

    def pause_writing(self) -> None:
        """The client does not read its answers: it gets no more of them to not read."""
        self._writing_paused = True
        self._pause_or_resume()

    def resume_writing(self) -> None:
        self._writing_paused = False
        self._start_more()
        self._pause_or_resume()

    # Requests.

    def _start(self, request: Request) -> None:
        if self._is_over:
            return
        self.requests += 1
        self.client_id = request.client_id
        self._waiting.append(request)
        self._weigh(request.size)
        self._door.handle(request)

    def _start_more(self) -> None:
        while self._not_started and not self._is_full and not self.is_closed:
            self._start(self._not_started.popleft())

    @property
    def _is_full(self) -> bool:
        """What is asked already is enough: with answers that nobody reads, a few small requests would take it all."""
        return (
            self._writing_paused
            or self._answer_bytes >= ANSWER_BYTES_AHEAD
            or len(self._waiting) >= REQUESTS_MAX
            or (self._waiting_bytes >= FAIR_BYTES_MIN and self._waiting_bytes >= self._fair_bytes)
        )

    @property
    def _fair_bytes(self) -> int:
        """This connection's part of what may wait, in all, for the disk."""
        fair = DOOR_BYTES_WAITING_MAX // max(1, self._door.heavy)
        return min(REQUEST_BYTES_WAITING_MAX, max(FAIR_BYTES_MIN, fair))

    def _weigh(self, change: int) -> None:
        """Count bytes that wait, and whether this connection is one of those that share the door's memory."""
        before = self._waiting_bytes
        self._waiting_bytes = before + change
        self._door.heavy += (self._waiting_bytes >= HEAVY_BYTES) - (before >= HEAVY_BYTES)

    def answer_ready(self, pieces: Sequence[Piece]) -> None:
        self._answer_bytes += sum(map(len, pieces))
        if not self._flush_planned and not self.is_closed:
            self._flush_planned = True
            self._door.loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_planned = False
        waiting = self._waiting
        pieces: list[Piece] = []
        total = freed = 0
        while waiting and waiting[0].answered:
            request = waiting.popleft()
            freed += request.size
            for piece in request.pieces:
                total += len(piece)
                pieces.append(piece)
        self._weigh(-freed)
        self._answer_bytes -= total
        if self.is_closed:
            return
        if len(pieces) == 1:
            self._transport.write(pieces[0])
        elif total > JOIN_BYTES_MAX:
            self._transport.writelines(pieces)
        elif pieces:
            self._transport.write(b"".join(pieces))
        if self._is_over and not waiting:
            self._transport.close()
            return
        self._start_more()
        self._pause_or_resume()

    def _pause_or_resume(self) -> None:
        full = self._is_full or bool(self._not_started) or self._throttled is not None or bool(self._holds)
        if full == self._reading_paused or self.is_closed:
            return
        self._reading_paused = full
        if full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    # Under pressure; see doors/flow.py.

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
        self._door.stats.count("shed")
        self._transport.abort()

    @property
    def is_sending(self) -> bool:
        return self._frames.held_bytes > 0

    @property
    def buffered_bytes(self) -> int:
        return self._transport.get_write_buffer_size() + self._answer_bytes + self._frames.held_bytes

    def throttle(self, wait_ms: int) -> None:
        """Do not read for a while: a client that was told to wait and does not, waits all the same."""
        if wait_ms <= 0 or self._throttled is not None or self.is_closed:
            return
        self._throttled = self._door.loop.call_later(wait_ms / 1000, self._throttle_over)
        self._pause_or_resume()

    def _throttle_over(self) -> None:
        self._throttled = None
        self._pause_or_resume()

    # Logins; see login.py.

    def _ask_for_login(self) -> None:
        """Until then it can neither make us keep large requests nor stay for long."""
        self._is_narrow = True
        self._frames = FrameReader(self._door.pool, self._door.scratch, request_bytes_max=login.TOKEN_BYTES_MAX)
        self._door.loop.call_later(LOGIN_TIMEOUT_S, self._login_timeout)

    def _widen(self) -> None:
        is_known = self.has_logged_in or self.admitted_at >= 0
        if is_known and not self._frames.waiting:  # half a request stays where it is
            self._is_narrow = False
            self._frames = FrameReader(self._door.pool, self._door.scratch)

    def _login_timeout(self) -> None:
        if not self.is_closed and self._door.gate.user_of(self) is None:
            self._door.stats.count("handshake_timeouts")
            self._transport.abort()

    def send_token(self, token: bytes) -> None:
        """The answer to a token that was no request."""
        self._flush()
        if self._waiting:
            self.abort(MalformedRequest("a login before what was asked earlier is answered"))
        elif not self.is_closed:
            self._transport.write(len(token).to_bytes(4, "big") + token)

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
        if not self.is_closed:
            self._transport.close()
