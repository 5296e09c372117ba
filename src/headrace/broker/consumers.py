"""Who gets the next message: round robin among the consumers of the highest priority that have credit."""

from collections.abc import Iterator
from typing import Any, Protocol

from headrace.broker.message import Message
from headrace.broker.view import View


class Delivered(Protocol):
    """What a consumer took from a chunk; see wire/amqp/deliver.pyi for the same as a tuple."""


class Consumer(Protocol):
    """A consumer as its queue sees it; the door has one for each basic.consume."""

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
    ) -> tuple[int, int, bool, Any, int]:
        """(next offset, delivered, whether the record at next offset needs deliver_message, gaps, body bytes)."""

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

    def next(self) -> tuple[Consumer, int, int] | None:
        """(consumer, its credit, how many of its priority have credit); None when nobody has."""
        if self._single_active:
            if self.active is None:
                return None
            credit = self.active.credit()
            return (self.active, credit, 1) if credit > 0 else None
        everyone = self._all
        count = len(everyone)
        if count == 1:
            credit = everyone[0].credit()
            return (everyone[0], credit, 1) if credit > 0 else None
        best: tuple[Consumer, int] | None = None
        best_at, peers = 0, 0
        for step in range(count):
            at = (self._turn + step) % count
            consumer = everyone[at]
            if best is not None and consumer.priority < best[0].priority:
                continue
            credit = consumer.credit()
            if credit <= 0:
                continue
            if best is None or consumer.priority > best[0].priority:
                best, best_at, peers = (consumer, credit), at, 0
            peers += 1
        if best is None:
            return None
        self._turn = (best_at + 1) % count
        return best[0], best[1], peers
