"""The broker: opens what is on disk and holds the registries. Each concept lives in a module of its own."""

import asyncio
import contextlib
import errno
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import msgspec

from headrace.broker.access.users import Users
from headrace.broker.catalog.catalog import Catalog
from headrace.broker.clients import Clients
from headrace.broker.coordination import Coordination
from headrace.broker.groups.settings import GroupSettings
from headrace.broker.metrics.counters import Stats
from headrace.broker.metrics.history import History
from headrace.broker.pressure.pressure import Pressure
from headrace.broker.pressure.reclaimable import Cache, ReadAhead
from headrace.broker.queues.dead_letter_browser import DeadLetterBrowser
from headrace.broker.queues.flush import SETTLE_TABLE
from headrace.broker.queues.view import fold_settles
from headrace.broker.schemas.registry import Schemas
from headrace.broker.sinks.ledger import Ledger
from headrace.broker.sinks.pipeline_reports import Pipelines
from headrace.broker.sinks.uploads import Uploads
from headrace.broker.standbys import Standbys
from headrace.broker.streams import publish as publishing
from headrace.broker.streams.cursors import Cursors
from headrace.broker.streams.key_index import Keys
from headrace.broker.streams.partition import Partition, when_loaded
from headrace.broker.streams.read import Page, read_page
from headrace.broker.streams.streams import Stream, Streams
from headrace.broker.upkeep.expired_links import sweep_held
from headrace.broker.upkeep.reclaim import Reclaim
from headrace.broker.upkeep.schedule import Housekeeping
from headrace.broker.vhosts.policies import Policies
from headrace.broker.vhosts.vhosts import VirtualHosts
from headrace.clock import Clock, SystemClock
from headrace.config import Config
from headrace.errors import StorageError
from headrace.log.disk.disk import Disk, RealDisk
from headrace.log.log import LogSpec
from headrace.log.memory.spill import Spill
from headrace.log.recovery.recovery import RecoveryReport
from headrace.log.shard import Shard

TICK_S = 0.05
MEMBERS_SHARE = 8  # of the memory: what members of groups may have us keep is at most this part
FOLDS = {SETTLE_TABLE: fold_settles}

logger = logging.getLogger("headrace.broker")


class Broker:
    """Made by `open` on the event loop it will live on; everything here is called on that loop."""

    def __init__(self, config: Config, clock: Clock, disk: Disk) -> None:
        self.config = config
        self.clock = clock
        self.disk = disk
        self.stats = Stats(started_ms=clock.now_ms())
        self.catalog = Catalog(disk, config.data_dir)
        self.streams = Streams(self.catalog, config, clock)
        self.report: RecoveryReport
        self.shard: Shard
        self.cursors: Cursors
        self.pressure: Pressure
        self.spill: Spill
        self.clients = Clients()
        self.policies: Policies
        self.users: Users
        self.dead_letters: DeadLetterBrowser
        self.vhosts: VirtualHosts
        self.coordination: Coordination
        self.staging: Uploads
        self.ledger: Ledger
        self.pipelines: Pipelines
        self.schemas = Schemas(self)
        self.keys = Keys(self)
        self.housekeeping: Housekeeping
        self.reclaim: Reclaim
        self.standbys: Standbys
        self.history = History(self)
        self.is_stopping = False
        self._connections_max = 0
        self._ticker: asyncio.TimerHandle | None = None
        self._tick_at = 0.0
        self._maintenance: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._has_said_failed = False

    @classmethod
    async def open(cls, config: Config, *, clock: Clock | None = None, disk: Disk | None = None) -> "Broker":
        """Locks the data folder and recovers what is in it. Blocks the loop: nobody is served before."""
        data_dir = os.path.abspath(config.data_dir)
        config = msgspec.structs.replace(config, data_dir=data_dir)
        if config.log.tier_dir is not None:
            log = msgspec.structs.replace(config.log, tier_dir=os.path.abspath(config.log.tier_dir))
            config = msgspec.structs.replace(config, log=log)
        broker = cls(config, clock or SystemClock(), disk or RealDisk())
        loop = asyncio.get_running_loop()
        with _plain_words(data_dir):
            _make_folder(broker.disk, data_dir)
            broker.shard, broker.report = Shard.open(
                data_dir,
                config.log,
                logs=broker._specs(),
                clock=broker.clock,
                disk=broker.disk,
                post=loop.call_soon_threadsafe,
                defer=loop.call_soon,
                watch=partial(_watch, loop),
                make_future=loop.create_future,
                folds=FOLDS,
            )
        broker.report.restored += broker.catalog.restored
        if broker.shard.was_standby:
            logger.warning("%s was a standby's copy: from here on it goes its own way", data_dir)
        broker.streams.attach(broker.shard)
        broker.cursors = Cursors(broker.streams, broker.shard, broker.clock)
        broker.pressure = Pressure(broker.shard, config, broker.clock, broker.disk)
        groups = GroupSettings(
            session_timeout_ms_max=config.kafka_session_timeout_ms_max,
            migration_policy=config.kafka_migration_policy,
            members_bytes_max=broker.pressure.limits.memory_bytes // MEMBERS_SHARE,
        )
        broker.coordination = Coordination(broker.shard, broker.streams, broker.clock, groups)
        broker.policies = Policies(broker.catalog)
        broker.users = Users(broker.catalog)
        broker.staging = Uploads(broker.disk, data_dir, broker.clock)
        broker.ledger = Ledger(broker.shard, broker.streams, broker.staging, broker.clock)
        broker.pipelines = Pipelines(broker.shard, broker.clock)
        broker._connections_max = broker.pressure.connections_max
        broker.spill = Spill(broker.shard.files, broker.disk, data_dir, broker.shard.loader, broker.shard.counters)
        broker.vhosts = VirtualHosts(broker)
        with _plain_words(data_dir):
            broker.users.first_start([host.name for host in broker.vhosts])
        indexes = Cache("indexes", broker.shard.index_cache)
        row_groups = Cache("row_groups", broker.shard.archives.cache)
        recent = Cache("recent_reads", broker.shard.recent_reads)
        members = broker.coordination.room
        for holder in (broker.spill, indexes, row_groups, recent, ReadAhead(broker.vhosts), members):
            broker.pressure.add_holder(holder)
        broker.policies.attach(lambda: broker.vhosts, broker.streams)
        broker.dead_letters = DeadLetterBrowser(broker)
        broker._tick_at = loop.time()
        broker._tick()
        await broker.vhosts.finish_deletions()
        await broker.ledger.finish_open()
        broker.housekeeping = Housekeeping(broker.shard, broker.streams, broker.cursors, broker.stats, broker.clock)
        broker.housekeeping.also(broker.staging.sweep)
        broker.housekeeping.also(lambda: sweep_held(broker.disk, data_dir, broker.clock))
        broker.housekeeping.also(broker.ledger.expire)
        broker.keys.start()
        broker.reclaim = Reclaim(broker.shard, broker.vhosts, broker.clock)
        broker.housekeeping.also(broker.reclaim.once)
        broker._maintenance = loop.create_task(
            broker.housekeeping.run(config.retention_interval_ms / 1000), name="housekeeping"
        )
        broker._watch = loop.create_task(broker.history.run(), name="history")
        broker.standbys = Standbys(broker)
        return broker

    def _specs(self) -> Iterator[LogSpec]:
        yield from self.streams.load()  # lazily: the shard asks once it has the lock

    async def close(self) -> None:
        """Everything in flight is finished and synced; the next start finds a clean stop."""
        self.is_stopping = True
        self.shard.stop_waiting_for_room()
        self.standbys.close()
        for task in (self._maintenance, self._watch):
            if task is not None:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        self.coordination.close()
        await self.dead_letters.close()
        self.policies.close()  # what is being applied to thousands of queues ends here
        await self.vhosts.close()
        await self.ledger.close()
        self.users.close()
        await self.schemas.close()
        await self.keys.close()
        loop = asyncio.get_running_loop()
        closed: asyncio.Future[BaseException | None] = loop.create_future()
        self.shard.close(lambda error: None if closed.done() else closed.set_result(error))
        error = await closed
        if self._ticker is not None:
            self._ticker.cancel()
        await self.pressure.close()
        await loop.run_in_executor(None, self.shard.join)
        self.streams.close()
        self.staging.close()
        if error is not None:
            raise error

    async def publish(self, stream: Stream, messages: Sequence[publishing.Outgoing]) -> list[publishing.Place]:
        """Where each message is, in the order given; returns once all are on stable storage."""
        shape = publishing.Shape.of(stream)
        prepared = publishing.prepare(shape, messages, self.clock.now_ms(), stream.next_turn())
        return await self.submit(stream, prepared)

    async def submit(self, stream: Stream, prepared: Sequence[publishing.Prepared]) -> list[publishing.Place]:
        self.pressure.check()
        size = sum(len(part.batches) for part in prepared)
        self.pressure.took(size)
        delay_s = self.pressure.delay_s(size)
        if delay_s:
            await asyncio.sleep(delay_s)
        return await publishing.publish(self.shard, stream, prepared)

    async def read(self, stream: Stream, partition: Partition, offset: int, *, limit: int, bytes_max: int) -> Page:
        """A page of committed messages."""
        return await when_loaded(
            lambda: read_page(
                stream.name,
                partition,
                offset,
                limit=limit,
                bytes_max=bytes_max,
                decompressed_bytes_max=self.config.decompressed_bytes_max,
                aborted=self.coordination.producers.aborted(partition.log),
            )
        )

    def why_not_ready(self) -> str | None:
        """The reason why messages are not taken right now; None when they are."""
        if self.is_stopping:
            return "the broker is stopping"
        if self.shard.failure is not None:
            return str(self.shard.failure)
        if self.shard.is_full:
            return "the disk is full: messages are read, but not taken"
        return self.pressure.paused_because or self.standbys.why_not_ready()

    @property
    def connections_left(self) -> int:
        """How many more there are files for, whatever a listener would take by itself."""
        return self._connections_max - sum(listener.connections for listener in self.stats.listeners.values())

    # Time.

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self.stats.loop_came_back(now - self._tick_at)
        self._tick_at = now + TICK_S
        self._ticker = loop.call_at(self._tick_at, self._tick)  # first: one bad tick must not be the last
        self.shard.tick()
        self.pressure.tick()
        if self.shard.failure is not None and not self._has_said_failed:
            self._has_said_failed = True
            logger.error("%s. Nothing is taken any more until a restart; what is there can be read", self.shard.failure)


def _watch(loop: asyncio.AbstractEventLoop, file: int, call: Callable[[], object] | None) -> None:
    if call is None:
        loop.remove_reader(file)
    else:
        loop.add_reader(file, call)


def _make_folder(disk: Disk, path: str) -> None:
    """With every name on the way to it durable: a power cut must not take the folder with all that is in it."""
    missing = []
    while not disk.exists(path):
        missing.append(path)
        path = os.path.dirname(path)
    for made in reversed(missing):
        disk.mkdir(made)
        disk.sync_dir(os.path.dirname(made))


@contextlib.contextmanager
def _plain_words(data_dir: str) -> Iterator[None]:
    """The errors of a folder that cannot be used, as one sentence each."""
    try:
        yield
    except OSError as error:
        reasons = {
            errno.EACCES: "this user may not use it",
            errno.EPERM: "this user may not use it",
            errno.EROFS: "its filesystem is read-only",
            errno.ENOTDIR: "it is not a folder",
            errno.EEXIST: "it is not a folder",
            errno.ENOSPC: "its disk is full",
        }
        reason = reasons.get(error.errno or 0, error.strerror or str(error))
        raise StorageError(f"the data folder {data_dir} cannot be opened: {reason}") from error
