"""What connections do under pressure: publishers are slowed, told, and no longer read; the greedy are closed.

The broker's Pressure decides; each listener has one Flow that carries it out for its connections. Consumers are
never held. A client that only holds memory (it does not read what it asked for, or does not finish what it began
to send) is closed when memory stays short: it can come back, and what it had not settled is delivered again.
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
OUTPUT_SHARE = 8  # this part of the memory limit may be waiting for clients to read it
CROWD = 100  # connections that are expected: who comes early must not get what those after it need
GREEDY_BYTES = 64 << 10  # who holds less is left alone
CLOSE_AFTER_S = 5.0  # of an alarm: caches and transient queues are asked first
DELAY_S_MIN = 0.001
HANG_UP_LOOK_S = 1.0
ALARM, SLOW, CROWD_OF_LARGE = "pressure", "slow", "large"


class Buffered(Protocol):
    def abort_for(self, reason: str) -> None: ...

    @property
    def buffered_bytes(self) -> int:
        """What is kept in memory for it, in both directions."""


class Client(Buffered, Protocol):
    """A connection as its listener's Flow sees it."""

    def hold_reading(self, reason: str, held: bool) -> None: ...
    def tell_blocked(self, reason: str | None) -> None: ...
    def fileno(self) -> int: ...

    @property
    def is_sending(self) -> bool:
        """Whether it has begun to send a message that is not whole yet."""


class Buffers:
    """Of a listener's connections, held until they are read: see pressure.Holder."""

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
            client.abort_for(f"memory is short, and {size:,} bytes wait in buffers of this connection")
            freed += size
        return freed


class Flow(Buffers):
    """The connections of a listener, and their buffers."""

    def __init__(
        self, listener: str, pressure: Pressure, connections: Collection[Client], *, slows: bool = True
    ) -> None:
        super().__init__(listener, connections)
        self.pressure = pressure
        self._connections = connections
        self._slows = slows  # by not reading; the Kafka listener tells its clients how long to wait instead
        self._publishers: set[Client] = set()
        self._slowed: dict[Client, asyncio.TimerHandle] = {}
        self._told: str | None = pressure.paused_because
        self._loop = asyncio.get_running_loop()
        self._paused_at = 0.0
        self._holds_large = False
        self._look: asyncio.TimerHandle | None = None
        pressure.on_change(self._changed)
        pressure.add_holder(self)

    def write_high(self) -> int:
        """Bytes that may wait for one client to read them before it gets no more deliveries."""
        fair = self.pressure.limits.memory_bytes // OUTPUT_SHARE // max(CROWD, len(self._connections))
        return max(WRITE_HIGH_MIN, min(WRITE_HIGH_MAX, fair))

    def answer_bytes_max(self) -> int:
        """What one answer may hold, where a client may ask for as much as it likes and then not read it."""
        fair = self.pressure.limits.memory_bytes // OUTPUT_SHARE // max(CROWD, len(self._connections))
        return max(WRITE_HIGH_MIN, fair)

    # Publishers.

    def published(self, client: Client) -> None:
        if client not in self._publishers:
            self._publishers.add(client)
            if self._told is not None:
                client.tell_blocked(self._told)
                client.hold_reading(ALARM, True)

    def received(self, client: Client, size: int) -> None:
        """Bytes of a client came in, whatever they are."""
        self.pressure.took(size)
        if self._holds_large and client.is_sending:
            client.hold_reading(CROWD_OF_LARGE, True)
        if self._told is not None:
            if client.is_sending:
                self.published(client)
        elif self._slows and self.pressure.verdict.level and client in self._publishers:
            self._slow(client, self.pressure.delay_s(size))

    def hold_large(self, held: bool) -> None:
        """Whether enough that is large is here already: who sends something that does not come at once is not read."""
        if held is self._holds_large:
            return
        self._holds_large = held
        for client in self._connections:
            if not held or client.is_sending:
                client.hold_reading(CROWD_OF_LARGE, held)

    def _slow(self, client: Client, delay_s: float) -> None:
        if delay_s >= DELAY_S_MIN and client not in self._slowed:
            client.hold_reading(SLOW, True)
            self._slowed[client] = self._loop.call_later(delay_s, self._let_go, client)

    def _let_go(self, client: Client) -> None:
        if self._slowed.pop(client, None) is not None:
            client.hold_reading(SLOW, False)

    def _changed(self, verdict: Verdict) -> None:
        if (verdict.paused_by is None) == (self._told is None):
            return  # a client that was told about the memory need not hear that the disk is short, too
        self._told = self.pressure.paused_because
        for client in list(self._publishers):
            client.tell_blocked(self._told)
            client.hold_reading(ALARM, self._told is not None)
        self._stop_looking()
        if self._told is not None:
            self._paused_at = self._loop.time()
            self._look = self._loop.call_later(HANG_UP_LOOK_S, self._look_for_hang_ups)

    def _look_for_hang_ups(self) -> None:
        """Who is not read cannot be heard hanging up, and would keep its queues and buffers until the alarm is over:
        which might be just what the alarm waits for."""
        held = {client.fileno(): client for client in self._publishers}
        poller = select.poll()
        for number in held:
            if number >= 0:
                poller.register(number, select.POLLRDHUP)
        lasts = self._loop.time() - self._paused_at >= CLOSE_AFTER_S
        for number, event in poller.poll(0):
            # What it sent before it left is worth waiting for, for a while.
            if lasts or event & (select.POLLHUP | select.POLLERR) or not _unread_bytes(number):
                held[number].abort_for("it hung up while publishers are paused")
        self._look = self._loop.call_later(HANG_UP_LOOK_S, self._look_for_hang_ups)

    def _stop_looking(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def forget(self, client: Client) -> None:
        self._publishers.discard(client)
        timer = self._slowed.pop(client, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        self._stop_looking()
        for timer in self._slowed.values():
            timer.cancel()
        self._slowed.clear()
        self._publishers.clear()


def _unread_bytes(number: int) -> int:
    try:
        return int(struct.unpack("i", fcntl.ioctl(number, termios.FIONREAD, bytes(4)))[0])
    except OSError:
        return 0
