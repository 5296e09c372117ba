"""The recent history of the broker's counters, sampled once a second for the dashboard.

The depths of thousands of queues are not summed every second: the more queues, the older the sum may be, so that
sampling costs a fixed small share of the event loop.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from headrace.broker.cooperative import YieldEvery
from headrace.broker.metrics.counters import Stats
from headrace.broker.queues.queue_counts import QueueCounts
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.clock import Clock
from headrace.log.counters import Counters
from headrace.publish_counts import PublishCounts

logger = logging.getLogger("headrace.broker")

INTERVAL_S = 1.0
SAMPLES_MAX = 600
QUEUES_PER_SECOND = 1000  # a thousand queues are summed in about two milliseconds


class Sample(NamedTuple):
    at_ms: int
    records_written: int
    bytes_written: int
    bytes_read: int
    delivered: int
    acked: int
    ready: int
    unacked: int
    sync_count: int
    sync_total_s: float
    messages_in: dict[str, int]  # by listener
    messages_out: dict[str, int]
    traffic: dict[str, int]  # of all queues and exchanges, with the names of RabbitMQ's message_stats


def published_of(hosts: Iterable[VirtualHost]) -> PublishCounts:
    total = PublishCounts()
    for host in hosts:
        host.routing.count_into(total)
    return total


class History:
    """Owned by the broker; `run` is one of its tasks."""

    def __init__(self, stats: Stats, counters: Counters, hosts: Iterable[VirtualHost], clock: Clock) -> None:
        self._stats = stats
        self._counters = counters
        self._hosts = hosts
        self._clock = clock
        self.samples: deque[Sample] = deque(maxlen=SAMPLES_MAX)
        self._depth = (0, 0)
        self._counts = QueueCounts()
        self._published = PublishCounts()
        self._depth_due_s = 0.0
        self._waiters: list[asyncio.Future[None]] = []
        self._has_failed = False

    async def run(self) -> None:
        while True:
            await self._take_safely()
            await asyncio.sleep(INTERVAL_S)

    async def _take_safely(self) -> None:
        """Skip a sample that fails and log the first failure: without later samples the dashboard would freeze."""
        try:
            if self._clock.monotonic() >= self._depth_due_s:
                await self._sum_queues()
            self.take()
        except Exception:
            if not self._has_failed:
                logger.exception("sampling the broker's counters failed")
            self._has_failed = True
        else:
            self._has_failed = False

    def take(self) -> Sample:
        counters, listeners = self._counters, self._stats.listeners
        ready, unacked = self._depth
        published = self._published
        sample = Sample(
            self._clock.now_ms(),
            counters.records_written,
            counters.bytes_written,
            counters.bytes_read,
            self._counts.deliver_get,
            self._counts.ack,
            ready,
            unacked,
            counters.sync_s.count,
            counters.sync_s.total,
            {name: listener.messages_in for name, listener in listeners.items()},
            {name: listener.messages_out for name, listener in listeners.items()},
            {
                "confirm": published.confirmed,
                "return_unroutable": published.returned,
                "drop_unroutable": published.dropped,
                **self._counts.by_name(),
            },
        )
        self.samples.append(sample)
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        return sample

    async def _sum_queues(self) -> None:
        ready = unacked = 0
        counts = QueueCounts()
        counts.add(self._stats.gone.counts)
        now_ms = self._clock.now_ms()
        queues = [queue for host in self._hosts for queue in host.queues.values()]
        async for queue in YieldEvery().each(queues):
            own = queue.counts
            counts.add(own)
            own.observe(queue.published, now_ms)
            if not queue.is_stream:
                ready += queue.ready
                unacked += queue.unacked
        self._depth, self._counts, self._published = (ready, unacked), counts, published_of(self._hosts)
        self._depth_due_s = self._clock.monotonic() + len(queues) / QUEUES_PER_SECOND - INTERVAL_S / 2

    def next(self) -> "asyncio.Future[None]":
        """Done when the next sample is taken."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        return future

    @property
    def depth(self) -> tuple[int, int]:
        return self._depth

    def latest(self) -> Sample:
        return self.samples[-1] if self.samples else self.take()
