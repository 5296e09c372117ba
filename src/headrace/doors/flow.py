"""Pausing publishers while memory or disk are short: their sockets are not read, and AMQP clients are told."""

from typing import Any, Protocol


class Publisher(Protocol):
    def hold_reading(self, reason: str, held: bool) -> None: ...
    def tell_blocked(self, reason: str | None) -> None: ...


class Pressure:
    """The publishers of a door, paused and let go together. Consumers are never paused."""

    def __init__(self, broker: Any) -> None:
        self._broker = broker
        self._publishers: set[Publisher] = set()
        self.reason: str | None = None

    def published(self, publisher: Publisher) -> None:
        if publisher not in self._publishers:
            self._publishers.add(publisher)
            if self.reason is not None:
                publisher.tell_blocked(self.reason)
                publisher.hold_reading("pressure", True)

    def forget(self, publisher: Publisher) -> None:
        self._publishers.discard(publisher)

    def changed(self, reason: str | None) -> None:
        if reason == self.reason:
            return
        self.reason = reason
        for publisher in list(self._publishers):
            publisher.tell_blocked(reason)
            publisher.hold_reading("pressure", reason is not None)

    def close(self) -> None:
        self._publishers.clear()
