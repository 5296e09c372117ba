"""The idempotent producers of all logs: appends that check sequence numbers, unique producer ids, snapshots."""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import msgspec

from headrace.broker.streams.partition import Partition
from headrace.broker.transactions.producer_state import Batch, PartitionProducers, Snapshot
from headrace.broker.types.aborted_ranges import NO_ABORTS, Aborts
from headrace.broker.types.range_set import RangeSet
from headrace.clock import Clock, ExpiryClock
from headrace.errors import CorruptLog, DiskFull, HeadraceError, InvalidInput, Overloaded, StorageError
from headrace.log.commit.atomic_group import AtomicGroup
from headrace.log.commit.round import Ticket
from headrace.log.log import Log
from headrace.log.shard import Shard
from headrace.record import codec
from headrace.record.codec import is_commit
from headrace.record.types import BatchInfo, Buffer

logger = logging.getLogger("headrace.broker")

PRODUCERS = "producers"
PRODUCER_IDS = "producer.ids"
NEXT_ID = b"next"
ID_BLOCK = 1000
SNAPSHOT_INTERVAL_S = 30.0
SNAPSHOT_BYTES = 64 << 20
SCAN_BYTES = 4 << 20
PIN = "producers"

AddToEntry = Callable[[AtomicGroup], object]
EndObserver = Callable[[RangeSet, bool], object]  # offsets without a message, whether the transaction was committed


class Tracked:
    """A log that has batches of producers with an id."""

    __slots__ = ("bytes_since", "is_snapshot_due", "log", "producers", "upto", "void")

    def __init__(self, log: Log) -> None:
        self.log = log
        self.producers = PartitionProducers()
        self.upto = 0
        self.bytes_since = 0
        self.is_snapshot_due = False
        self.void = RangeSet()  # found at the start: the observer may not have stored it before the crash


class Producers:
    """Owned by the broker; every method runs on the owner thread."""

    def __init__(self, shard: Shard, clock: Clock) -> None:
        self._shard = shard
        self._ages = ExpiryClock(clock)
        self._tracked: dict[int, Tracked] = {}
        self._watchers: dict[int, EndObserver] = {}
        self._ids = iter(range(0))
        self._reserving = asyncio.Lock()
        self._reserved = int.from_bytes(shard.state.get(PRODUCER_IDS, NEXT_ID) or b"\0", "big")
        shard.maintenance.aborts.forget = self._forget_aborted

    # Opening.

    def load(self) -> None:
        """Load the snapshots and replay the batches after them. Logs without producer ids are not read."""
        for key, value in self._shard.state.items(PRODUCERS):
            log = self._shard.logs.get(int.from_bytes(key, "big"))
            if log is None:
                continue
            tracked = Tracked(log)
            self._tracked[log.id] = tracked
            snapshot = msgspec.msgpack.decode(value, type=Snapshot)
            tracked.producers.restore(snapshot)
            tracked.upto = snapshot.upto
            self._replay(tracked)
            self._hold(tracked)
            log.set_pin(PIN, snapshot.upto)  # replayed after a crash before the next snapshot

    def _replay(self, tracked: Tracked) -> None:
        """Replay up to the first damaged batch: producers and aborted transactions behind it are unknown, so the log is
        served only up to there. The other logs must not wait until this one is restored."""
        log, now_ms = tracked.log, self._ages.clock.now_ms()
        reached = max(tracked.upto, log.start_offset)
        try:
            for data, info in batches_from(log, tracked.upto):
                reached = info.next_offset
                self._apply(tracked, data, info, now_ms)
        except StorageError as error:
            damage = error if isinstance(error, CorruptLog) else CorruptLog(log.tail.folder, 0, str(error))
            log.damaged_from(reached, damage)
            logger.error("%s is served up to offset %d and accepts no messages: %s", log.slug, reached, damage)

    @staticmethod
    def _apply(tracked: Tracked, data: Buffer, info: BatchInfo, now_ms: int) -> None:
        tracked.bytes_since += info.size
        if info.producer_id < 0 or info.base_offset < tracked.upto:
            return
        if info.is_control:
            committed = is_commit(data, info)
            void = tracked.producers.ended(info.producer_id, info.producer_epoch, info.base_offset, commit=committed)
            for start, end in void:
                tracked.void.add(start, end)
        else:
            tracked.producers.replay(info, now_ms)

    # Ids.

    async def new_id(self) -> int:
        """A producer id that was never used: ids are reserved durably in blocks before they are handed out."""
        async with self._reserving:
            producer_id = next(self._ids, None)
            if producer_id is None:
                first = self._reserved
                entry = self._shard.group()
                entry.put(PRODUCER_IDS, NEXT_ID, (first + ID_BLOCK).to_bytes(8, "big"))
                await entry.commit()
                self._reserved = first + ID_BLOCK
                self._ids = iter(range(first + 1, first + ID_BLOCK))
                producer_id = first
            return producer_id

    # Appending.

    def append(
        self,
        partition: Partition,
        data: bytearray | memoryview,
        infos: list[BatchInfo],
        with_it: AddToEntry | None = None,
        *,
        from_zero: bool = False,
    ) -> Ticket:
        """Like Partition.append, for one batch with a producer id.

        A repeated batch is not stored again: its ticket is that of the first one, or has its offset. Changes that
        `with_it` adds to the entry of a new batch are stored together with it. With `from_zero` the first batch of a
        producer must have sequence number 0."""
        if len(infos) != 1:
            raise InvalidInput("an idempotent producer sends one batch per partition and request")
        [info] = infos
        if info.is_control:
            raise InvalidInput("clients may not send control batches")
        log = partition.log
        tracked = self._track(log)
        repeated = tracked.producers.check(info, from_zero=from_zero)
        if repeated is not None:
            return self._ticket_of(repeated)
        try:
            if tracked.upto < 0 or with_it is not None:
                ticket = self._append_with(tracked, data, infos, with_it)
            else:
                ticket = log.append(data, infos)
        except (DiskFull, Overloaded):
            self.put_off(partition, info)
            raise
        batch = tracked.producers.staged(info, ticket, log.visible_end, self._ages.clock.now_ms())
        if info.is_transactional:
            self._hold(tracked)
        ticket.add_callback(partial(self._appended, tracked, info, batch))
        return ticket

    def put_off(self, partition: Partition, info: BatchInfo) -> None:
        """A batch was refused and will be retried: later batches of its producer must not overtake it."""
        self._track(partition.log).producers.put_off(info, self._ages.clock.now_ms())

    def _track(self, log: Log) -> Tracked:
        tracked = self._tracked.get(log.id)
        if tracked is None:
            tracked = self._tracked[log.id] = Tracked(log)
            tracked.upto = -1
        return tracked

    def _append_with(
        self, tracked: Tracked, data: bytearray | memoryview, infos: list[BatchInfo], with_it: AddToEntry | None
    ) -> Ticket:
        """Append in an entry with other changes. The first such batch of a log also stores an empty snapshot, so that
        the next start replays the log; until one is durable every batch does, as the first may fail."""
        log = tracked.log
        entry = self._shard.group()
        ticket = entry.append(log, data, infos)
        if tracked.upto < 0:
            entry.put(PRODUCERS, log_key(log.id), msgspec.msgpack.encode(Snapshot(log.visible_end, [], [])))
        if with_it is not None:
            with_it(entry)
        entry.commit()
        return ticket

    def _ticket_of(self, batch: Batch) -> Ticket:
        if isinstance(batch.ticket, Ticket):
            return batch.ticket
        ticket = Ticket()
        ticket.base_offset = batch.base_offset
        ticket.resolve()
        return ticket

    def _appended(self, tracked: Tracked, info: BatchInfo, batch: Batch, ticket: Ticket) -> None:
        if ticket.error is not None:
            tracked.producers.refused(info, batch)
            return
        tracked.producers.stored(info, batch, ticket.base_offset)
        if batch.opens:
            self._hold(tracked)
        is_first = tracked.upto < 0
        if is_first:
            tracked.upto = 0
            tracked.log.set_pin(PIN, ticket.base_offset)
        tracked.bytes_since += info.size
        if (is_first or tracked.bytes_since >= SNAPSHOT_BYTES) and not tracked.is_snapshot_due:
            # Later: the log's end covers the whole round, but its other batches are not applied here yet.
            tracked.is_snapshot_due = True
            self._shard.defer(partial(self._snapshot_due, tracked))

    def _snapshot_due(self, tracked: Tracked) -> None:
        tracked.is_snapshot_due = False
        if self._tracked.get(tracked.log.id) is tracked and not tracked.log.is_closed:
            self._snapshot(tracked)

    # Transactions.

    def ended(self, log: Log, producer_id: int, epoch: int, marker_offset: int, *, commit: bool) -> None:
        """The marker of a transaction is in the log."""
        tracked = self._tracked.get(log.id)
        if tracked is not None:
            void = tracked.producers.ended(producer_id, epoch, marker_offset, commit=commit)
            if (watcher := self._watchers.get(log.id)) is not None:
                watcher(void, commit)
            self._hold(tracked)

    def watch(self, log: Log, watcher: EndObserver) -> None:
        """Register the one observer of a log: called when a transaction has ended, before readers see what follows."""
        self._watchers[log.id] = watcher
        tracked = self._tracked.get(log.id)
        if tracked is not None and tracked.void:
            watcher(tracked.void, False)

    def unwatch(self, log: Log) -> None:
        self._watchers.pop(log.id, None)

    def of(self, log_id: int) -> PartitionProducers | None:
        tracked = self._tracked.get(log_id)
        return tracked.producers if tracked is not None else None

    def aborted(self, log_id: int) -> Aborts:
        """The aborted transactions of a log: readers must skip their records."""
        producers = self.of(log_id)
        return producers.aborted if producers is not None else NO_ABORTS

    def _forget_aborted(self, log: Log, markers: Sequence[int]) -> Ticket | None:
        """Compaction is about to drop the markers; see log/maintenance/abort_markers.py.

        A snapshot is stored even if they were forgotten before: storing the last one may have failed."""
        tracked = self._tracked.get(log.id)
        if tracked is None or tracked.upto < 0:
            return None
        tracked.producers.forget_aborted(set(markers))
        return self._store(tracked, lazy=False)

    def _hold(self, tracked: Tracked) -> None:
        tracked.log.set_stable_limit(tracked.producers.stable_limit)

    # Snapshots.

    def snapshot_all(self) -> None:
        """Call it before the broker stops."""
        for log_id in list(self._tracked):
            self._snapshot_or_forget(log_id)

    async def snapshot_cooperatively(self) -> None:
        """Every SNAPSHOT_INTERVAL_S; yields to the event loop after each log, as there may be many."""
        for log_id in list(self._tracked):
            self._snapshot_or_forget(log_id)
            await asyncio.sleep(0)

    def _snapshot_or_forget(self, log_id: int) -> None:
        tracked = self._tracked.get(log_id)
        if tracked is None:
            return
        if log_id not in self._shard.logs:
            self._forget(log_id)
        else:
            self.snapshot_of(tracked.log)

    def snapshot_of(self, log: Log) -> None:
        """Stage a snapshot before the caller deletes records that it would otherwise be replayed from."""
        tracked = self._tracked.get(log.id)
        if tracked is not None and tracked.upto >= 0 and log.visible_end > tracked.upto:
            self._snapshot(tracked)

    def _forget(self, log_id: int) -> None:
        del self._tracked[log_id]
        entry = self._shard.group()
        entry.delete(PRODUCERS, log_key(log_id))
        with suppress(HeadraceError):  # the next start notices that the log no longer exists
            entry.commit(lazy=True)

    def _snapshot(self, tracked: Tracked) -> None:
        """Journaled, but not synced at once: an older snapshot only means more to replay."""
        with suppress(HeadraceError):
            self._store(tracked, lazy=True)

    def _store(self, tracked: Tracked, *, lazy: bool) -> Ticket:
        log, before = tracked.log, tracked.upto
        snapshot = tracked.producers.snapshot(log.visible_end, log.start_offset, self._ages.now_ms())
        entry = self._shard.group()
        entry.put(PRODUCERS, log_key(log.id), msgspec.msgpack.encode(snapshot))
        ticket = entry.commit(lazy=lazy)
        tracked.upto, tracked.bytes_since = snapshot.upto, 0
        tracked.void.clear()
        ticket.add_callback(partial(self._snapshot_ended, tracked, before, snapshot.upto))
        return ticket

    @staticmethod
    def _snapshot_ended(tracked: Tracked, before: int, upto: int, ticket: Ticket) -> None:
        if ticket.error is None:
            tracked.log.set_pin(PIN, upto)  # later batches are needed for replay
        else:
            tracked.upto = before  # the next snapshot covers it


def batches_from(log: Log, offset: int) -> Iterator[tuple[Buffer, BatchInfo]]:
    offset = max(offset, log.start_offset)
    while offset < log.visible_end:
        chunk = log.read(offset, SCAN_BYTES)
        if not chunk.data:
            return
        for info in codec.scan(chunk.data, verify_crc=False):
            yield chunk.data, info
        offset = chunk.next_offset


def log_key(log_id: int) -> bytes:
    return log_id.to_bytes(8, "big")
