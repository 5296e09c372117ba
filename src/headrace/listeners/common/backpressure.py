"""Back-pressure for the connections of a listener: throttles and pauses publishers, closes clients that hold memory.

The broker's Pressure decides; each listener has one Flow that applies the decision to its connections. Consumers are
never paused. A client that holds memory because it does not read its responses, or does not finish a message, is
closed when memory stays short: it can reconnect, and its unsettled messages are delivered again.
"""

import asyncio
import fcntl
import select
import struct
import termios
from collections.abc import Collection
from typing import Protocol

from headrace.broker.pressure.pressure import Pressure, Verdict

WRITE_HIGH_MAX = 1 << 20
WRITE_HIGH_MIN = 64 << 10
OUTPUT_SHARE = 8  # an eighth of the memory limit may wait for clients to read it
CROWD = 100  # connections to expect: early ones must leave memory to those that come later
GREEDY_BYTES = 64 << 10  # connections that hold less are not closed
CLOSE_AFTER_S = 5.0  # after an alarm begins: caches and transient queues release memory first
DELAY_S_MIN = 0.001
DISCONNECT_POLL_S = 1.0
ALARM, SLOW, TOO_MANY_LARGE = "pressure", "slow", "large"


class Buffered(Protocol):
    def abort_for(self, reason: str) -> None: ...

    @property
    def buffered_bytes(self) -> int:
        """Memory that its buffers take, in both directions."""


class FlowClient(Buffered, Protocol):
    """A connection as Flow sees it."""

    def set_reading_paused(self, reason: str, held: bool) -> None: ...
    def notify_blocked(self, reason: str | None) -> None: ...
    def fileno(self) -> int: ...

    @property
    def is_sending(self) -> bool:
        """Whether it has sent only a part of a message so far."""


class Buffers:
    """The buffers of a listener's connections as reclaimable memory; see pressure.Holder."""

    patience_s = CLOSE_AFTER_S

    def __init__(self, listener: str, connections: Collection[Buffered]) -> None:
        self.name = f"{listener}_connections"
        self._buffered = connections

    def held_bytes(self) -> int:
        return sum(client.buffered_bytes for client in self._buffered)

    def shed(self, wanted_bytes: int) -> int:
        greedy = [(size, client) for client in self._buffered if (size := client.buffered_bytes) >= GREEDY_BYTES]
        freed = 0
        for size, client in sorted(greedy, key=lambda pair: pair[0], reverse=True):
            if freed >= wanted_bytes:
                break
            client.abort_for(f"memory is short, and the buffers of this connection hold {size:,} bytes")
            freed += size
        return freed


class Flow(Buffers):
    """Applies back-pressure to the connections of one listener."""

    def __init__(
        self, listener: str, pressure: Pressure, connections: Collection[FlowClient], *, slows: bool = True
    ) -> None:
        super().__init__(listener, connections)
        self.pressure = pressure
        self._connections = connections
        self._slows = slows  # by pausing reads; the Kafka listener sends throttle times instead
        self.publishers: set[FlowClient] = set()
        self._slowed: dict[FlowClient, asyncio.TimerHandle] = {}
        self._blocked_reason: str | None = pressure.paused_because
        self._loop = asyncio.get_running_loop()
        self._paused_at = 0.0
        self._pauses_large = False
        self._poll: asyncio.TimerHandle | None = None
        pressure.on_change(self._changed)
        pressure.add_holder(self)

    def write_high(self) -> int:
        """Bytes that may wait to be sent to one client before its deliveries are paused."""
        fair = self.pressure.limits.memory_bytes // OUTPUT_SHARE // max(CROWD, len(self._connections))
        return max(WRITE_HIGH_MIN, min(WRITE_HIGH_MAX, fair))

    def answer_bytes_max(self) -> int:
        """Size limit of one response, for requests that can ask for any amount of data."""
        fair = self.pressure.limits.memory_bytes // OUTPUT_SHARE // max(CROWD, len(self._connections))
        return max(WRITE_HIGH_MIN, fair)

    # Publishers.

    def published(self, client: FlowClient) -> None:
        if client not in self.publishers:
            self.publishers.add(client)
            if self._blocked_reason is not None:
                client.notify_blocked(self._blocked_reason)
                client.set_reading_paused(ALARM, True)

    def received(self, client: FlowClient, size: int) -> None:
        """A client has sent `size` bytes of any kind."""
        self.pressure.count_received(size)
        if self._pauses_large and client.is_sending:
            client.set_reading_paused(TOO_MANY_LARGE, True)
        if self._blocked_reason is not None:
            if client.is_sending:
                self.published(client)
        elif self._slows and self.pressure.verdict.level and client in self.publishers:
            self._slow(client, self.pressure.delay_s(size))

    def pause_large(self, held: bool) -> None:
        """Pauses clients in the middle of a message while enough large messages are being received already."""
        if held is self._pauses_large:
            return
        self._pauses_large = held
        for client in self._connections:
            if not held or client.is_sending:
                client.set_reading_paused(TOO_MANY_LARGE, held)

    def _slow(self, client: FlowClient, delay_s: float) -> None:
        if delay_s >= DELAY_S_MIN and client not in self._slowed:
            client.set_reading_paused(SLOW, True)
            self._slowed[client] = self._loop.call_later(delay_s, self._release, client)

    def _release(self, client: FlowClient) -> None:
        if self._slowed.pop(client, None) is not None:
            client.set_reading_paused(SLOW, False)

    def _changed(self, verdict: Verdict) -> None:
        if (verdict.paused_by is None) == (self._blocked_reason is None):
            return  # clients that are blocked because of memory need no second notification about the disk
        self._blocked_reason = self.pressure.paused_because
        for client in list(self.publishers):
            client.notify_blocked(self._blocked_reason)
            client.set_reading_paused(ALARM, self._blocked_reason is not None)
        self._stop_polling()
        if self._blocked_reason is not None:
            self._paused_at = self._loop.time()
            self._poll = self._loop.call_later(DISCONNECT_POLL_S, self._close_disconnected)

    def _close_disconnected(self) -> None:
        """Finds clients that disconnected while their socket is not read. They would keep their queues and buffers
        until the alarm ends, which may be what the alarm waits for."""
        held = {client.fileno(): client for client in self.publishers}
        poller = select.poll()
        for number in held:
            if number >= 0:
                poller.register(number, select.POLLRDHUP)
        lasts = self._loop.time() - self._paused_at >= CLOSE_AFTER_S
        for number, event in poller.poll(0):
            # Bytes that it sent before it disconnected are worth waiting for, until CLOSE_AFTER_S.
            if lasts or event & (select.POLLHUP | select.POLLERR) or not _unread_bytes(number):
                held[number].abort_for("the client disconnected while publishers are paused")
        self._poll = self._loop.call_later(DISCONNECT_POLL_S, self._close_disconnected)

    def _stop_polling(self) -> None:
        if self._poll is not None:
            self._poll.cancel()
            self._poll = None

    def forget(self, client: FlowClient) -> None:
        self.publishers.discard(client)
        timer = self._slowed.pop(client, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        self._stop_polling()
        for timer in self._slowed.values():
            timer.cancel()
        self._slowed.clear()
        self.publishers.clear()


def _unread_bytes(number: int) -> int:
    try:
        return int(struct.unpack("i", fcntl.ioctl(number, termios.FIONREAD, bytes(4)))[0])
    except OSError:
        return 0
