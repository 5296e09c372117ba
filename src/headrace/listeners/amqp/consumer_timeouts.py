"""Consumer timeouts: a consumer that sits on a message too long loses its channel, where a queue asks for that.

RabbitMQ does it to everybody after 30 minutes, which kills long tasks. Here it happens only to consumers of
queues with x-consumer-timeout, or with that argument of their own, and for what was delivered to them: others of
their channel may take their time.
"""

import asyncio
from array import array
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from headrace.listeners.amqp.errors import ChannelError
from headrace.wire.amqp.protocol import PRECONDITION_FAILED

if TYPE_CHECKING:
    from headrace.listeners.amqp.consumer import AmqpConsumer

LOOK_S = 0.25
LOOK_MAX_S = 5.0


class Watched:
    """What one consumer has out, by when it was seen first. What is settled before that is never kept."""

    def __init__(self, consumer: "AmqpConsumer", limit_ms: int, now: float) -> None:
        self.consumer = consumer
        self.limit_ms = limit_ms
        self._look_s = min(max(LOOK_S, limit_ms / 1000 / 100), LOOK_MAX_S)
        self._looked = now
        self._new: list[int] = []  # tags since the last look: first, end, first, end
        self._out: deque[tuple[float, array[int]]] = deque()

    def delivered(self, first: int, end: int) -> None:
        if self._new and self._new[-1] == first:
            self._new[-1] = end
        else:
            self._new += (first, end)

    @property
    def is_over(self) -> bool:
        """Nothing is out, and nothing more will be."""
        channel = self.consumer.channel
        is_there = channel.consumers.get(self.consumer.tag) is self.consumer
        return not channel.is_open or not (is_there or self._new or self._out)

    def is_late(self, now: float) -> bool:
        if now - self._looked >= self._look_s - LOOK_S / 2:  # timers may be early by a little
            self._looked = now
            new, self._new = self._new, []
            out = self._unsettled(tag for at in range(0, len(new), 2) for tag in range(new[at], new[at + 1]))
            if out:
                self._out.append((now, out))
        while self._out:
            since, tags = self._out[0]
            out = self._unsettled(tags)
            if out:
                self._out[0] = since, out
                return now - since > self.limit_ms / 1000
            self._out.popleft()
        return False

    def _unsettled(self, tags: Iterable[int]) -> "array[int]":
        ring = self.consumer.channel.state.tags
        return array("Q", (tag for tag in tags if ring.peek(tag, False) is not None))


class ConsumerTimeouts:
    """The consumers that have a limit; looked at while there are any."""

    def __init__(self) -> None:
        self._watched: list[Watched] = []
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, consumer: "AmqpConsumer", limit_ms: int) -> None:
        loop = asyncio.get_running_loop()
        consumer.watched = Watched(consumer, limit_ms, loop.time())
        self._watched.append(consumer.watched)
        if self._timer is None:
            self._timer = loop.call_later(LOOK_S, self._look)

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        for watched in self._watched:
            channel = watched.consumer.channel
            if channel.is_open and watched.is_late(now):
                text = (
                    f"delivery acknowledgement on channel {channel.number} timed out. "
                    f"Timeout value used: {watched.limit_ms} ms"
                )
                channel.connection.fail(ChannelError(PRECONDITION_FAILED, text), channel, 0, 0)
        self._watched = [watched for watched in self._watched if not watched.is_over]
        self._timer = loop.call_later(LOOK_S, self._look) if self._watched else None

    def close(self) -> None:
        self._watched.clear()
        if self._timer is not None:
            self._timer.cancel()
