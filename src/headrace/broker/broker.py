"""The broker: owns the opened storage and all components, and starts and stops them in order.

Each concept lives in a package of its own; this module only connects them. Listeners get the Broker.
"""

import asyncio
import contextlib
import logging
import os
from collections.abc import Sequence

import msgspec

from headrace.broker.access.users import Users
from headrace.broker.catalog.file_catalog import FileCatalog
from headrace.broker.clients import Clients
from headrace.broker.coordination import Coordination
from headrace.broker.groups.settings import GroupSettings
from headrace.broker.metrics.counters import Stats
from headrace.broker.metrics.history import History
from headrace.broker.pressure.pressure import Pressure
from headrace.broker.pressure.reclaimable import Cache, ReadAhead
from headrace.broker.queues.dead_letter_browser import DeadLetterBrowser
from headrace.broker.schemas.on_demand import SchemaRegistry
from headrace.broker.sinks.ledger import Ledger
from headrace.broker.sinks.pipeline_reports import Pipelines
from headrace.broker.sinks.read_leases import ReadLeases
from headrace.broker.sinks.uploads import Uploads
from headrace.broker.standbys import Standbys
from headrace.broker.storage import Storage, readable_errors
from headrace.broker.streams.append import Appender
from headrace.broker.streams.cursors import Cursors
from headrace.broker.streams.decode import Decoder
from headrace.broker.streams.key_index import FOLDER as KEYS_FOLDER
from headrace.broker.streams.key_index import Keys
from headrace.broker.streams.partition import Partition
from headrace.broker.streams.publish import Outgoing, Place
from headrace.broker.streams.read import UNLIMITED, Page, PageReader
from headrace.broker.streams.streams import Stream, Streams
from headrace.broker.upkeep.expired_links import remove_expired_links
from headrace.broker.upkeep.reclaim import Reclaim
from headrace.broker.upkeep.schedule import Housekeeping
from headrace.broker.upkeep.segments import SegmentUpkeep
from headrace.broker.vhosts.global_parameters import GlobalParameters
from headrace.broker.vhosts.policies import Policies
from headrace.broker.vhosts.vhosts import VirtualHosts
from headrace.clock import Clock, ExpiryClock, SystemClock
from headrace.config import Config
from headrace.log.disk.disk import Disk, RealDisk
from headrace.log.memory.spill import Spill
from headrace.log.recovery.recovery import RecoveryReport
from headrace.log.shard import Shard
from headrace.log.tier.location import absolute_path

TICK_S = 0.05
MEMBERS_SHARE = 8  # members of groups may take at most this part of the memory limit

logger = logging.getLogger("headrace.broker")


class Broker:
    """Lives on one event loop; everything here is called on that loop. Use `open` to make one."""

    def __init__(self, config: Config, clock: Clock, storage: Storage, streams: Streams) -> None:
        """`streams` has loaded the catalog and is attached to the storage's shard here."""
        self.config = streams.defaults.config
        self.clock = clock
        self.storage = storage
        self.streams = streams
        self.stats = Stats(started_ms=clock.now_ms())
        self.clients = Clients()
        self.is_stopping = False
        streams.attach(storage.shard)

        def use(changed: Config) -> None:
            self.config = changed

        streams.defaults.on_change(use)
        self.pressure = Pressure(storage.shard, config, clock, storage.disk)
        self._make_streams()
        self._make_sinks()
        self._make_vhosts()
        self._make_upkeep()
        self._connections_max = self.pressure.connections_max
        self._ticker: asyncio.TimerHandle | None = None
        self._maintenance: asyncio.Task[None] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._has_logged_failure = False

    @classmethod
    async def open(cls, config: Config, *, clock: Clock | None = None, disk: Disk | None = None) -> "Broker":
        """Lock and recover the data folder, and start the broker on it. Recovery blocks the event loop."""
        config = _with_absolute_paths(config)
        clock, disk = clock or SystemClock(), disk or RealDisk()
        catalog = FileCatalog(disk, config.data_dir)
        streams = Streams(catalog, config, clock)
        storage = Storage.open(config, clock, disk, catalog, streams.load)
        broker = cls(config, clock, storage, streams)
        await broker._start()
        return broker

    # Making the components, in the order of their dependencies.

    def _make_streams(self) -> None:
        """Streams, and everything that reads or appends to them."""
        config, shard = self.config, self.shard
        self.cursors = Cursors(self.streams, shard, self.clock)
        groups = GroupSettings(
            session_timeout_ms_max=config.kafka_session_timeout_ms_max,
            migration_policy=config.kafka_migration_policy,
            members_bytes_max=self.pressure.limits.memory_bytes // MEMBERS_SHARE,
        )
        self.coordination = Coordination(shard, self.streams, self.clock, groups)
        producers = self.coordination.producers
        self.appender = Appender(
            shard,
            self.clock,
            self.pressure,
            producers,
            self.coordination.transactions.batches,
            decompressed_bytes_max=config.decompressed_bytes_max,
        )
        decoder = Decoder(
            shard.loader,
            accepted_bytes_max=config.decompressed_bytes_max,
            memory_bytes=self.pressure.limits.memory_bytes,
        )
        self.pages = PageReader(producers.aborted, decoder)
        keys_folder = os.path.join(config.data_dir, KEYS_FOLDER)
        self.keys = Keys(
            self.streams,
            self.pages,
            decoder,
            producers.aborted,
            keys_folder,
            has_folder=self.disk.exists(keys_folder),
        )
        self.schemas = SchemaRegistry(self.streams, self.pages, self.appender, shard)

    def _make_sinks(self) -> None:
        """Exactly-once sinks and bulk readers."""
        self.uploads = Uploads(self.disk, self.config.data_dir, self.clock)
        self.segments = SegmentUpkeep(self.shard, self.uploads, self.coordination.producers)
        self.read_leases = ReadLeases(self.shard)
        self.ledger = Ledger(self.shard, self.streams, self.appender, self.uploads, self.clock)
        self.pipelines = Pipelines(self.shard, self.clock)

    def _make_vhosts(self) -> None:
        """Users, policies and parameters, virtual hosts with their queues, and the memory that can be reclaimed."""
        shard, data_dir = self.shard, self.config.data_dir
        self.global_parameters = GlobalParameters(self.catalog)
        self.policies = Policies(self.catalog)
        self.users = Users(self.catalog)
        self.spill = Spill(shard.files, self.disk, data_dir, shard.loader, shard.counters)
        self.vhosts = VirtualHosts(
            self.catalog,
            self.streams,
            shard,
            self.appender,
            self.spill,
            self.coordination.producers,
            self.users,
            self.policies,
            self.stats.gone,
            self.clock,
            bindings_max=self.config.amqp_bindings_max,
        )
        with readable_errors(data_dir):
            self.users.first_start([host.name for host in self.vhosts])
        for holder in (
            self.spill,
            Cache("indexes", shard.index_cache),
            Cache("row_groups", shard.archives.cache),
            Cache("recent_reads", shard.recent_reads),
            ReadAhead(self.vhosts),
            self.coordination.member_budget,
        ):
            self.pressure.add_holder(holder)
        self.policies.attach(lambda: self.vhosts, self.streams)
        self.dead_letters = DeadLetterBrowser(self.vhosts, shard, self.clock, self.pages.decoder)

    def _make_upkeep(self) -> None:
        """Periodic work, its numbers, and the standbys."""
        config, shard = self.config, self.shard
        self.history = History(self.stats, shard.counters, self.vhosts, self.clock)
        self.housekeeping = Housekeeping(shard, self.streams, self.cursors, self.stats, self.clock)
        self.reclaim = Reclaim(shard, self.vhosts, self.clock)
        self.housekeeping.add_task(self.uploads.sweep)
        ages = ExpiryClock(self.clock)
        self.housekeeping.add_task(lambda: remove_expired_links(self.disk, config.data_dir, ages))
        self.housekeeping.add_task(self.ledger.expire)
        self.housekeeping.add_task(self.reclaim.once)
        self.standbys = Standbys(
            shard,
            self.storage.catalog,
            self.disk,
            config.data_dir,
            self.clock,
            wanted=config.standby_confirms,
            memory_bytes_max=self.pressure.limits.memory_bytes,
        )

    # Starting and stopping.

    async def _start(self) -> None:
        """Finish what a crash interrupted, then start the periodic work."""
        loop = asyncio.get_running_loop()
        self._tick()
        await self.vhosts.finish_deletions()
        await self.ledger.finish_open()
        self.keys.start()
        interval_s = self.config.retention_interval_ms / 1000
        self._maintenance = loop.create_task(self.housekeeping.run(interval_s), name="housekeeping")
        self._watch = loop.create_task(self.history.run(), name="history")

    async def close(self) -> None:
        """Finish and sync everything in flight; the next start finds a clean stop."""
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
        self.policies.close()  # ends changes that are being applied to thousands of queues
        await self.vhosts.close()
        await self.ledger.close()
        self.users.close()
        await self.schemas.close()
        await self.keys.close()
        error = await self._close_shard()
        if self._ticker is not None:
            self._ticker.cancel()
        await self.pressure.close()
        await asyncio.get_running_loop().run_in_executor(None, self.shard.join)
        self.streams.close()
        self.uploads.close()
        if error is not None:
            raise error

    async def _close_shard(self) -> BaseException | None:
        closed: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()
        self.shard.close(lambda error: None if closed.done() else closed.set_result(error))
        return await closed

    # Storage, for components that take the broker's parts.

    @property
    def shard(self) -> Shard:
        return self.storage.shard

    @property
    def catalog(self) -> FileCatalog:
        return self.storage.catalog

    @property
    def disk(self) -> Disk:
        return self.storage.disk

    @property
    def report(self) -> RecoveryReport:
        return self.storage.report

    # Messages.

    async def publish(self, stream: Stream, messages: Sequence[Outgoing]) -> list[Place]:
        """Durable on return; (partition, offset) of each message in the order given."""
        return await self.appender.publish_messages(stream, messages)

    async def read(
        self,
        stream: Stream,
        partition: Partition,
        offset: int,
        *,
        limit: int,
        bytes_max: int,
        record_bytes_max: int = UNLIMITED,
    ) -> Page:
        """A page of committed messages; RecordTooLarge if the first takes more than record_bytes_max."""
        return await self.pages.read(
            stream.name, partition, offset, limit=limit, bytes_max=bytes_max, record_bytes_max=record_bytes_max
        )

    # State.

    def why_not_ready(self) -> str | None:
        """The reason why messages are not accepted right now; None when they are."""
        if self.is_stopping:
            return "the broker is stopping"
        if self.shard.failure is not None:
            return str(self.shard.failure)
        if self.shard.is_full:
            return "the disk is full: messages can be read, but not published"
        return self.pressure.paused_because or self.standbys.why_not_ready()

    @property
    def connections_left(self) -> int:
        """How many more connections there are file descriptors for; listeners have limits of their own besides."""
        return self._connections_max - sum(listener.connections for listener in self.stats.listeners.values())

    def _tick(self, due: float | None = None) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if due is not None:  # not the timer's when(): uvloop returns a handle without it for a time that has passed
            self.stats.loop_came_back(now - due)
        # First: a tick that fails must not be the last.
        self._ticker = loop.call_at(now + TICK_S, self._tick, now + TICK_S)
        self.shard.tick()
        self.pressure.tick()
        if self.shard.failure is not None and not self._has_logged_failure:
            self._has_logged_failure = True
            logger.error("%s. Nothing is accepted until a restart; stored messages can be read", self.shard.failure)


def _with_absolute_paths(config: Config) -> Config:
    config = msgspec.structs.replace(config, data_dir=os.path.abspath(config.data_dir))
    if config.log.tier_dir is None:
        return config
    log = msgspec.structs.replace(config.log, tier_dir=absolute_path(config.log.tier_dir))
    return msgspec.structs.replace(config, log=log)
