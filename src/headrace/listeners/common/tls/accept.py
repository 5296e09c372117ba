"""Where connections of a listener with TLS wait until their handshake is done.

The listener does not know them before: they are none of its connections, but there are never more of both together than
it takes. A handshake has a few seconds from the first moment, and whatever goes wrong in it is a line in the log and
a number, and nobody else's business.
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
from headrace.listeners.common.tls.alerts import arriving
from headrace.listeners.common.tls.certificate import Tls

logger = logging.getLogger("headrace.tls")

HANDSHAKE_TIMEOUT_S = 5.0
LOOKS = 5  # in that time
SHUTDOWN_TIMEOUT_S = 5.0  # for a client to say good-bye, too, and to read what was written before
ARRIVING_MAX = 2000  # at a time; the others wait in the kernel, where they cost next to nothing
ACCEPTS_MAX = 100  # in one go, so that those who are inside get their turn
ACCEPT_REST_S = 1.0  # when there are no files left for more
LINES_MAX, LINES_INTERVAL_S = 20, 10.0  # nobody fills the disk with our log by knocking; all are counted
TLS_HANDSHAKE = b"\x16"  # the first byte of whoever speaks TLS
PLAIN_BYTES_MAX = 64 * 1024

NO_TLS = "it does not speak TLS"
REASONS = {
    "HTTP_REQUEST": NO_TLS,
    "WRONG_VERSION_NUMBER": NO_TLS,
    "UNSUPPORTED_PROTOCOL": "it speaks no version of TLS newer than 1.1",
    "PEER_DID_NOT_RETURN_A_CERTIFICATE": "it shows no certificate",
    "TLSV1_ALERT_UNKNOWN_CA": "it does not trust our certificate",
    "SSLV3_ALERT_CERTIFICATE_UNKNOWN": "it does not trust our certificate",
    "SSLV3_ALERT_BAD_CERTIFICATE": "it does not trust our certificate",
    "SSLV3_ALERT_CERTIFICATE_EXPIRED": "it says that our certificate has expired",
}


class TlsAcceptor:
    """Of one listener. `room` is how many more connections the listener would take; `plain_answer` is what somebody
    hears who
    does not speak TLS, if there are words for it."""

    def __init__(
        self, listener: str, tls: Tls, stats: ListenerStats, room: Callable[[], int], plain_answer: bytes = b""
    ) -> None:
        self._listener = listener
        self._tls = tls
        self._stats = stats
        self._room = room
        self._plain_answer = plain_answer
        self._factory: Callable[[], asyncio.BaseProtocol]
        self._sockets: list[socket.socket] = []
        self._arriving: dict[asyncio.Task[None], str] = {}  # and where it comes from
        self._crowd: PerSourceLimit[asyncio.Task[None]] = PerSourceLimit(lambda: min(ARRIVING_MAX, room()))
        self._is_listening = False
        self._rest: asyncio.TimerHandle | None = None
        self._lines = 0  # in the log, or left out of it
        self._lines_since = 0.0
        self._loop = asyncio.get_running_loop()

    def open(self, sockets: list[socket.socket], factory: Callable[[], asyncio.BaseProtocol]) -> None:
        self._sockets, self._factory = sockets, factory
        self._listen()

    def close(self) -> None:
        """Stops accepting; who has not arrived yet is sent away, who has lives on."""
        self._pause()
        if self._rest is not None:
            self._rest.cancel()
        for sock in self._sockets:
            sock.close()
        self._sockets = []
        for task in self._arriving:
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
            if len(self._arriving) >= ARRIVING_MAX:
                self._pause()  # until somebody has arrived, see _arrived
                return
            try:
                sock, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # too many open files, most likely: no reason to spin
                logger.error("the %s listener cannot accept: %s", self._listener, error.strerror)
                self._pause()
                self._rest = self._loop.call_later(ACCEPT_REST_S, self._listen)
                return
            if len(self._arriving) >= self._room():
                self._refused()
                sock.close()
                continue
            sock.setblocking(False)
            task = self._loop.create_task(self._let_in(sock, _spell(*peer[:2])))
            source = self._arriving[task] = source_of(peer[0])
            task.add_done_callback(self._arrived)
            first = self._crowd.enter(source, task)
            if first is not None:
                self._crowd.leave(source, first)
                self._refused()
                first.cancel()

    def _refused(self) -> None:
        self._stats.connections_total += 1
        self._stats.count("connections_refused")

    def _arrived(self, task: asyncio.Task[None]) -> None:
        self._crowd.leave(self._arriving.pop(task), task)
        if self._rest is None:
            self._listen()

    async def _let_in(self, sock: socket.socket, peer: str) -> None:
        try:
            async with _patience(HANDSHAKE_TIMEOUT_S):
                first = await self._first_byte(sock)
                if first == TLS_HANDSHAKE:
                    await self._shake_hands(sock)
                else:
                    self._send_away(sock)
        except OSError as error:
            sock.close()
            self._failed(peer, _reason(error))
        except BaseException:
            sock.close()
            raise
        else:
            if first not in (TLS_HANDSHAKE, b""):  # nothing: it only looked whether we listen, as load balancers do
                self._failed(peer, NO_TLS)

    async def _first_byte(self, sock: socket.socket) -> bytes:
        """Left where it is, for the handshake to find it. Nothing at all: it has hung up."""
        has_come = asyncio.Event()
        self._loop.add_reader(sock, has_come.set)
        try:
            await has_come.wait()
        finally:
            self._loop.remove_reader(sock)
        return sock.recv(1, socket.MSG_PEEK)

    async def _shake_hands(self, sock: socket.socket) -> None:
        """The listener hears of the connection as the last step."""
        arriving.set(sock)  # in this task only
        await self._loop.connect_accepted_socket(
            self._factory, sock, ssl=self._tls.context(), ssl_shutdown_timeout=SHUTDOWN_TIMEOUT_S
        )

    def _send_away(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):
            if self._plain_answer:
                sock.recv(PLAIN_BYTES_MAX)  # closing on unread bytes would take the answer away again
                sock.send(self._plain_answer)
        sock.close()

    def _failed(self, peer: str, reason: str) -> None:
        self._stats.count("tls_failures")
        now = self._loop.time()
        if now - self._lines_since >= LINES_INTERVAL_S:
            if self._lines > LINES_MAX:
                logger.info(
                    "%d more without TLS at the %s listener before that", self._lines - LINES_MAX, self._listener
                )
            self._lines_since, self._lines = now, 0
        self._lines += 1
        if self._lines <= LINES_MAX:
            logger.info("%s: no TLS connection to the %s listener: %s", peer, self._listener, reason)


@contextlib.asynccontextmanager
async def _patience(seconds: float) -> AsyncIterator[None]:
    """As asyncio.timeout, but looked at several times: after a pause of ours one look proves nothing, for what the
    client has sent meanwhile lies unread in its socket."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def look(left: int) -> None:
        nonlocal timer
        if left:
            timer = loop.call_later(seconds / LOOKS, look, left - 1)
        else:
            waiting.reschedule(loop.time())

    async with asyncio.timeout(None) as waiting:
        look(LOOKS)
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not taken: {error.verify_message}"
    if isinstance(error, ssl.SSLError) and error.reason:
        return REASONS.get(error.reason, error.reason.replace("_", " ").lower())
    if isinstance(error, TimeoutError):
        return f"the handshake took more than {HANDSHAKE_TIMEOUT_S:g} seconds"
    return "it hung up in the middle of the handshake"


def _spell(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
