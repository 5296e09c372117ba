"""The socket's side of an AMQP connection: writing, holding back what is read, time-outs and heartbeats.

What the bytes mean is not known here; see connection.py.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.listeners.amqp.methods.handshake import Stage
from headrace.listeners.common.addresses import source_of
from headrace.wire.amqp import protocol

if TYPE_CHECKING:
    from headrace.listeners.amqp.listener import AmqpListener

logger = logging.getLogger("headrace.amqp")

HANDSHAKE_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
SILENT_LOOKS_MIN = 3  # without a word in between, besides the time: after a pause of ours one look proves nothing
OUTPUT_BYTES_MAX = 8 << 20  # deliveries stop long before; past it a client that asks and does not read is not read
QUICK_ACK: int | None = getattr(socket, "TCP_QUICKACK", None)


class AmqpTransport(asyncio.Protocol):
    def __init__(self, listener: "AmqpListener") -> None:
        self.listener = listener
        self.stage = Stage.HEADER
        self.heartbeat_s = 0
        self.is_writable = True
        self.peer: Any = None
        self.source = ""
        self.own_address: Any = None
        self._transport: asyncio.Transport
        self._socket: Any = None
        self._holds: set[str] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._heard = self._spoke = self._looked = 0.0
        self._silent_looks = 0
        self._loop = asyncio.get_running_loop()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self.peer = transport.get_extra_info("peername")
        self.source = source_of(self.peer[0] if self.peer else None)
        self.own_address = transport.get_extra_info("sockname")
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            self._socket = sock
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        transport.set_write_buffer_limits(high=self.listener.flow.write_high())
        if not self._is_admitted():
            transport.close()
            return
        self._arm(HANDSHAKE_TIMEOUT_S, self._handshake_timeout)

    def _is_admitted(self) -> bool:
        raise NotImplementedError

    def pause_writing(self) -> None:
        self.is_writable = False

    def eof_received(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        if self.stage is not Stage.CLOSED:
            self._spoke = self._loop.time()
            self._transport.write(data)

    def hold_reading(self, reason: str, held: bool) -> None:
        """Reading stops while anybody has a reason to hold it."""
        before = bool(self._holds)
        (self._holds.add if held else self._holds.discard)(reason)
        if bool(self._holds) != before and self.stage is not Stage.CLOSED and not self._transport.is_closing():
            (self._transport.pause_reading if self._holds else self._transport.resume_reading)()

    def acknowledge_now(self) -> None:
        """tune-ok and publishes without confirms have no answer. Clients with Nagle's algorithm hold back what
        follows until TCP has acknowledged them, and TCP waits 40 ms for an answer to ride on."""
        if self._socket is not None and QUICK_ACK is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, QUICK_ACK, 1)

    @property
    def has_tls(self) -> bool:
        return self._transport.get_extra_info("ssl_object") is not None

    @property
    def is_flooded(self) -> bool:
        return self._transport.get_write_buffer_size() > OUTPUT_BYTES_MAX

    @property
    def is_held(self) -> bool:
        """Whether its socket is not read because of memory or disk."""
        return bool(self._holds & {"pressure", "disk"})

    def fileno(self) -> int:
        return -1 if self._socket is None else int(self._socket.fileno())

    # Time. One timer: for the handshake, then for heartbeats, in the end for the client's last word.

    def _arm(self, seconds: float, callback: Callable[[], None]) -> None:
        self._disarm()
        self._timer = self._loop.call_later(seconds, callback)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _handshake_timeout(self) -> None:
        self._timer = None
        self.listener.stats.count("handshake_timeouts")
        self.drop()

    def answer_late(self, seconds: float, answer: Callable[[], None]) -> None:
        """The handshake ends with this answer: nothing more is read before it."""
        self.hold_reading("late", True)
        self._arm(seconds, answer)

    def start_heartbeats(self) -> None:
        self._disarm()
        if self.heartbeat_s:
            self._arm(self.heartbeat_s / 2, self._beat)

    def _beat(self) -> None:
        """Twice per interval: speak if we were silent, hang up if the client was for two intervals."""
        now = self._loop.time()
        if self._holds:
            self._heard = now  # we do not read: its silence is ours
        self._silent_looks = 0 if self._heard >= self._looked else self._silent_looks + 1
        self._looked = now
        if self._silent_looks >= SILENT_LOOKS_MIN and now - self._heard > 2 * self.heartbeat_s:
            logger.info("no heartbeat from %s for %d s", self.peer, 2 * self.heartbeat_s)
            self.listener.stats.count("missed_heartbeats")
            self._transport.abort()
            return
        if now - self._spoke >= self.heartbeat_s / 2 - 0.01:
            self.write(protocol.HEARTBEAT)
        self._arm(self.heartbeat_s / 2, self._beat)

    # Hanging up.

    def drop(self) -> None:
        """What is written goes out first, if the client reads it soon: one that does not would stay for ever."""
        self.stage = Stage.CLOSED
        self._transport.close()
        self._arm(CLOSE_TIMEOUT_S, self._transport.abort)

    def abort(self) -> None:
        self._transport.abort()

    def abort_for(self, reason: str) -> None:
        logger.warning("closing AMQP connection from %s: %s", self.peer, reason)
        self.listener.stats.count("shed")
        self._transport.abort()
