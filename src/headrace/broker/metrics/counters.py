"""Counters of the broker above the log: plain numbers, read by a scrape of the metrics."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from headrace.broker.queues.queue_counts import QueueCounts
from headrace.broker.queues.vhost_services import VhostServices
from headrace.log.counters import Histogram

STALL_S = 0.05  # an event-loop iteration this late is counted as a stall
GC_BUCKETS_S = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5)
STALL_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


@dataclass(slots=True)
class ListenerStats:
    """The counters of one listener; it adds its own kinds of events under `events`."""

    connections: int = 0
    connections_total: int = 0
    messages_in: int = 0
    messages_out: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    events: dict[str, int] = field(default_factory=dict)

    def count(self, event: str) -> None:
        self.events[event] = self.events.get(event, 0) + 1


class Counted(Protocol):
    """The counters of a queue."""

    @property
    def counts(self) -> QueueCounts: ...
    @property
    def vhost(self) -> VhostServices: ...
    @property
    def dead_lettered(self) -> int: ...


@dataclass(slots=True)
class Tally:
    """The counts of deleted queues: without them, totals over all queues would fall, which no counter may."""

    counts: QueueCounts = field(default_factory=QueueCounts)
    dead_lettered: int = 0

    def add(self, queue: Counted) -> None:
        self.counts.add(queue.counts)
        self.dead_lettered += queue.dead_lettered
        queue.vhost.deleted_counts.add(queue.counts)


@dataclass(slots=True)
class Stats:
    started_ms: int = 0
    listeners: dict[str, ListenerStats] = field(default_factory=dict)
    gone: Tally = field(default_factory=Tally)
    loop_stall_s: Histogram = field(default_factory=lambda: Histogram(STALL_BUCKETS_S))
    gc_pause_s: Histogram = field(default_factory=lambda: Histogram(GC_BUCKETS_S))
    maintenance_runs: int = 0
    maintenance_errors: int = 0
    certificate_expires_s: Callable[[], float] | None = None  # in seconds since 1970; None without TLS

    def listener(self, name: str) -> ListenerStats:
        return self.listeners.setdefault(name, ListenerStats())

    def loop_came_back(self, late_s: float) -> None:
        if late_s > STALL_S:
            self.loop_stall_s.observe(late_s)


__all__ = ["Counted", "Histogram", "ListenerStats", "Stats", "Tally"]
