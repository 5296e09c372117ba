"""uvicorn's HTTP protocol with bounds: on the head of a request, on patience, and on what follows a refusal.

What uvicorn leaves open: a head without end, a client that sends a byte a minute, one that never reads its
answer, and a refusal that is lost because the connection closes on bytes still coming in.
"""

import asyncio
import contextlib
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
PIPELINE_MAX = 16  # requests that wait for the answer before theirs while more are read
RESERVED = 8  # connections over the limit, for standbys alone: those who have all the others may wait for one
FOR_STANDBYS = b"/standby/"
FRAMING = (b"content-length", b"transfer-encoding")

HEAD_PATIENCE_S = 10.0  # for a whole head, from its first byte or from the connect
BODY_PATIENCE_S = 30.0  # in which at least BODY_BYTES_MIN must come
BODY_BYTES_MIN = 30 * 1024
BODY_PART_MIN = 20  # and this part of what has come so far: whoever keeps much from others goes on sending much
WRITE_PATIENCE_S = 60.0  # in which a client must take at least WRITE_BYTES_MIN of what waits for it
WRITE_BYTES_MIN = 30 * 1024
DISCARD_BYTES_MAX = 64 * 1024  # of a body that nobody wants are read to keep the connection
LINGER_S = 2.0  # how long a refused body is read and thrown away, so that the client sees the refusal
KEEP_ALIVE_S = 75
SWEEP_INTERVAL_S = 1.0


class Patience(NamedTuple):
    """The timeouts of a connection in seconds; tests make them short."""

    head: float = HEAD_PATIENCE_S
    body: float = BODY_PATIENCE_S
    write: float = WRITE_PATIENCE_S
    linger: float = LINGER_S


class Refused(Exception):
    """Ends the parsing of a request that will not be answered by the application."""

    def __init__(self, status: int, code: str, detail: str) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail = status, code, detail


TOO_MANY = (503, "too_many_connections", "too many connections; try again in a moment")


class ConnectionLimits(NamedTuple):
    connections_max: int
    stats: ListenerStats
    # Those that are over the limit, until it is known that they are no standbys; who came first is first.
    reserve: "dict[BoundedHttp, None]"
    patience: Patience = Patience()


class _PoliteTransport:
    """Stands between a response and its transport: closing waits for a request that is still coming in."""

    __slots__ = ("_protocol", "is_closing", "write")

    def __init__(self, protocol: "BoundedHttp", transport: asyncio.Transport) -> None:
        self._protocol = protocol
        self.write = transport.write
        self.is_closing = transport.is_closing

    def close(self) -> None:
        self._protocol.close_politely()


class BoundedHttp(HttpToolsProtocol):
    """One connection. `check` is called about once a second by the listener for every connection there is."""

    limits: ConnectionLimits

    def __init__(
        self, config: UvicornConfig, server_state: ServerState, limits: ConnectionLimits, crowd: PerSourceLimit[Any]
    ) -> None:
        super().__init__(config, server_state, {}, asyncio.get_running_loop())
        self.limits = limits
        self._crowd = crowd
        self._source: str | None = None
        self._head_bytes = 0  # as they came in
        self._headers_bytes = 0  # as parsed
        self._in_head = False
        self._body_follows = False  # behind the head of an upgrade
        self._refusal: Refused | None = None
        self._head_since: float | None = None
        self._body_mark: tuple[float, int] | None = None  # when the body was last judged, bytes until then
        self._body_bytes = 0
        self._write_mark: tuple[float, int] | None = None  # when it was last judged, bytes that waited for it then
        self._linger_until: float | None = None
        self._keep_alive = True
        self._task: asyncio.Task[None] | None = None
        self._has_said_all = False  # the client closed its side
        self._only_waits = False  # the application, for the client to hang up
        self._answering: RequestResponseCycle | None = None  # `cycle` is the last one that came, and may wait behind it

    # The life of a connection.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._polite = _PoliteTransport(self, transport)
        self._head_since = self.loop.time()
        host = self.client[0] if self.client else None
        reserve = self.limits.reserve
        is_too_many = len(self.connections) - len(reserve) > self.limits.connections_max
        if not is_loopback(host):  # who is here is all of one address, and so is who comes through a proxy here
            self._source = source_of(host)
            # The newcomer hears of it: one that is here already may be in the midst of a request.
            is_too_many |= self._crowd.enter(self._source, self) is not None
        if is_too_many:
            self._take_reserved_place()

    def _take_reserved_place(self) -> None:
        """Its first head says whether it is one of those that the places are for. A standby's comes at once: one that
        has kept us waiting for longest makes room."""
        reserve = self.limits.reserve
        if len(reserve) >= RESERVED:
            leaving = next((one for one in reserve if one.is_unknown), self)
            leaving._answer(*TOO_MANY)
            if leaving is self:
                return
        reserve[self] = None

    @property
    def is_unknown(self) -> bool:
        """It has not said yet what it wants."""
        return self.cycle is None

    def connection_lost(self, exc: Exception | None) -> None:
        answering = self._answering
        if answering is not None and not answering.response_complete:
            answering.disconnected = True
            answering.message_event.set()
        if self._source is not None:
            self._crowd.leave(self._source, self)
        self.limits.reserve.pop(self, None)
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whoever has said all may still wait for an answer (nc -N does), and gets it if the request is whole. Of one
        that waits for something to happen it is taken for hanging up, which looks the same. TLS has no such thing."""
        answering = self._answering
        if self.scheme == "https" or answering is None or answering.response_complete or self._only_waits:
            return False
        if self._linger_until is not None or self.cycle.more_body:
            return False
        self._has_said_all = True
        self.cycle.keep_alive = self._keep_alive = False
        return True

    async def _serve(self, cycle: RequestResponseCycle, app: Any, scope: Any, receive: Receive, send: Send) -> None:
        await app(scope, functools.partial(self._receive, cycle, receive), send)

    async def _receive(self, cycle: RequestResponseCycle, receive: Receive) -> Any:
        if cycle.more_body or cycle.message_event.is_set():
            return await receive()
        if self._has_said_all:
            self.transport.close()
        self._only_waits = True
        try:
            return await receive()
        finally:
            self._only_waits = False

    def data_received(self, data: bytes) -> None:
        if self._linger_until is not None or self.parser is None:
            return
        self._unset_keepalive_if_required()
        is_answering = self._answering is not None and not self._answering.response_complete
        if self._head_since is None and self._body_mark is None and not is_answering:  # then an empty line is no head
            self._head_since = self.loop.time()
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parse(data)
            if self._in_head and self._head_bytes > URL_BYTES_MAX + HEAD_BYTES_MAX:
                raise Refused(431, "headers_too_large", f"the head is over {HEAD_BYTES_MAX:,} bytes")
        except Refused as refusal:
            self._refuse(refusal)
        except httptools.HttpParserError:
            self._refuse(self._refusal or Refused(400, "malformed_request", "this is not a well-formed HTTP request"))

    def _parse(self, data: bytes) -> None:
        """Nobody upgrades here: the request is answered as plain HTTP. The parser takes all behind its head for another
        protocol, the body too, so that a new one goes on there."""
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                with contextlib.suppress(AttributeError):  # as uvicorn's own; older parsers need none
                    self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                if self._body_follows:
                    self.parser.feed_data(b"POST / HTTP/1.1\r\n%b\r\n" % b"".join(self._framing()))
                    self._body_follows = False

    def _framing(self) -> list[bytes]:
        """The headers that say where the body ends."""
        return [b"%b: %b\r\n" % pair for pair in self.headers if pair[0] in FRAMING]

    def _refuse(self, refusal: Refused) -> None:
        cycle = self.cycle
        if cycle is None or cycle.response_complete:
            self._answer(refusal.status, refusal.code, refusal.detail)
            return
        # The application is at work on a request whose rest is no good: what it would answer is void.
        cycle.disconnected = True
        cycle.message_event.set()
        if self._task is not None:
            self._task.cancel()
        if self.pipeline or cycle.response_started:
            # An answer may be half written: a second one in the middle of it would be taken for its body.
            self.transport.close()
        else:
            self._answer(refusal.status, refusal.code, refusal.detail)

    def _answer(self, status: int, code: str, detail: str) -> None:
        self.transport.write(refusal(status, code, detail))
        self._linger()

    def close_politely(self) -> None:
        if self.cycle is not None and self.cycle.more_body and not self.transport.is_closing():
            self._linger()
        else:
            self.transport.close()

    def _linger(self) -> None:
        """Say that we are done, and go on reading for a moment: a close on unread bytes resets the
        connection, and the client would see the reset instead of the answer."""
        self.limits.reserve.pop(self, None)
        if self._linger_until is None:
            self._linger_until = self.loop.time() + self.limits.patience.linger
            self.flow.resume_reading()
            if self.transport.can_write_eof():
                self.transport.write_eof()

    def check(self, now: float) -> None:
        """Ends a connection that has used up somebody's patience."""
        patience = self.limits.patience
        if self._linger_until is not None:
            if now >= self._linger_until:
                self.transport.close()
        elif self._write_mark is not None and now - self._write_mark[0] > patience.write:
            self._judge_reader(now, self._write_mark[1])
        elif self._head_since is not None:
            if now - self._head_since > patience.head:
                if self._in_head:
                    self._refuse(Refused(408, "slow_request", "the head of the request took too long"))
                else:
                    self.transport.close()
        elif self._body_mark is not None:
            self._judge_body(now, *self._body_mark)

    def _judge_body(self, now: float, since: float, bytes_then: int) -> None:
        if self.flow.read_paused:  # we are the slow ones
            self._body_mark = (now, self._body_bytes)
        elif now - since > self.limits.patience.body:
            if self._body_bytes - bytes_then >= max(BODY_BYTES_MIN, bytes_then // BODY_PART_MIN):
                self._body_mark = (now, self._body_bytes)
                return
            self._refuse(Refused(408, "slow_request", "the body of the request came too slowly"))

    def _judge_reader(self, now: float, bytes_then: int) -> None:
        """Nothing more is written before it has taken enough of this, so what waits only gets less."""
        waiting = self._waiting_bytes()
        if bytes_then - waiting >= WRITE_BYTES_MIN:
            self._write_mark = (now, waiting)
        else:
            self.transport.abort()

    def _waiting_bytes(self) -> int:
        """Here and in the kernel, which takes more from us only when a good part of its own has left."""
        waiting, sock = self.transport.get_write_buffer_size(), self.transport.get_extra_info("socket")
        with contextlib.suppress(OSError, ValueError):  # it may be closed
            waiting += struct.unpack("i", fcntl.ioctl(sock.fileno() if sock else -1, termios.TIOCOUTQ, bytes(4)))[0]
        return waiting

    # As a holder of memory, see listeners/common/backpressure.py.

    @property
    def buffered_bytes(self) -> int:
        """Of answers. What a request has brought is counted, and bounded, by the budget of the site."""
        return int(self.transport.get_write_buffer_size())

    def abort_for(self, reason: str) -> None:
        logger.warning("closing HTTP connection from %s: %s", self.client, reason)
        self.limits.stats.count("shed")
        self.transport.abort()

    def pause_writing(self) -> None:
        self._write_mark = (self.loop.time(), self._waiting_bytes())
        super().pause_writing()

    def resume_writing(self) -> None:
        self._write_mark = None
        super().resume_writing()

    # What the parser finds.

    def on_message_begin(self) -> None:
        if self._body_follows:
            return
        super().on_message_begin()
        self._unset_keepalive_if_required()
        self._in_head = True
        self._head_bytes = self._headers_bytes = 0
        if self._head_since is None:  # in the same breath as the request before
            self._head_since = self.loop.time()

    def on_url(self, url: bytes) -> None:
        if self._body_follows:
            return
        super().on_url(url)
        if len(self.url) > URL_BYTES_MAX:
            self._stop(Refused(414, "url_too_long", f"the URL is over {URL_BYTES_MAX:,} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._body_follows:
            return
        super().on_header(name, value)
        self._headers_bytes += len(name) + len(value) + 4
        if len(self.headers) > HEADERS_MAX:
            self._stop(Refused(431, "headers_too_large", f"more than {HEADERS_MAX} headers"))
        if self._headers_bytes > HEAD_BYTES_MAX:
            self._stop(Refused(431, "headers_too_large", f"the headers are over {HEAD_BYTES_MAX:,} bytes"))

    def _stop(self, refusal: Refused) -> None:
        self._refusal = refusal  # the parser wraps what a callback raises
        raise refusal

    def on_headers_complete(self) -> None:
        if self._body_follows:
            return
        if self in self.limits.reserve and not self.url.startswith(FOR_STANDBYS):
            self._stop(Refused(*TOO_MANY))
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (hosts == 0 and self.parser.get_http_version() == "1.1"):
            self._stop(Refused(400, "malformed_request", "a request has one Host header"))
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            self._stop(Refused(400, "malformed_request", "the only transfer encoding is chunked"))
        self._in_head = False
        self._head_since = None
        self._body_bytes = 0
        self._body_mark = (self.loop.time(), 0)
        super().on_headers_complete()
        if self.pipeline and len(self.pipeline) < PIPELINE_MAX:
            self.flow.resume_reading()  # who does not read does not see that the client hung up
        cycle = self.cycle
        cycle.transport = self._polite  # type: ignore[assignment]
        self._keep_alive = cycle.keep_alive
        if self._expects_much():
            # Whoever answers before such a body is here does not read the rest of it: the connection ends
            # with the answer, and says so.
            cycle.keep_alive = False
        self._body_follows = self.parser.should_upgrade() and bool(self._framing())

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._answering = cycle
        self._task = self.loop.create_task(cycle.run_asgi(functools.partial(self._serve, cycle, app)))
        self._task.add_done_callback(self.tasks.discard)
        self.tasks.add(self._task)

    def _expects_much(self) -> bool:
        if self.expect_100_continue:  # whoever is refused does not send it: what follows must not be taken for it
            return True
        for name, value in self.headers:
            if name == b"content-length":
                return int(value) > DISCARD_BYTES_MAX  # the parser has made sure that it is a number
            if name == b"transfer-encoding":
                return True
        return False

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._body_follows:
            return
        self._body_mark = None
        self.cycle.keep_alive = self._keep_alive
        super().on_message_complete()
        if self.cycle.response_complete:  # before the body was here, whose coming ended the wait for the next request
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def shutdown(self) -> None:
        self._keep_alive = False
        super().shutdown()

    def send_400_response(self, msg: str) -> None:
        raise AssertionError("answered by _refuse")


def refusal(status: int, code: str, detail: str) -> bytes:
    """By the connection itself, in the same shape as the application's."""
    body = msgspec.json.encode(
        {"type": "about:blank", "title": STATUS_LINE[status][13:-2].decode(), "status": status}
        | {"code": code, "detail": detail}
    )
    return b"%bcontent-type: %b\r\ncontent-length: %d\r\nconnection: close\r\n%b\r\n%b" % (
        STATUS_LINE[status],
        PROBLEM.encode(),
        len(body),
        b"retry-after: 1\r\n" if status == 503 else b"",  # without it a 503 means a failed disk
        body,
    )


def serve_config(app: Any) -> UvicornConfig:
    """uvicorn's settings for an application in a loop that somebody else runs."""
    config = UvicornConfig(
        app,
        http=BoundedHttp,
        ws="none",
        lifespan="off",
        interface="asgi3",
        loop="none",
        workers=1,  # not from the environment: WEB_CONCURRENCY is meant for somebody else
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE_S,
    )
    config.load()
    return config
