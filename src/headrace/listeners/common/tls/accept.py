"""Accepts TLS connections and passes them to the listener when their handshake is done.

Handshaking connections are not counted as the listener's, but both together never exceed its limit. A handshake must
end within HANDSHAKE_TIMEOUT_S; a failure is logged and counted.
"""

import asyncio
import contextlib
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Callable

from headrace.broker.metrics.counters import ListenerStats
from headrace.listeners.common.addresses import source_of
from headrace.listeners.common.per_source_limit import PerSourceLimit
from headrace.listeners.common.tls.alerts import handshaking
from headrace.listeners.common.tls.certificate import Tls

logger = logging.getLogger("headrace.tls")

HANDSHAKE_TIMEOUT_S = 5.0
TIMEOUT_CHECKS = 5  # within that time
SHUTDOWN_TIMEOUT_S = 5.0  # for a client to read the pending output and to close its side
HANDSHAKES_MAX = 2000  # handshakes at a time; the others wait in the kernel at almost no cost
ACCEPTS_MAX = 100  # per event-loop iteration, so that open connections are served too
ACCEPT_REST_S = 1.0  # when there are too many open files
LINES_MAX, LINES_INTERVAL_S = (
    20,
    10.0,
)  # a limit on log lines, so that failing clients cannot fill the disk; all are counted
TLS_HANDSHAKE = b"\x16"  # the first byte of a TLS connection
PLAIN_BYTES_MAX = 64 * 1024

NO_TLS = "the client does not use TLS"
REASONS = {
    "HTTP_REQUEST": NO_TLS,
    "WRONG_VERSION_NUMBER": NO_TLS,
    "UNSUPPORTED_PROTOCOL": "the client does not support TLS 1.2 or newer",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "the client sent no certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "the client does not trust the broker's certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "the client does not trust the broker's certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "the client does not trust the broker's certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "the client reports that the broker's certificate has expired",
}


class TlsAcceptor:
    """Accepts for one listener. `room` returns how many more connections the listener would accept. `plain_answer` is
    sent to clients that do not use TLS."""

    def __init__(
        self,
        listener: str,
        tls: Tls,
        stats: ListenerStats,
        connections_left: Callable[[], int],
        plain_answer: bytes = b"",
    ) -> None:
        self._listener = listener
        self._tls = tls
        self._stats = stats
        self._connections_left = connections_left
        self._plain_answer = plain_answer
        self._factory: Callable[[], asyncio.BaseProtocol]
        self._sockets: list[socket.socket] = []
        self._handshakes: dict[asyncio.Task[None], str] = {}  # task of a handshake: its source
        self._per_source: PerSourceLimit[asyncio.Task[None]] = PerSourceLimit(
            lambda: min(HANDSHAKES_MAX, connections_left())
        )
        self._is_listening = False
        self._rest: asyncio.TimerHandle | None = None
        self._lines = 0  # in this interval, logged or not
        self._lines_since = 0.0
        self._loop = asyncio.get_running_loop()

    def open(self, sockets: list[socket.socket], factory: Callable[[], asyncio.BaseProtocol]) -> None:
        self._sockets, self._factory = sockets, factory
        self._listen()

    def close(self) -> None:
        """Stops accepting and cancels handshakes. Connections whose handshake is done stay open."""
        self._pause()
        if self._rest is not None:
            self._rest.cancel()
        for sock in self._sockets:
            sock.close()
        self._sockets = []
        for task in self._handshakes:
            task.cancel()

    def _listen(self) -> None:
        self._rest = None
        if not self._is_listening and self._sockets:
            self._is_listening = True
            for sock in self._sockets:
                self._loop.add_reader(sock, self._accept, sock)

    def _pause(self) -> None:
        if self._is_listening:
            self._is_listening = False
            for sock in self._sockets:
                self._loop.remove_reader(sock)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_MAX):
            if len(self._handshakes) >= HANDSHAKES_MAX:
                self._pause()  # until a handshake has ended, see _ended
                return
            try:
                sock, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # probably too many open files: do not spin
                logger.error("the %s listener cannot accept: %s", self._listener, error.strerror)
                self._pause()
                self._rest = self._loop.call_later(ACCEPT_REST_S, self._listen)
                return
            if len(self._handshakes) >= self._connections_left():
                self._refused()
                sock.close()
                continue
            sock.setblocking(False)
            task = self._loop.create_task(self._handshake(sock, _address_text(*peer[:2])))
            source = self._handshakes[task] = source_of(peer[0])
            task.add_done_callback(self._ended)
            first = self._per_source.enter(source, task)
            if first is not None:
                self._per_source.leave(source, first)
                self._refused()
                first.cancel()

    def _refused(self) -> None:
        self._stats.connections_total += 1
        self._stats.count("connections_refused")

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._per_source.leave(self._handshakes.pop(task), task)
        if self._rest is None:
            self._listen()

    async def _handshake(self, sock: socket.socket, peer: str) -> None:
        try:
            async with _handshake_timeout(HANDSHAKE_TIMEOUT_S):
                first = await self._first_byte(sock)
                if first == TLS_HANDSHAKE:
                    await self._upgrade(sock)
                else:
                    self._reply_plain(sock)
        except OSError as error:
            sock.close()
            self._failed(peer, _reason(error))
        except BaseException:
            sock.close()
            raise
        else:
            if first not in (TLS_HANDSHAKE, b""):  # b"": a health check of a load balancer, which only connects
                self._failed(peer, NO_TLS)

    async def _first_byte(self, sock: socket.socket) -> bytes:
        """Peeks at the first byte, which the handshake reads again. b"" if the client has disconnected."""
        is_readable = asyncio.Event()
        self._loop.add_reader(sock, is_readable.set)
        try:
            await is_readable.wait()
        finally:
            self._loop.remove_reader(sock)
        return sock.recv(1, socket.MSG_PEEK)

    async def _upgrade(self, sock: socket.socket) -> None:
        """Runs the handshake. Its last step creates the listener's protocol."""
        handshaking.set(sock)  # in this task only
        await self._loop.connect_accepted_socket(
            self._factory, sock, ssl=self._tls.context(), ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S
        )

    def _reply_plain(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if self._plain_answer:
                sock.recv(
                    PLAIN_BYTES_MAX
                )  # closing with unread bytes would reset the connection and discard the answer
                sock.send(self._plain_answer)
        sock.close()

    def _failed(self, peer: str, reason: str) -> None:
        self._stats.count("tls_failures")
        now = self._loop.time()
        if now - self._lines_since >= LINES_INTERVAL_S:
            if self._lines > LINES_MAX:
                logger.info(
                    "%d more failed TLS handshakes at the %s listener before that",
                    self._lines - LINES_MAX,
                    self._listener,
                )
            self._lines_since, self._lines = now, 0
        self._lines += 1
        if self._lines <= LINES_MAX:
            logger.info("%s: TLS handshake with the %s listener failed: %s", peer, self._listener, reason)


@contextlib.asynccontextmanager
async def _handshake_timeout(seconds: float) -> AsyncIterator[None]:
    """Like asyncio.timeout, but expires only after several checks: after the broker itself was suspended, bytes of the
    client may still be unread in the socket when the timer fires."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def check(left: int) -> None:
        nonlocal timer
        if left:
            timer = loop.call_later(seconds / TIMEOUT_CHECKS, check, left - 1)
        else:
            waiting.reschedule(loop.time())

    async with asyncio.timeout(None) as waiting:
        check(TIMEOUT_CHECKS)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate was rejected: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return REASONS.get(error.reason, error.reason.replace("_", " ").lower())
    if isinstance(error, TimeoutError):
        return f"the handshake took more than {HANDSHAKE_TIMEOUT_S:g} seconds"
    return "the client disconnected during the handshake"


def _address_text(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
