"""The socket side of an AMQP connection: writes, paused reads, timeouts and heartbeats.

A Connection owns one. The transport does not interpret bytes; see connection.py.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Any

from headrace.broker.metrics.counters import ListenerStats
from headrace.listeners.amqp.counts import SocketCounts
from headrace.listeners.common.addresses import source_of
from headrace.listeners.common.backpressure import ALARM
from headrace.wire.amqp import protocol

logger = logging.getLogger("headrace.amqp")

CLOSE_TIMEOUT_S = 5.0
# Heartbeat checks in a row without a byte from the client before it is disconnected. Elapsed time alone proves
# nothing after the broker itself was suspended.
SILENT_CHECKS_MIN = 3
OUTPUT_BYTES_MAX = 8 << 20  # deliveries pause far below this; past it requests of the client are not processed
COPIED_BYTES_MAX = 256 * 1024
QUICK_ACK: int | None = getattr(socket, "TCP_QUICKACK", None)

# Reasons to pause reading, besides those of backpressure.Flow.
UNPROCESSED, OUTPUT, DISK, LOGIN_DELAY = "unprocessed", "output", "disk", "login delay"


class AmqpTransport:
    def __init__(self, stats: ListenerStats, loop: asyncio.AbstractEventLoop) -> None:
        self.is_closed = False  # nothing is written any more
        self.is_writable = True
        self.heartbeat_s = 0
        self.peer: Any = None
        self.own_address: Any = None
        self.last_read = 0.0
        self.in_method = False  # see write_after_method
        self.paused_for: set[str] = set()
        self.counts = SocketCounts()
        self._stats = stats
        self._loop = loop
        self._now = loop.time
        self._stream: asyncio.Transport
        self._write: Callable[[bytes], None]
        self._socket: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._last_write = self._last_check = 0.0
        self._silent_checks = 0
        self._after_method: list[bytes] = []

    def attach(self, stream: Any, write_high: int) -> None:
        """The socket is connected. Deliveries pause while more than write_high bytes wait to be sent."""
        self._stream = stream
        self._write = stream.write
        self.peer = stream.get_extra_info("peername")
        self.own_address = stream.get_extra_info("sockname")
        sock = stream.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            self._socket = sock
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.set_write_buffer_limits(high=write_high)

    @property
    def source(self) -> str:
        """The client's address or network, see addresses.source_of."""
        return source_of(self.peer[0] if self.peer else None)

    # Writing.

    def write(self, data: bytes) -> None:
        if not self.is_closed:
            self._last_write = self._now()
            self._write(data)
            counts = self.counts
            counts.sent_bytes += len(data)
            counts.writes += 1

    def deliver(self, frames: bytes, count: int, size: int) -> None:
        """Writes the frames of `count` messages with bodies of `size` bytes."""
        self._last_write = self._now()
        self._write(frames)
        counts = self.counts
        counts.sent_bytes += len(frames)
        counts.writes += 1
        stats = self._stats
        stats.messages_out += count
        stats.bytes_out += size

    def deliver_message(self, pieces: "list[bytes | memoryview]", size: int) -> None:
        """Writes the frames of one message, with a body of `size` bytes. A large body is not copied first."""
        if size <= COPIED_BYTES_MAX:
            self.deliver(b"".join(pieces), 1, size)
            return
        self._stream.writelines(pieces)
        self.deliver(b"", 1, size)

    def write_after_method(self, data: bytes) -> None:
        """Writes a notification that a method of this connection caused: the client expects the reply first."""
        if self.in_method:
            self._after_method.append(data)
        else:
            self.write(data)

    def end_method(self) -> None:
        self.in_method = False
        if self._after_method:
            notifications, self._after_method = self._after_method, []
            for data in notifications:
                self.write(data)

    @property
    def output_bytes(self) -> int:
        return self._stream.get_write_buffer_size()

    @property
    def is_flooded(self) -> bool:
        return self._stream.get_write_buffer_size() > OUTPUT_BYTES_MAX

    def acknowledge_now(self) -> None:
        """Sends the TCP acknowledgement at once. tune-ok and publishes without confirms have no reply that could
        carry it: the kernel would delay it by 40 ms, and a client with Nagle's algorithm would wait that long."""
        if self._socket is not None and QUICK_ACK is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, QUICK_ACK, 1)

    # Reading.

    def set_reading_paused(self, reason: str, held: bool) -> None:
        """Reading is paused while there is at least one reason for it."""
        before = bool(self.paused_for)
        (self.paused_for.add if held else self.paused_for.discard)(reason)
        if bool(self.paused_for) != before and not self.is_closed and not self._stream.is_closing():
            (self._stream.pause_reading if self.paused_for else self._stream.resume_reading)()

    def resume_reading(self) -> None:
        """Drops all reasons to pause."""
        for reason in list(self.paused_for):
            self.set_reading_paused(reason, False)

    @property
    def is_held(self) -> bool:
        """Whether the socket is not read because memory or disk is short."""
        return bool(self.paused_for & {ALARM, DISK})

    @property
    def has_tls(self) -> bool:
        return self._stream.get_extra_info("ssl_object") is not None

    def fileno(self) -> int:
        return -1 if self._socket is None else int(self._socket.fileno())

    # One timer: first for the handshake, then for heartbeats, in the end for the client's close-ok.

    def arm(self, seconds: float, callback: Callable[[], None]) -> None:
        self.disarm()
        self._timer = self._loop.call_later(seconds, callback)

    def disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def reply_later(self, seconds: float, reply: Callable[[], None]) -> None:
        """Delays the reply that ends the handshake; nothing is read before it."""
        self.set_reading_paused(LOGIN_DELAY, True)
        self.arm(seconds, reply)

    def start_heartbeats(self) -> None:
        self.disarm()
        if self.heartbeat_s:
            self.arm(self.heartbeat_s / 2, self.check_heartbeat)

    def check_heartbeat(self) -> None:
        """Runs twice per interval: sends a heartbeat if nothing else was sent, and disconnects a client that was
        silent for two intervals."""
        now = self._now()
        if self.paused_for:
            self.last_read = now  # the broker does not read: silence says nothing about the client
        self._silent_checks = 0 if self.last_read >= self._last_check else self._silent_checks + 1
        self._last_check = now
        if self._silent_checks >= SILENT_CHECKS_MIN and now - self.last_read > 2 * self.heartbeat_s:
            logger.info("missed heartbeats from %s: nothing received for %d s", self.peer, 2 * self.heartbeat_s)
            self._stats.count("missed_heartbeats")
            self._stream.abort()
            return
        if now - self._last_write >= self.heartbeat_s / 2 - 0.01:
            self.write(protocol.HEARTBEAT)
        self.arm(self.heartbeat_s / 2, self.check_heartbeat)

    # Closing.

    def close(self) -> None:
        """Closes the socket when the output is sent, or after CLOSE_TIMEOUT_S: a client that does not read would
        keep it open for ever."""
        self.is_closed = True
        self._stream.close()
        self.arm(CLOSE_TIMEOUT_S, self._stream.abort)

    def linger(self) -> None:
        """Waits for the client to close the socket. Some clients still send what they had buffered after
        connection.close: closing now would reset the connection, and they would never read close-ok."""
        self.is_closed = True
        self.paused_for.clear()
        self.arm(CLOSE_TIMEOUT_S, self._stream.abort)

    def abort(self) -> None:
        self._stream.abort()
