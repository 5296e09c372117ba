"""Housekeeping: periodic retention, compaction, expiry of cursors, and tasks that other components add."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from headrace.broker.metrics.counters import Stats
from headrace.broker.streams.cursors import Cursors
from headrace.broker.streams.partition import when_loaded
from headrace.broker.streams.streams import Streams
from headrace.clock import Clock
from headrace.errors import Conflict, HeadraceError, StorageError
from headrace.log.log import Log
from headrace.log.maintenance.compaction import is_due_now
from headrace.log.shard import Shard

logger = logging.getLogger("headrace.broker")


class Housekeeping:
    def __init__(self, shard: Shard, streams: Streams, cursors: Cursors, stats: Stats, clock: Clock) -> None:
        self._shard = shard
        self._streams = streams
        self._cursors = cursors
        self._stats = stats
        self._clock = clock
        self._tasks: list[Callable[[], Awaitable[object]]] = []

    def add_task(self, task: Callable[[], Awaitable[object]]) -> None:
        """Run `task` in every round of housekeeping, after retention."""
        self._tasks.append(task)

    async def run(self, interval_s: float) -> None:
        """Compaction runs beside the rest: one that takes an hour must not stop retention. Nor must a task that waits
        for free disk space."""
        compacting: asyncio.Task[None] | None = None
        emptying: asyncio.Task[None] | None = None
        try:
            while True:
                await asyncio.sleep(interval_s)
                if compacting is None or compacting.done():
                    compacting = asyncio.create_task(self._safely(self._compact_all), name="compaction")
                if emptying is None or emptying.done():
                    emptying = asyncio.create_task(self._safely(self._make_room), name="housekeeping")
                    await asyncio.wait([emptying], timeout=interval_s)
                elif self._shard.scheduler.waits_for_room:
                    await self._each_log(self._begin_retention)
        finally:
            for task in (compacting, emptying):
                if task is not None:
                    task.cancel()

    async def once(self) -> None:
        await self._make_room()
        await self._compact_all()

    async def _make_room(self) -> None:
        self._stats.maintenance_runs += 1
        await self._safely(self._expire_cursors)  # may fail on a full disk; retention below frees space
        await self._each_log(self._apply_retention)
        self._shard.maintenance.sweep()
        for task in self._tasks:
            await self._safely(task)

    async def _compact_all(self) -> None:
        await self._each_log(self._compact_if_due)

    async def _each_log(self, task: Callable[[Log], Awaitable[None]]) -> None:
        for stream in self._streams:
            for partition in stream.partitions:
                if not stream.is_deleted:
                    await self._log_safely(partition.log, task)
            await asyncio.sleep(0)  # thousands of logs must not block the event loop

    async def _expire_cursors(self) -> None:
        for name in await self._cursors.expire():
            logger.info("cursor %r was not moved for its maximum age and is dropped", name)

    async def _safely(self, task: Callable[[], Awaitable[object]]) -> None:
        """Log and count a failure, and continue: without housekeeping the disk fills up."""
        try:
            await task()
        except HeadraceError as error:
            self._stats.maintenance_errors += 1
            logger.error("housekeeping failed: %s", error)
        except Exception:
            self._stats.maintenance_errors += 1
            logger.exception("housekeeping failed")

    async def _log_safely(self, log: Log, task: Callable[[Log], Awaitable[None]]) -> None:
        """A damaged log must not stop retention of the others."""
        try:
            await task(log)
        except HeadraceError as error:
            self._stats.maintenance_errors += 1
            if not log.is_closed:
                logger.error("housekeeping of %s failed: %s", log.slug, error)

    async def _apply_retention(self, log: Log) -> None:
        ticket = self._shard.maintenance.starts.apply_retention(log, self._clock.now_ms())
        if ticket is not None:
            await ticket

    async def _begin_retention(self, log: Log) -> None:
        """Start retention without waiting for it: see RoundScheduler.move_starts."""
        self._shard.maintenance.starts.apply_retention(log, self._clock.now_ms())

    async def _compact_if_due(self, log: Log) -> None:
        if log.settings.is_compacted and await self._is_due(log):
            await self._compact(log)

    async def _is_due(self, log: Log) -> bool:
        return await when_loaded(lambda: is_due_now(log, self._clock.now_ms()))

    async def _compact(self, log: Log) -> None:
        done: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self._shard.maintenance.compact(log, lambda _gain, error: None if done.done() else done.set_result(error))
        error = await done
        if error is not None and not isinstance(error, Conflict):  # it is being rewritten: next time
            raise StorageError(f"compaction of {log.slug} failed: {error}") from error
