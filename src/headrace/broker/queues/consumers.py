"""Who gets the next message: round robin among the consumers of the highest priority that have credit."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from headrace.broker.queues.view import View
from headrace.broker.types.message import Message

ROOM_MAX = 65_535  # the largest prefetch; without one, a consumer can be sent what its socket takes


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
    """A consumer as its queue sees it; the listener has one for each basic.consume."""

    tag: str
    priority: int
    no_ack: bool
    exclusive: bool

    def credit(self) -> int:
        """How many messages it may be sent now; 0 also when its connection cannot take more bytes."""

    def deliver(
        self,
        view: View,
        data: Any,
        start: int,
        end: int,
        count_max: int,
        redelivered_below: int,
        expired_until: int,
    ) -> Delivered: ...

    def deliver_message(self, view: View, offset: int, message: Message, redelivered: bool) -> None: ...

    def cancelled(self) -> None:
        """Its queue is gone."""

    def activated(self, active: bool) -> None:
        """It has become, or is no longer, the single active consumer."""


class Consumers:
    """The consumers of one queue, in the order they came."""

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
        # Stable: consumers of one priority stay in the order they came.
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
        """Up to so many of those whose turn it is: of the highest priority at which anybody has credit.

        No more are looked at than are wanted: with one message for many consumers only the first is asked.
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

    def room(self, most: int) -> int:
        """How many messages they may be sent now, as far as somebody wants to know. Those that share the prefetch of
        their channel count it each."""
        found = 0
        for consumer in self._all:
            if self._single_active and consumer is not self.active:
                continue
            found += max(0, min(consumer.credit(), ROOM_MAX))
            if found >= most:
                return most
        return found

    def served(self, consumer: Consumer) -> None:
        """The turn goes to the one after it."""
        self._turn = self._all.index(consumer) + 1
