"""Consumer timeouts: closes the channel of a consumer that leaves a message unacknowledged for too long.

RabbitMQ does this to every consumer after 30 minutes, which kills long tasks. Here it applies only to consumers with
x-consumer-timeout, set on the queue or on the consumer itself. Other consumers of the channel are not checked.
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Iterable
from typing import Protocol

from headrace.errors import HeadraceError
from headrace.listeners.amqp.errors import ChannelError
from headrace.wire.amqp.protocol import PRECONDITION_FAILED
from headrace.wire.amqp.tags import TagRing

CHECK_S = 0.25
CHECK_MAX_S = 5.0


class TimedConsumer(Protocol):
    """A consumer as its timeout sees it."""

    watched: "WatchedDeliveries | None"

    @property
    def tags(self) -> TagRing:
        """Of its channel."""

    @property
    def channel_number(self) -> int: ...

    @property
    def is_open(self) -> bool:
        """Whether its channel is."""

    @property
    def is_subscribed(self) -> bool:
        """False once it is cancelled. Its unacknowledged messages are still checked."""

    def fail_channel(self, error: HeadraceError) -> None: ...


class WatchedDeliveries:
    """The unacknowledged deliveries of one consumer, with the time of the check that first found them.
    Deliveries that are settled before the next check are not kept."""

    def __init__(self, consumer: TimedConsumer, limit_ms: int, now: float) -> None:
        self.consumer = consumer
        self.limit_ms = limit_ms
        self._check_s = min(max(CHECK_S, limit_ms / 1000 / 100), CHECK_MAX_S)
        self._checked = now
        self._new: list[int] = []  # tags since the last check: first, end, first, end
        self._unacked: deque[tuple[float, array[int]]] = deque()

    def delivered(self, first: int, end: int) -> None:
        if self._new and self._new[-1] == first:
            self._new[-1] = end
        else:
            self._new += (first, end)

    @property
    def is_finished(self) -> bool:
        """Nothing is unacknowledged, and nothing more will be delivered."""
        consumer = self.consumer
        return not consumer.is_open or not (consumer.is_subscribed or self._new or self._unacked)

    def is_late(self, now: float) -> bool:
        if now - self._checked >= self._check_s - CHECK_S / 2:  # timers may fire a little early
            self._checked = now
            new, self._new = self._new, []
            unacked = self._unsettled(tag for at in range(0, len(new), 2) for tag in range(new[at], new[at + 1]))
            if unacked:
                self._unacked.append((now, unacked))
        while self._unacked:
            since, tags = self._unacked[0]
            unacked = self._unsettled(tags)
            if unacked:
                self._unacked[0] = since, unacked
                return now - since > self.limit_ms / 1000
            self._unacked.popleft()
        return False

    def _unsettled(self, tags: Iterable[int]) -> "array[int]":
        ring = self.consumer.tags
        return array("Q", (tag for tag in tags if ring.peek(tag, False) is not None))


class ConsumerTimeouts:
    """Checks the consumers that have a timeout; runs a timer only while there are any."""

    def __init__(self) -> None:
        self._watched: list[WatchedDeliveries] = []
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, consumer: TimedConsumer, limit_ms: int) -> None:
        loop = asyncio.get_running_loop()
        consumer.watched = WatchedDeliveries(consumer, limit_ms, loop.time())
        self._watched.append(consumer.watched)
        if self._timer is None:
            self._timer = loop.call_later(CHECK_S, self._check)

    def _check(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for watched in self._watched:
            consumer = watched.consumer
            if consumer.is_open and watched.is_late(now):
                text = (
                    f"delivery acknowledgement on channel {consumer.channel_number} timed out. "
                    f"Timeout value used: {watched.limit_ms} ms"
                )
                consumer.fail_channel(ChannelError(PRECONDITION_FAILED, text))
        self._watched = [watched for watched in self._watched if not watched.is_finished]
        self._timer = loop.call_later(CHECK_S, self._check) if self._watched else None

    def close(self) -> None:
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
