"""Counts of what a queue has done since the broker started, with the names of RabbitMQ's message_stats.

They are counted once per batch. When a queue was last active is not recorded on the way: the broker's history compares
the counts about once a second (metrics/history.py).
"""

from dataclasses import dataclass


@dataclass(slots=True)
class QueueCounts:
    deliver: int = 0  # to consumers that acknowledge
    deliver_no_ack: int = 0
    get: int = 0  # with basic.get, to be acknowledged
    get_no_ack: int = 0
    get_empty: int = 0
    redeliver: int = 0  # those of the four above that had been delivered before
    ack: int = 0
    _seen: int = -1
    _active_ms: int = 0

    @property
    def deliver_get(self) -> int:
        """All deliveries: to consumers and by basic.get, with and without acknowledgement."""
        return self.deliver + self.deliver_no_ack + self.get + self.get_no_ack

    def add(self, other: "QueueCounts") -> None:
        self.deliver += other.deliver
        self.deliver_no_ack += other.deliver_no_ack
        self.get += other.get
        self.get_no_ack += other.get_no_ack
        self.get_empty += other.get_empty
        self.redeliver += other.redeliver
        self.ack += other.ack

    def by_name(self) -> dict[str, int]:
        return {
            "deliver": self.deliver,
            "deliver_no_ack": self.deliver_no_ack,
            "get": self.get,
            "get_no_ack": self.get_no_ack,
            "get_empty": self.get_empty,
            "deliver_get": self.deliver_get,
            "redeliver": self.redeliver,
            "ack": self.ack,
        }

    # Activity.

    def observe(self, published: int, now_ms: int) -> None:
        """Note the time if anything has been counted since the last call."""
        seen = published + self.deliver_get + self.get_empty + self.ack
        if seen != self._seen:
            self._seen, self._active_ms = seen, now_ms

    def idle_since_ms(self, published: int) -> int | None:
        """When the queue was last seen active; None if it is active, or was never observed."""
        seen = published + self.deliver_get + self.get_empty + self.ack
        return self._active_ms if seen == self._seen else None
