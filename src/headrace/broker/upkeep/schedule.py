"""Retention, compaction and cursors past their age, for every log, now and then."""

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
        self._chores: list[Callable[[], Awaitable[object]]] = []

    def also(self, chore: Callable[[], Awaitable[object]]) -> None:
        """Something else that wants doing now and then."""
        self._chores.append(chore)

    async def run(self, interval_s: float) -> None:
        """Compaction beside the rest: one that takes an hour must not keep the disk from being emptied elsewhere. Nor
        must a chore that waits for room."""
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
                elif self._shard.intake.waits_for_room:
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
        await self._safely(self._expire_cursors)  # a full disk keeps them: retention is what makes room there
        await self._each_log(self._apply_retention)
        self._shard.maintenance.sweep()
        for chore in self._chores:
            await self._safely(chore)

    async def _compact_all(self) -> None:
        await self._each_log(self._compact_if_due)

    async def _each_log(self, chore: Callable[[Log], Awaitable[None]]) -> None:
        for stream in self._streams:
            for partition in stream.partitions:
                if not stream.is_deleted:
                    await self._log_safely(partition.log, chore)
            await asyncio.sleep(0)  # thousands of logs must not keep the loop to themselves

    async def _expire_cursors(self) -> None:
        for name in await self._cursors.expire():
            logger.info("cursor %r was not moved for its maximum age and is dropped", name)

    async def _safely(self, chore: Callable[[], Awaitable[object]]) -> None:
        """Whatever fails is said and counted, and the rest is done: without housekeeping the disk fills up."""
        try:
            await chore()
        except HeadraceError as error:
            self._stats.maintenance_errors += 1
            logger.error("housekeeping failed: %s", error)
        except Exception:
            self._stats.maintenance_errors += 1
            logger.exception("housekeeping failed")

    async def _log_safely(self, log: Log, chore: Callable[[Log], Awaitable[None]]) -> None:
        """One log that is damaged must not keep retention from all those behind it."""
        try:
            await chore(log)
        except HeadraceError as error:
            self._stats.maintenance_errors += 1
            if not log.is_closed:
                logger.error("housekeeping of %s failed: %s", log.slug, error)

    async def _apply_retention(self, log: Log) -> None:
        ticket = self._shard.maintenance.starts.apply_retention(log, self._clock.now_ms())
        if ticket is not None:
            await ticket

    async def _begin_retention(self, log: Log) -> None:
        """It goes on when it is stored: see Intake.let_starts_pass."""
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
        if error is not None and not isinstance(error, Conflict):  # somebody else rewrites it: another time
            raise StorageError(f"compaction of {log.slug} failed: {error}") from error
