"""uvicorn's HTTP protocol with limits on request heads and timeouts for slow clients.

uvicorn accepts endless heads, waits forever for clients that send a byte a minute or never read their response, and
loses an early error response by closing the connection while the request is still arriving. This subclass overrides
private members of `HttpToolsProtocol` to prevent that; tests/listeners/http/test_uvicorn.py fails when they change.
"""

import asyncio
import contextlib
import enum
import fcntl
import functools
import logging
import struct
import termios
from typing import Any, NamedTuple

import httptools
import msgspec
from starlette.types import Receive, Send
from uvicorn.config import Config as UvicornConfig
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from headrace.broker.metrics.counters import ListenerStats
from headrace.listeners.common.addresses import source_of
from headrace.listeners.common.per_source_limit import PerSourceLimit
from headrace.listeners.http.server.authentication import is_loopback
from headrace.wire.http.bodies import PROBLEM

logger = logging.getLogger("headrace.http")

URL_BYTES_MAX = 8 * 1024
HEAD_BYTES_MAX = 32 * 1024
HEADERS_MAX = 100
PIPELINE_MAX = 16  # pipelined requests that may wait for an earlier response before reading pauses
RESERVED = 8  # connections above the limit, only for standbys: all others may be publishers that wait for one
STANDBY_PATHS = b"/standby/"
FRAMING_HEADERS = (b"content-length", b"transfer-encoding")

HEAD_TIMEOUT_S = 10.0  # for a whole head, from its first byte or from the connect
BODY_TIMEOUT_S = 30.0  # in which at least BODY_BYTES_MIN must arrive
BODY_BYTES_MIN = 30 * 1024
BODY_PART_MIN = 20  # and one part in 20 of the bytes so far: a client that holds much memory must keep sending
WRITE_TIMEOUT_S = 60.0  # in which a client must read at least WRITE_BYTES_MIN of its response
WRITE_BYTES_MIN = 30 * 1024
DISCARD_BYTES_MAX = 64 * 1024  # an unread body up to this size is discarded to keep the connection open
LINGER_S = 2.0  # how long the rest of a refused request is discarded, so that the client sees the response
KEEP_ALIVE_S = 75
SWEEP_INTERVAL_S = 1.0


class Timeouts(NamedTuple):
    """Timeouts of a connection in seconds; tests shorten them."""

    head: float = HEAD_TIMEOUT_S
    body: float = BODY_TIMEOUT_S
    write: float = WRITE_TIMEOUT_S
    linger: float = LINGER_S


class Reading(enum.Enum):
    """The part of a request that the connection reads next."""

    IDLE = enum.auto()  # between requests
    HEAD = enum.auto()
    BODY = enum.auto()
    DISCARDING = enum.auto()  # final: the response is sent, and the rest of the request is thrown away


class Progress(NamedTuple):
    """Bytes at the time of the last check, to detect transfers that are too slow."""

    at: float
    bytes: int


class Refused(Exception):
    """Stops parsing: the connection itself sends the error response."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail


TOO_MANY = (503, "too_many_connections", "too many connections; try again in a moment")


class ConnectionLimits(NamedTuple):
    """Limits and statistics that all connections share."""

    connections_max: int
    stats: ListenerStats
    # Connections over the limit, oldest first, until their first request shows whether they are standbys.
    reserve: "dict[BoundedHttp, None]"
    timeouts: Timeouts = Timeouts()


class _LingeringTransport:
    """The transport as a response sees it: closing waits for a request that is still arriving."""

    __slots__ = ("_protocol", "is_closing", "write")

    def __init__(self, protocol: "BoundedHttp", transport: asyncio.Transport) -> None:
        self._protocol = protocol
        self.write = transport.write
        self.is_closing = transport.is_closing

    def close(self) -> None:
        self._protocol.close_after_request()


class BoundedHttp(HttpToolsProtocol):
    """One HTTP connection. The listener calls `check` about once a second to enforce the timeouts."""

    limits: ConnectionLimits

    def __init__(
        self, config: UvicornConfig, server_state: ServerState, limits: ConnectionLimits, sources: PerSourceLimit[Any]
    ) -> None:
        super().__init__(config, server_state, {}, asyncio.get_running_loop())
        self.limits = limits
        self._sources = sources
        self._source: str | None = None
        self._reading = Reading.IDLE
        self._head_since: float | None = None  # start of the head timeout
        self._head_bytes = 0  # received
        self._headers_bytes = 0  # parsed
        self._body_follows_upgrade = False  # the head asked for an upgrade, and a body follows it
        self._body_bytes = 0
        self._body_progress = Progress(0.0, 0)
        self._unread: Progress | None = None  # response bytes that the client has not read, while writing is paused
        self._discard_until = 0.0
        self._refusal: Refused | None = None
        self._keep_alive = True
        self._client_sent_eof = False
        self._app_awaits_disconnect = False  # the application only waits for the client to disconnect
        self._task: asyncio.Task[None] | None = None
        # The cycle that the application works on; uvicorn's `cycle` is the latest, which may be queued behind it.
        self._answering: RequestResponseCycle | None = None

    # Connection events

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._lingering = _LingeringTransport(self, transport)
        self._head_since = self.loop.time()
        host = self.client[0] if self.client else None
        reserve = self.limits.reserve
        is_too_many = len(self.connections) - len(reserve) > self.limits.connections_max
        if not is_loopback(host):  # local clients, and all clients behind a local proxy, share one address
            self._source = source_of(host)
            # Refuse the new connection, not the oldest of its source, which may be in the middle of a request.
            is_too_many |= self._sources.enter(self._source, self) is not None
        if is_too_many:
            self._take_reserved_place()

    def _take_reserved_place(self) -> None:
        """Admits a connection over the limit until its first head shows whether it is a standby. A standby sends its
        head at once: when all reserved places are taken, the connection that has been silent for longest is closed."""
        reserve = self.limits.reserve
        if len(reserve) >= RESERVED:
            evicted = next((one for one in reserve if one.is_silent), self)
            evicted._respond(*TOO_MANY)
            if evicted is self:
                return
        reserve[self] = None

    @property
    def is_silent(self) -> bool:
        """No request head has arrived yet."""
        return self.cycle is None

    @property
    def is_reading_head(self) -> bool:
        return self._reading is Reading.HEAD

    def connection_lost(self, exc: Exception | None) -> None:
        answering = self._answering
        if answering is not None and not answering.response_complete:
            answering.disconnected = True
            answering.message_event.set()
        if self._source is not None:
            self._sources.leave(self._source, self)
        self.limits.reserve.pop(self, None)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection for the response if the client has sent a whole request and only closed its writing side
        (as nc -N does). If the application only waits for something to happen, EOF counts as a disconnect, which looks
        the same. TLS connections cannot be half-closed."""
        answering = self._answering
        if self.scheme == "https" or answering is None or answering.response_complete or self._app_awaits_disconnect:
            return False
        if self._reading is Reading.DISCARDING or self.cycle.more_body:
            return False
        self._client_sent_eof = True
        self.cycle.keep_alive = self._keep_alive = False
        return True

    async def _serve(self, cycle: RequestResponseCycle, app: Any, scope: Any, receive: Receive, send: Send) -> None:
        await app(scope, functools.partial(self._receive, cycle, receive), send)

    async def _receive(self, cycle: RequestResponseCycle, receive: Receive) -> Any:
        if cycle.more_body or cycle.message_event.is_set():
            return await receive()
        if self._client_sent_eof:
            self.transport.close()
        self._app_awaits_disconnect = True
        try:
            return await receive()
        finally:
            self._app_awaits_disconnect = False

    def data_received(self, data: bytes) -> None:
        if self._reading is Reading.DISCARDING or self.parser is None:
            return
        self._unset_keepalive_if_required()
        is_answering = self._answering is not None and not self._answering.response_complete
        if self._head_since is None and self._reading is Reading.IDLE and not is_answering:
            self._head_since = self.loop.time()
        if self._reading is Reading.HEAD:
            self._head_bytes += len(data)
        try:
            self._parse(data)
            if self.is_reading_head and self._head_bytes > URL_BYTES_MAX + HEAD_BYTES_MAX:
                raise Refused(431, "headers_too_large", f"the request head exceeds {HEAD_BYTES_MAX:,} bytes")
        except Refused as refusal:
            self._refuse(refusal)
        except httptools.HttpParserError:
            self._refuse(self._refusal or Refused(400, "malformed_request", "malformed HTTP request"))

    def _parse(self, data: bytes) -> None:
        """Feeds the parser. Upgrades are not supported: such a request is answered as plain HTTP. After its head the
        parser stops, expecting another protocol, so a new parser continues with the body."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                with contextlib.suppress(AttributeError):  # like uvicorn; older versions of httptools do not have it
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                if self._body_follows_upgrade:
                    self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(self._framing()))
                    self._body_follows_upgrade = False

    def _framing(self) -> list[bytes]:
        """The headers that determine where the body ends."""
        return [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] in FRAMING_HEADERS]

    def _refuse(self, refusal: Refused) -> None:
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._respond(refusal.status, refusal.code, refusal.detail)
            return
        # The application is handling a request whose rest is malformed: its response is void.
        cycle.disconnected = True
        cycle.message_event.set()
        if self._task is not None:
            self._task.cancel()
        if self.pipeline or cycle.response_started:
            # A response may be half written: a second one in the middle would be taken for its body.
            self.transport.close()
        else:
            self._respond(refusal.status, refusal.code, refusal.detail)

    def _respond(self, status: int, code: str, detail: str) -> None:
        self.transport.write(refusal(status, code, detail))
        self._discard_rest()

    def close_after_request(self) -> None:
        """Closes the connection, after discarding the rest of a request that is still arriving."""
        if self.cycle is not None and self.cycle.more_body and not self.transport.is_closing():
            self._discard_rest()
        else:
            self.transport.close()

    def _discard_rest(self) -> None:
        """Closes the writing side and keeps reading for a moment: closing with unread bytes would reset the connection,
        and the client would see the reset instead of the response."""
        self.limits.reserve.pop(self, None)
        if self._reading is not Reading.DISCARDING:
            self._reading = Reading.DISCARDING
            self._discard_until = self.loop.time() + self.limits.timeouts.linger
            self.flow.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()

    def check(self, now: float) -> None:
        """Ends the connection if a timeout has expired."""
        timeouts = self.limits.timeouts
        if self._reading is Reading.DISCARDING:
            if now >= self._discard_until:
                self.transport.close()
        elif self._unread is not None and now - self._unread.at > timeouts.write:
            self._check_client_reads(now, self._unread)
        elif self._head_since is not None:
            if now - self._head_since > timeouts.head:
                if self._reading is Reading.HEAD:
                    self._refuse(Refused(408, "slow_request", "the request head took too long to arrive"))
                else:
                    self.transport.close()
        elif self._reading is Reading.BODY:
            self._check_body(now, self._body_progress)

    def _check_body(self, now: float, last: Progress) -> None:
        if self.flow.read_paused:  # the broker is slow, not the client
            self._body_progress = Progress(now, self._body_bytes)
        elif now - last.at > self.limits.timeouts.body:
            if self._body_bytes - last.bytes >= max(BODY_BYTES_MIN, last.bytes // BODY_PART_MIN):
                self._body_progress = Progress(now, self._body_bytes)
                return
            self._refuse(Refused(408, "slow_request", "the request body arrived too slowly"))

    def _check_client_reads(self, now: float, last: Progress) -> None:
        """While writing is paused nothing is added, so the number of unread bytes only falls."""
        unread = self._unread_bytes()
        if last.bytes - unread >= WRITE_BYTES_MIN:
            self._unread = Progress(now, unread)
        else:
            self.transport.abort()

    def _unread_bytes(self) -> int:
        """Unread bytes in the transport and in the kernel, which accepts more only after sending a good part."""
        waiting, sock = self.transport.get_write_buffer_size(), self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError, ValueError):  # it may be closed
            waiting += struct.unpack("i", fcntl.ioctl(sock.fileno() if sock else -1, termios.TIOCOUTQ, bytes(4)))[0]
        return waiting

    # Memory pressure, see listeners/common/backpressure.py

    @property
    def buffered_bytes(self) -> int:
        """Buffered response bytes. Request bodies are bounded by the memory budget of the listener."""
        return int(self.transport.get_write_buffer_size())

    def abort_for(self, reason: str) -> None:
        logger.warning("closing HTTP connection from %s: %s", self.client, reason)
        self.limits.stats.count("shed")
        self.transport.abort()

    def pause_writing(self) -> None:
        self._unread = Progress(self.loop.time(), self._unread_bytes())
        super().pause_writing()

    def resume_writing(self) -> None:
        self._unread = None
        super().resume_writing()

    # Parser callbacks

    def on_message_begin(self) -> None:
        if self._body_follows_upgrade:
            return
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._reading = Reading.HEAD
        self._head_bytes = self._headers_bytes = 0
        if self._head_since is None:  # pipelined: it arrived together with the previous request
            self._head_since = self.loop.time()

    def on_url(self, url: bytes) -> None:
        if self._body_follows_upgrade:
            return
        super().on_url(url)
        if len(self.url) > URL_BYTES_MAX:
            self._stop(Refused(414, "url_too_long", f"the URL exceeds {URL_BYTES_MAX:,} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._body_follows_upgrade:
            return
        super().on_header(name, value)
        self._headers_bytes += len(name) + len(value) + 4
        if len(self.headers) > HEADERS_MAX:
            self._stop(Refused(431, "headers_too_large", f"the request has more than {HEADERS_MAX} headers"))
        if self._headers_bytes > HEAD_BYTES_MAX:
            self._stop(Refused(431, "headers_too_large", f"the headers exceed {HEAD_BYTES_MAX:,} bytes"))

    def _stop(self, refusal: Refused) -> None:
        self._refusal = refusal  # the parser replaces the exception of a callback by its own
        raise refusal

    def on_headers_complete(self) -> None:
        if self._body_follows_upgrade:
            return
        if self in self.limits.reserve and not self.url.startswith(STANDBY_PATHS):
            self._stop(Refused(*TOO_MANY))
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            self._stop(Refused(400, "malformed_request", "a request must have exactly one Host header"))
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            self._stop(Refused(400, "malformed_request", "the only supported transfer encoding is chunked"))
        self._reading = Reading.BODY
        self._head_since = None
        self._body_bytes = 0
        self._body_progress = Progress(self.loop.time(), 0)
        super().on_headers_complete()
        if self.pipeline and len(self.pipeline) < PIPELINE_MAX:
            self.flow.resume_reading()  # without reading, a disconnect goes unnoticed
        cycle = self.cycle
        cycle.transport = self._lingering  # type: ignore[assignment]
        self._keep_alive = cycle.keep_alive
        if self._expects_large_body():
            # A response sent before such a body has arrived ends the connection, since the rest is not read.
            cycle.keep_alive = False
        self._body_follows_upgrade = self.parser.should_upgrade() and bool(self._framing())

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        self._task = self.loop.create_task(cycle.run_asgi(functools.partial(self._serve, cycle, app)))
        self._task.add_done_callback(self.tasks.discard)
        self.tasks.add(self._task)

    def _expects_large_body(self) -> bool:
        if self.expect_100_continue:  # a refused client sends no body, so what follows must not be parsed as one
            return True
        for name, value in self.headers:
            if name == b"content-length":
                return int(value) > DISCARD_BYTES_MAX  # the parser accepts only numbers
            if name == b"transfer-encoding":
                return True
        return False

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._body_follows_upgrade:
            return
        self._reading = Reading.IDLE
        self.cycle.keep_alive = self._keep_alive
        super().on_message_complete()
        if self.cycle.response_complete:  # sent before the body arrived, which then cancelled the keep-alive timer
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def shutdown(self) -> None:
        self._keep_alive = False
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        raise AssertionError("_refuse responds instead")


def refusal(status: int, code: str, detail: str) -> bytes:
    """A problem response sent by the connection itself, in the form of the application's."""
    body = msgspec.json.encode(
        {"type": "about:blank", "title": STATUS_LINE[status][13:-2].decode(), "status": status}
        | {"code": code, "detail": detail}
    )
    return b"%bcontent-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n%b\r\n%b" % (
        STATUS_LINE[status],
        PROBLEM.encode(),
        len(body),
        b"retry-after: 1\r\n" if status == 503 else b"",  # a 503 without Retry-After means that the disk has failed
        body,
    )


def serve_config(app: Any) -> UvicornConfig:
    """uvicorn's configuration for an application in an event loop that is already running."""
    config = UvicornConfig(
        app,
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        interface="asgi3",
        loop="none",
        workers=1,  # ignores WEB_CONCURRENCY, which is meant for other programs
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    return config
