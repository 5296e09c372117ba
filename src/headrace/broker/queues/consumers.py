"""The consumers of a queue. Messages go round-robin to the consumers of the highest priority that has credit."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from headrace.broker.queues.view import View
from headrace.broker.types.message import Message
from headrace.record.types import Buffer

ROOM_MAX = 65_535  # the largest prefetch; counted for a consumer without one


class Delivered(Protocol):
    """The outcome of Consumer.deliver."""

    @property
    def next_offset(self) -> int: ...
    @property
    def count(self) -> int: ...
    @property
    def body_bytes(self) -> int: ...
    @property
    def needs_message(self) -> bool:
        """Whether the record at next_offset needs deliver_message."""

    @property
    def gaps(self) -> Sequence[tuple[int, int]]:
        """Ranges below next_offset that hold no record."""


class Consumer(Protocol):
    """A consumer as its queue sees it; the AMQP listener has one for each basic.consume."""

    tag: str
    priority: int
    no_ack: bool
    exclusive: bool

    def credit(self) -> int:
        """How many messages may be sent now; 0 if the connection's output buffer is full."""

    def deliver(
        self,
        view: View,
        data: Buffer,
        start: int,
        end: int,
        count_max: int,
        redelivered_below: int,
        expired_until: int,
    ) -> Delivered:
        """Send messages of the batches in `data`, at most count_max."""

    def deliver_message(self, view: View, offset: int, message: Message, redelivered: bool) -> None: ...

    def cancelled(self) -> None:
        """The queue has been deleted."""

    def activated(self, active: bool) -> None:
        """The consumer has become, or is no longer, the single active one."""


class Consumers:
    """The consumers of one queue, by priority and then in the order they were added."""

    def __init__(self, *, single_active: bool) -> None:
        self._single_active = single_active
        self._all: list[Consumer] = []
        self._turn = 0
        self.active: Consumer | None = None

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Consumer]:
        return iter(list(self._all))

    @property
    def exclusive(self) -> bool:
        return any(consumer.exclusive for consumer in self._all)

    def add(self, consumer: Consumer) -> None:
        self._all.append(consumer)
        # The sort is stable: consumers of one priority stay in the order they were added.
        self._all.sort(key=lambda c: -c.priority)
        if self._single_active and self.active is None:
            self._activate(consumer)

    def remove(self, consumer: Consumer) -> None:
        if consumer not in self._all:
            return
        at = self._all.index(consumer)
        self._all.remove(consumer)
        if at < self._turn:
            self._turn -= 1
        if self.active is consumer:
            self.active = None
            if self._all:
                self._activate(self._all[0])

    def _activate(self, consumer: Consumer) -> None:
        self.active = consumer
        consumer.activated(True)

    def in_turn(self, wanted: int) -> list[Consumer]:
        """Up to `wanted` consumers with credit, all of the highest priority that has one, next in turn first.

        Stops as soon as it has found enough: for one message and many consumers, usually only one is asked.
        """
        if self._single_active:
            return [self.active] if self.active is not None and self.active.credit() > 0 else []
        everyone = self._all
        start = 0
        while start < len(everyone):
            end = start + 1
            while end < len(everyone) and everyone[end].priority == everyone[start].priority:
                end += 1
            turn = self._turn if start <= self._turn < end else start
            found: list[Consumer] = []
            for at in (*range(turn, end), *range(start, turn)):
                if everyone[at].credit() > 0:
                    found.append(everyone[at])
                    if len(found) == wanted:
                        break
            if found:
                return found
            start = end
        return []

    def total_credit(self, most: int) -> int:
        """How many messages the consumers have credit for, at most `most`. Consumers that share the prefetch of their
        channel each count it."""
        found = 0
        for consumer in self._all:
            if self._single_active and consumer is not self.active:
                continue
            found += max(0, min(consumer.credit(), ROOM_MAX))
            if found >= most:
                return most
        return found

    def served(self, consumer: Consumer) -> None:
        """The next turn is that of the consumer after this one."""
        self._turn = self._all.index(consumer) + 1
