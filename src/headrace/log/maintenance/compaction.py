"""Compaction: rewriting sealed segments without the records that are no longer needed.

The new file holds the same batches without the dropped records. Offsets stay, so there are gaps. It replaces the old
file under a name of a higher generation: readers of the old one are not disturbed, and a crash leaves either of them.
Key compaction and the rewriting of mostly settled queue segments differ only in the filter.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from headrace.errors import LogClosed
from headrace.log.disk import paths
from headrace.log.disk.disk import write_atomically
from headrace.log.disk.file_cache import FileCache
from headrace.log.log import Log
from headrace.log.segments import index
from headrace.log.segments.batches import batches
from headrace.log.segments.replacement import Rewritten, remove_unfinished
from headrace.log.segments.segment import Segment, seal_of
from headrace.record import codec
from headrace.record.codec import is_commit
from headrace.record.layout import MAX_TIMESTAMP
from headrace.record.types import BatchInfo


class Kept(NamedTuple):
    """The records of a batch that stay."""

    offsets: Sequence[int] | None  # None: all of them
    horizon_ms: int | None = None  # a delete horizon to set on the batch


ALL, NONE = Kept(None), Kept(())


class ByKey(Protocol):
    """The filter of key compaction."""

    def keeps(self, data: memoryview, info: BatchInfo) -> Kept: ...


# Which offsets of a batch to keep; None: all. Not called for control batches, which are kept.
Filter = Callable[[memoryview, BatchInfo], Sequence[int] | None]


def _unless_ending(files: FileCache, segment: Segment) -> Iterator[tuple[memoryview, BatchInfo]]:
    """Like `batches`, but LogClosed when the broker stops, which must not wait for hours: the next run starts over."""
    for found in batches(files, segment):
        if files.is_ending:
            raise LogClosed("the broker is stopping")
        yield found


def rewrite(files: FileCache, segments: Sequence[Segment], keep: Filter | ByKey, interval: int) -> Rewritten:
    """Write one new segment for a run of neighbours, complete and synced, but not yet in the log.

    It counts once it has its final name, because a start uses the newest generation; `SegmentRewrites` renames it
    when it is certain to be wanted. The seal, which says how far it reaches, is durable before that.
    """
    first, last = segments[0], segments[-1]
    target = Segment(first.folder, first.base, max(s.generation for s in segments) + 1)
    walker = index.Walker(first.base, interval)
    temporary = target.path() + paths.UNFINISHED
    disk = files.disk
    if disk.exists(temporary):
        disk.unlink(temporary)
    try:
        file = disk.open(temporary, create=True, exclusive=True)
        try:
            for segment in segments:
                for data, info in _unless_ending(files, segment):
                    kept = kept_of(data, info, keep)
                    if kept is not None:
                        disk.pwrite(file, [kept], walker.position)
                        walker.walk(kept)
            disk.sync(file)
        finally:
            disk.close(file)
        seal = seal_of(walker, last.next_offset)
        # Not through the file cache: a failed sync of this file must not stop the broker from confirming writes.
        write_atomically(disk, target.path(paths.SEAL), seal.pack())
        files.write_derived(target.path(paths.INDEX), walker.index, 0)
        files.write_derived(target.path(paths.TIME_INDEX), walker.time_index, 0)
    except BaseException:
        remove_unfinished(files, target)
        raise
    target.size, target.records = seal.size, seal.records
    target.next_offset, target.max_timestamp, target.is_sealed = seal.next_offset, seal.max_timestamp, True
    return Rewritten(
        target,
        sum(s.size for s in segments),
        target.size,
        sum(s.records for s in segments),
        target.records,
        unnamed=temporary,
    )


def kept_of(data: memoryview, info: BatchInfo, keep: Filter | ByKey) -> bytes | bytearray | memoryview | None:
    """The batch with only the records that the filter keeps; None if it keeps none."""
    whole = data[info.position : info.position + info.size]
    if not callable(keep):
        kept = keep.keeps(data, info)
    elif info.is_control:
        kept = ALL
    else:
        kept = Kept(keep(data, info))
    if kept.horizon_ms is None and (kept.offsets is None or len(kept.offsets) == info.count):
        return whole
    offsets = range(info.base_offset, info.next_offset) if kept.offsets is None else kept.offsets
    return codec.filter_batch(data, info, offsets, delete_horizon_ms=kept.horizon_ms) if offsets else None


class Deletes:
    """How long tombstones stay, and markers of transactions without remaining records. The pass that removes the
    records they refer to gives their batch a delete horizon, and a pass after that time removes them. So every reader
    has time to see them, even if the timestamps of the records are old, as in a mirrored topic."""

    def __init__(self, now_ms: int, retention_ms: int) -> None:
        self._now_ms = now_ms
        self._horizon_ms = min(now_ms + retention_ms, MAX_TIMESTAMP)

    def are_over(self, info: BatchInfo) -> bool:
        return info.delete_horizon_ms is not None and info.delete_horizon_ms <= self._now_ms

    def horizon_for(self, info: BatchInfo) -> int | None:
        """The horizon to set; None if the batch has one already, which never changes."""
        return self._horizon_ms if info.delete_horizon_ms is None else None


class Survivors:
    """The filter of key compaction when the last record of each key is known: `offsets` lists them in ascending order.
    Records without a key stay, and so does everything from `until` on, which was not examined. Without `deletes` all
    tombstones stay unchanged."""

    def __init__(self, offsets: "array[int]", *, until: int, deletes: Deletes | None) -> None:
        self._offsets = offsets
        self._until = until
        self._deletes = deletes

    def keeps(self, data: memoryview, info: BatchInfo) -> Kept:
        if info.is_control or info.base_offset >= self._until:
            return ALL
        deletes = self._deletes
        offsets, has_tombstones = codec.keep_listed(
            data, info, self._offsets, until=self._until, tombstones=deletes is None or not deletes.are_over(info)
        )
        is_passed = has_tombstones and info.last_offset < self._until
        return Kept(offsets, deletes.horizon_for(info) if deletes is not None and is_passed else None)


class LatestByKey:
    """The filter of key compaction: keeps the last record of each key, records without a key, and a tombstone until
    every reader has had time to see it.

    It learns keys from `start`, where the last pass ended, up to `until`: where `keys_max` keys were seen, a record is
    too young, a pin needs what follows (`hold`), or a transaction is still open. The next pass begins there.
    """

    def __init__(
        self,
        now_ms: int,
        *,
        start: int = 0,
        lag_ms: int,
        tombstone_ms: int,
        keys_max: int,
        hold: int | None,
        aborts_before: int = 0,
    ) -> None:
        self.until = self._start = start
        self.is_full = False  # the keys did not fit: another pass is needed
        self._deletes = Deletes(now_ms, tombstone_ms)
        self._young_from_ms = now_ms - lag_ms + 1 if lag_ms > 0 else None
        self._keys_max = keys_max
        self._hold = hold
        self._latest = codec.LatestOffsets()
        self._unended: set[int] = set()  # producers with kept records since their last marker
        self._begun: set[int] = set()  # producers with any records since their last marker
        self._aborts_before = aborts_before
        self.has_aborts = False  # markers of aborted transactions were kept
        self._aborts_gone: list[int] = []

    def keeps(self, data: memoryview, info: BatchInfo) -> Kept:
        if info.is_control:
            return self._keeps_marker(data, info)
        if info.base_offset >= self.until:
            return ALL
        offsets, has_tombstones = codec.keep_latest(
            data,
            info,
            self._latest,
            start=self._start,
            until=self.until,
            tombstones=not self._deletes.are_over(info),
        )
        if info.is_transactional:
            self._begun.add(info.producer_id)
            if offsets:
                self._unended.add(info.producer_id)
        # A record that a tombstone from `until` on deletes may lie there, too: its time begins when that is removed.
        is_passed = has_tombstones and info.last_offset < self.until
        return Kept(offsets, self._deletes.horizon_for(info) if is_passed else None)

    def _keeps_marker(self, data: memoryview, info: BatchInfo) -> Kept:
        """A commit marker is dropped when no record of its transaction is left and every reader has had time to see
        it. An abort marker stays longer: see abort_markers.py.

        Called in the order of the log, from its first segment on: the records left are those that this filter has
        kept before."""
        has_records_left, has_begun = info.producer_id in self._unended, info.producer_id in self._begun
        self._unended.discard(info.producer_id)
        self._begun.discard(info.producer_id)
        if info.base_offset >= self.until:
            return ALL
        if is_commit(data, info):
            if has_records_left:
                return ALL
            return NONE if self._deletes.are_over(info) else Kept(None, self._deletes.horizon_for(info))
        if has_begun or info.base_offset >= self._aborts_before:
            self.has_aborts = True
            return ALL
        self._aborts_gone.append(info.base_offset)
        return NONE

    def take_aborts_gone(self) -> list[int]:
        """The offsets of abort markers that were dropped since the last call."""
        gone, self._aborts_gone = self._aborts_gone, []
        return gone

    def learn(self, files: FileCache, segments: Sequence[Segment], end: int) -> None:
        """Learn the last offset of every key. The records of a transaction count once its commit marker is found, and
        never if it was aborted. Everything from the first record of an open transaction on stays as it is."""
        undecided: dict[int, codec.LatestOffsets] = {}
        begun: dict[int, int] = {}
        until = self._start
        for data, info in self._within(files, segments, end):
            is_full = len(self._latest) + sum(map(len, undecided.values())) >= self._keys_max
            # Not before some progress is made: a transaction with more keys is held in memory as a whole.
            if is_full and min([until, *begun.values()]) > self._start:
                self.is_full = True
                break
            if info.is_control:
                begun.pop(info.producer_id, None)
                written = undecided.pop(info.producer_id, None)
                if written is not None and is_commit(data, info):
                    self._latest.take(written)
            elif info.is_transactional:
                begun.setdefault(info.producer_id, info.base_offset)
                if info.producer_id not in undecided:
                    undecided[info.producer_id] = self._latest.apart()
                undecided[info.producer_id].learn(data, info)
            else:
                self._latest.learn(data, info)
            until = info.next_offset
        self.until = min([until, *begun.values(), *([] if self._hold is None else [self._hold])])

    def _within(
        self, files: FileCache, segments: Sequence[Segment], end: int
    ) -> Iterator[tuple[memoryview, BatchInfo]]:
        for segment in segments:
            if segment.next_offset <= self._start:
                continue
            for data, info in _unless_ending(files, segment):
                if info.last_offset < self._start:
                    continue
                if info.base_offset >= end:
                    return
                if self._young_from_ms is not None and info.max_timestamp >= self._young_from_ms:
                    return
                yield data, info


# When to compact: all of a log is rewritten for what is new in it.


def is_due_now(log: Log, now_ms: int) -> bool:
    """Whether a log is worth compacting. ReadWaits when a batch that decides it is not in memory."""
    sealed = [segment for segment in log.segments if segment.is_sealed]
    dirty = _dirty(log, sealed, now_ms)
    if not dirty:
        return False
    total = sum(segment.size for segment in sealed)
    if sum(segment.size for segment in dirty) * 100 >= total * log.settings.compaction_dirty_percent:
        return True
    return log.settings.compaction_lag_max_ms >= 0 and _is_overdue_now(log, dirty[0], now_ms)


def _dirty(log: Log, sealed: list[Segment], now_ms: int) -> list[Segment]:
    """The sealed segments that no compaction has covered, and that one would cover now."""
    # After a restart every rewritten segment counts as compacted: at worst it waits until there are new ones.
    clean_until = log.compacted_until or max((s.next_offset for s in sealed if s.generation), default=0)
    hold = log.compaction_pin
    end = log.stable_end if hold is None else min(log.stable_end, hold)
    young_from_ms = now_ms - log.settings.compaction_lag_ms
    dirty: list[Segment] = []
    for segment in sealed:
        if segment.next_offset <= log.compacted_until:
            continue
        if segment.next_offset > end or (log.settings.compaction_lag_ms and segment.max_timestamp > young_from_ms):
            break  # compaction would stop here, so later segments are no reason for one
        if segment.base >= clean_until and segment.size:
            dirty.append(segment)
    return dirty


def _is_overdue_now(log: Log, oldest: Segment, now_ms: int) -> bool:
    """By the first batch of the oldest segment, as in Kafka; later batches are assumed to be younger."""
    chunk = log.read_now(max(oldest.base, log.start_offset), 1)
    if not chunk.data:
        return False
    [first, *_] = codec.scan(chunk.data, verify_crc=False)
    return now_ms - first.max_timestamp > log.settings.compaction_lag_max_ms
