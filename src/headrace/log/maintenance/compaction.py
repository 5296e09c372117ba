"""Rewriting sealed segments without the records that nobody needs any more.

The new file holds the same batches less the dropped records, at their old offsets: gaps are allowed, numbering is
not. It replaces the old one by a name of a higher generation, so whoever reads the old one is not disturbed, and
a crash leaves the old one or the new one. Key compaction and the rewriting of mostly settled queue segments
differ only in the filter.
"""

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from headrace.errors import CorruptBatch, CorruptLog, LogClosed
from headrace.log.disk import paths
from headrace.log.disk.disk import write_atomically
from headrace.log.disk.file_cache import FileCache
from headrace.log.segments import index
from headrace.log.segments.segment import Segment, seal_of
from headrace.record import codec
from headrace.record.codec import is_commit
from headrace.record.layout import MAX_TIMESTAMP
from headrace.record.types import BatchInfo

_READ_BYTES = 4 << 20


class Kept(NamedTuple):
    """What stays of a batch."""

    offsets: Sequence[int] | None  # all of them when None
    horizon_ms: int | None = None  # the delete horizon that it gets


ALL, NONE = Kept(None), Kept(())


class ByKey(Protocol):
    """The filter of key compaction."""

    def keeps(self, data: memoryview, info: BatchInfo) -> Kept: ...


# Which offsets of a batch to keep, of one without control records: all of them when None.
Filter = Callable[[memoryview, BatchInfo], Sequence[int] | None]


@dataclass(slots=True)
class Rewritten:
    segment: Segment
    bytes_before: int
    bytes_after: int
    records_before: int
    records_after: int
    unnamed: str | None = None  # the file that is to have the segment's name

    def added_to(self, earlier: "Rewritten | None") -> "Rewritten":
        """The figures of both, where this one is of what follows."""
        if earlier is None:
            return self
        return Rewritten(
            self.segment,
            earlier.bytes_before + self.bytes_before,
            earlier.bytes_after + self.bytes_after,
            earlier.records_before + self.records_before,
            earlier.records_after + self.records_after,
        )

    def made_of(self, earlier: "Rewritten | None") -> "Rewritten":
        """The figures of both, where this one is of what that one left, and more."""
        if earlier is None:
            return self
        return Rewritten(
            self.segment,
            self.bytes_before + earlier.bytes_before - earlier.bytes_after,
            self.bytes_after,
            self.records_before + earlier.records_before - earlier.records_after,
            self.records_after,
        )


def batches(files: FileCache, segment: Segment) -> Iterator[tuple[memoryview, BatchInfo]]:
    """Every batch of a sealed segment, checked. Damage is reported, never skipped."""
    position, want = 0, _READ_BYTES
    while position < segment.size:
        data = memoryview(files.read_segment(segment, min(want, segment.size - position), position))
        try:
            infos = codec.scan(data)
        except CorruptBatch as error:
            raise CorruptLog(segment.path(), position + (error.position or 0), error.reason) from error
        if not infos:
            need = 12 + int.from_bytes(data[8:12], "big")
            if need <= len(data) or need > segment.size - position:
                raise CorruptLog(segment.path(), position, "a batch is cut short")
            want = need
            continue
        for info in infos:
            yield data, info
        position += infos[-1].position + infos[-1].size
        want = _READ_BYTES


def _unless_ending(files: FileCache, segment: Segment) -> Iterator[tuple[memoryview, BatchInfo]]:
    """The same for work that may take hours: a broker that stops does not wait for it, and the next one begins anew."""
    for found in batches(files, segment):
        if files.is_ending:
            raise LogClosed("the broker is stopping")
        yield found


def rewrite(files: FileCache, segments: Sequence[Segment], keep: Filter | ByKey, interval: int) -> Rewritten:
    """Write one new segment for a run of neighbours, complete and synced, but not yet in the log.

    It counts with its last name, which `Maintenance` gives it when nobody is against it any more: a start takes the
    newest there is. The seal that says how far it reaches is durable before.
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
        # Not as a file of the log's: a sync that fails here is no reason to confirm nothing any more.
        write_atomically(disk, target.path(paths.SEAL), seal.pack())
        files.write_derived(target.path(paths.INDEX), walker.index, 0)
        files.write_derived(target.path(paths.TIME_INDEX), walker.time_index, 0)
    except BaseException:
        remove_made(files, target)
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


def remove_made(files: FileCache, target: Segment) -> None:
    """Of a segment that was not finished. Its room is needed, if there was not enough; what is left, the next start
    removes."""
    files.forget(target.paths)
    unfinished = [target.path(suffix) + paths.UNFINISHED for suffix in (paths.DATA, paths.SEAL)]
    for path in (*unfinished, *target.paths):
        with suppress(OSError):
            files.disk.unlink(path)


def kept_of(data: memoryview, info: BatchInfo, keep: Filter | ByKey) -> bytes | bytearray | memoryview | None:
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
    """How long tombstones stay, and ends of transactions of which nothing is left. The pass of compaction that removes
    what they are about gives their batch a delete horizon, and one that comes after it removes them: so every reader
    has that time to see them, whatever time the records say. A mirror's may be long ago."""

    def __init__(self, now_ms: int, retention_ms: int) -> None:
        self._now_ms = now_ms
        self._horizon_ms = min(now_ms + retention_ms, MAX_TIMESTAMP)

    def are_over(self, info: BatchInfo) -> bool:
        return info.delete_horizon_ms is not None and info.delete_horizon_ms <= self._now_ms

    def horizon_for(self, info: BatchInfo) -> int | None:
        """None where there is one: it does not move."""
        return self._horizon_ms if info.delete_horizon_ms is None else None


class Survivors:
    """The filter of key compaction where somebody else found the last record of each key, and says their offsets in
    ascending order. Records without a key stay, and everything from `until` on, which was not looked at. So do all
    tombstones, as they are, where nothing is said of deletes."""

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
    """The filter of key compaction: the last record of each key, everything that has no key, and a tombstone until
    every reader had time to see it.

    Learnt from `start` on, where the last pass ended, up to `until`: where `keys_max` keys were seen, a record is too
    young, `hold` says that somebody needs what follows, or a transaction is still open. The next pass begins there.
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
        self.is_full = False  # there is more to learn, in another pass
        self._deletes = Deletes(now_ms, tombstone_ms)
        self._young_from_ms = now_ms - lag_ms + 1 if lag_ms > 0 else None
        self._keys_max = keys_max
        self._hold = hold
        self._latest = codec.LatestOffsets()
        self._unended: set[int] = set()  # producers of whose transaction something was kept, up to its marker
        self._begun: set[int] = set()  # producers of whose transaction something was found, up to its marker
        self._aborts_before = aborts_before
        self.has_aborts = False  # that stayed
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
        # What a tombstone from `until` on is about may lie there, too: its time begins when that has gone.
        is_passed = has_tombstones and info.last_offset < self.until
        return Kept(offsets, self._deletes.horizon_for(info) if is_passed else None)

    def _keeps_marker(self, data: memoryview, info: BatchInfo) -> Kept:
        """That a transaction was committed need not be said when nothing of it is left, and every reader had time to
        see it. That one was aborted is said for longer: see aborts.py.

        Asked in the order of the log, from its first segment on: what is left is what this filter kept before."""
        is_last_word, has_begun = info.producer_id in self._unended, info.producer_id in self._begun
        self._unended.discard(info.producer_id)
        self._begun.discard(info.producer_id)
        if info.base_offset >= self.until:
            return ALL
        if is_commit(data, info):
            if is_last_word:
                return ALL
            return NONE if self._deletes.are_over(info) else Kept(None, self._deletes.horizon_for(info))
        if has_begun or info.base_offset >= self._aborts_before:
            self.has_aborts = True
            return ALL
        self._aborts_gone.append(info.base_offset)
        return NONE

    def take_aborts_gone(self) -> list[int]:
        """The markers of aborted transactions that were left out since this was asked last."""
        gone, self._aborts_gone = self._aborts_gone, []
        return gone

    def learn(self, files: FileCache, segments: Sequence[Segment], end: int) -> None:
        """What a transaction wrote counts once its commit is seen, and never if it was aborted. While neither is,
        the records from its first one on stay as they are."""
        undecided: dict[int, codec.LatestOffsets] = {}
        begun: dict[int, int] = {}
        until = self._start
        for data, info in self._within(files, segments, end):
            is_full = len(self._latest) + sum(map(len, undecided.values())) >= self._keys_max
            # Not before there is something to show for it: a transaction of more keys is held as a whole.
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
