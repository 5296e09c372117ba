"""Kafka's coordinators: groups, share groups, producers and transactions, opened and closed together.

They depend on each other (a transaction commits offsets of groups) and share the state store and the timers.
"""

import asyncio
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any

from headrace.broker.groups.config_store import GroupConfigs
from headrace.broker.groups.coordinator import Groups
from headrace.broker.groups.member_budget import MemberBudget
from headrace.broker.groups.settings import GroupSettings
from headrace.broker.groups.share.groups import ShareGroups
from headrace.broker.groups.timers import ForgivingTimers
from headrace.broker.streams.streams import Stream, Streams, is_topic_name
from headrace.broker.transactions.coordinator import Transactions
from headrace.broker.transactions.producers import SNAPSHOT_INTERVAL_S, Producers
from headrace.clock import Clock
from headrace.log.shard import Shard


class TopicCounts(Mapping[str, int]):
    """The number of partitions of each topic, looked up lazily: a heartbeat needs a few of thousands of topics.

    `now` returns another object after each change of the topics, so groups can detect a change by identity."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._version = streams.version

    def now(self) -> "TopicCounts":
        return self if self._version == self._streams.version else TopicCounts(self._streams)

    def __getitem__(self, name: str) -> int:
        stream = self._streams.find(name)
        if stream is None or not is_topic_name(name):
            raise KeyError(name)
        return len(stream.partitions)

    def __iter__(self) -> Iterator[str]:
        return (stream.name for stream in self._streams.list() if is_topic_name(stream.name))

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Coordination:
    """Must be made on the event loop it will live on, after the shard and the streams."""

    def __init__(self, shard: Shard, streams: Streams, clock: Clock, settings: GroupSettings) -> None:
        self._loop = asyncio.get_running_loop()
        self._topics, timers = TopicCounts(streams), ForgivingTimers(self._loop)
        self.member_budget = MemberBudget(settings.members_bytes_max)
        self.group_configs = GroupConfigs(shard)
        self.shares = ShareGroups(shard, clock, timers, self._counts, self.member_budget, self.group_configs)
        self.groups = Groups(
            settings, clock, timers, shard.group, self._counts, self.group_configs.get, self.member_budget
        )
        self.producers = Producers(shard, clock)
        self.transactions = Transactions(shard, clock, timers, self.producers, self.groups.offsets, self._spawn)
        self._tasks: set[asyncio.Task[Any]] = set()
        self.shares.load()
        self.groups.load(shard.state.items)
        self.producers.load()
        self.transactions.load()
        streams.on_delete(self._forget_stream)
        self._timer = self._loop.call_later(SNAPSHOT_INTERVAL_S, self._snapshot)
        self._snapshots: asyncio.Task[None] | None = None

    def close(self) -> None:
        """Call it before the shard is closed."""
        self._timer.cancel()
        if self._snapshots is not None:
            self._snapshots.cancel()
        self.groups.close()
        self.shares.close()
        self.transactions.close()
        self.producers.snapshot_all()

    def _counts(self) -> TopicCounts:
        self._topics = self._topics.now()
        return self._topics

    def _snapshot(self) -> None:
        self._timer = self._loop.call_later(SNAPSHOT_INTERVAL_S, self._snapshot)
        if self._snapshots is None or self._snapshots.done():
            self._snapshots = self._loop.create_task(self.producers.snapshot_cooperatively())

    async def _forget_stream(self, stream: Stream) -> None:
        if stream.vhost == "/":
            self.groups.topic_deleted(stream.name)
            self.shares.topic_deleted(stream.name, stream.document.logs)
        self.transactions.logs_deleted(stream.document.logs)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
