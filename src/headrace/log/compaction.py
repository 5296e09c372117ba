"""Rewriting sealed segments without the records that nobody needs any more.

The new file holds the same batches less the dropped records, at their old offsets: gaps are allowed, numbering is
not. It replaces the old one by a name of a higher generation, so whoever reads the old one is not disturbed, and
a crash leaves the old one or the new one. Key compaction and the rewriting of mostly settled queue segments
differ only in the filter.
"""

from collections.abc import Callable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass

from headrace.errors import CorruptBatch, CorruptLog
from headrace.log import kernel, paths
from headrace.log.files import Files
from headrace.log.segment import Segment, seal_of
from headrace.record import codec
from headrace.record.control import is_commit
from headrace.record.types import BatchInfo

_READ_BYTES = 4 << 20

# Which offsets of a batch to keep: all of them when None.
Filter = Callable[[memoryview, BatchInfo], Sequence[int] | None]


@dataclass(slots=True)
class Rewritten:
    segment: Segment
    bytes_before: int
    bytes_after: int
    records_before: int
    records_after: int

    def added_to(self, earlier: "Rewritten | None") -> "Rewritten":
        """The figures of both."""
        if earlier is None:
            return self
        return Rewritten(
            self.segment,
            earlier.bytes_before + self.bytes_before,
            earlier.bytes_after + self.bytes_after,
            earlier.records_before + self.records_before,
            earlier.records_after + self.records_after,
        )


def batches(files: Files, segment: Segment) -> Iterator[tuple[memoryview, BatchInfo]]:
    """Every batch of a sealed segment, checked. Damage is reported, never skipped."""
    position, want = 0, _READ_BYTES
    while position < segment.size:
        data = memoryview(files.read_segment(segment, min(want, segment.size - position), position))
        try:
            infos = codec.scan(data)
        except CorruptBatch as error:
            raise CorruptLog(segment.path(), position, str(error)) from error
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


def rewrite(files: Files, segments: Sequence[Segment], keep: Filter, interval: int) -> Rewritten:
    """Write one new segment for a run of neighbours, complete and synced, but not yet in the log.

    Its name becomes visible with the rename, and the seal that says how far it reaches is durable before.
    """
    first, last = segments[0], segments[-1]
    target = Segment(first.folder, first.base, max(s.generation for s in segments) + 1)
    walker = kernel.Walker(first.base, interval)
    temporary = target.path() + paths.UNFINISHED
    disk = files.disk
    if disk.exists(temporary):
        disk.unlink(temporary)
    file = disk.open(temporary, create=True, exclusive=True)
    try:
        for segment in segments:
            for data, info in batches(files, segment):
                kept = kept_of(data, info, keep)
                if kept is not None:
                    disk.pwrite(file, [kept], walker.position)
                    walker.walk(kept)
        disk.sync(file)
    except BaseException:
        with suppress(OSError):  # its room is needed, if there was not enough; what is left, the next start removes
            disk.unlink(temporary)
        raise
    finally:
        disk.close(file)
    seal = seal_of(walker, last.next_offset)
    files.write(target.path(paths.SEAL), [seal.pack()], 0, create=True)
    files.sync(target.path(paths.SEAL))
    disk.sync_dir(first.folder)
    files.write_derived(target.path(paths.INDEX), walker.index, 0)
    files.write_derived(target.path(paths.TIME_INDEX), walker.time_index, 0)
    disk.rename(temporary, target.path())
    disk.sync_dir(first.folder)
    target.size, target.records = seal.size, seal.records
    target.next_offset, target.max_timestamp, target.is_sealed = seal.next_offset, seal.max_timestamp, True
    return Rewritten(
        target, sum(s.size for s in segments), target.size, sum(s.records for s in segments), target.records
    )


def kept_of(data: memoryview, info: BatchInfo, keep: Filter) -> bytes | bytearray | memoryview | None:
    whole = data[info.position : info.position + info.size]
    if info.is_control:
        return whole
    offsets = keep(data, info)
    if offsets is None or len(offsets) == info.count:
        return whole
    return codec.filter_batch(data, info, offsets) if offsets else None


class ByKey:
    """What key compaction keeps: the last record of each key, everything that has no key, and a tombstone until every
    reader had time to see it. Who knows which record is the last says so in `is_last`."""

    def __init__(self, now_ms: int, *, tombstone_ms: int, hold: int | None, until: int) -> None:
        self._now_ms = now_ms
        self._tombstone_ms = tombstone_ms
        self._hold = hold  # records from here on are needed by a queue view that has not settled them
        self.until = until  # offsets from here on were not looked at

    def is_last(self, key: bytes, offset: int) -> bool:
        raise NotImplementedError

    def __call__(self, data: memoryview, info: BatchInfo) -> list[int] | None:
        if info.base_offset >= self.until or (self._hold is not None and info.base_offset >= self._hold):
            return None
        return [
            record.offset
            for record in codec.records(data, info.position, info.position + info.size)
            if self._keeps(record.key, record.value, record.offset, record.timestamp)
        ]

    def _keeps(self, key: bytes | None, value: bytes | None, offset: int, timestamp: int) -> bool:
        if key is None or offset >= self.until or (self._hold is not None and offset >= self._hold):
            return True
        if not self.is_last(key, offset):
            return False
        # A tombstone has done its work once every reader had time to see it.
        return value is not None or self._now_ms - timestamp < self._tombstone_ms


class Survivors(ByKey):
    """The filter of key compaction where somebody else found the last record of each key, and says their offsets."""

    def __init__(
        self, offsets: Set[int], now_ms: int, *, tombstone_ms: int, hold: int | None, until: int
    ) -> None:
        super().__init__(now_ms, tombstone_ms=tombstone_ms, hold=hold, until=until)
        self._offsets = offsets

    def is_last(self, key: bytes, offset: int) -> bool:
        return offset in self._offsets


class LatestByKey(ByKey):
    """The filter of key compaction, learnt from the segments to be cleaned and those behind them up to `until`; memory
    is one entry per key, so the caller bounds the number of keys and cleans the rest in another pass.
    """

    def __init__(
        self, now_ms: int, *, lag_ms: int, tombstone_ms: int, keys_max: int, hold: int | None
    ) -> None:
        super().__init__(now_ms, tombstone_ms=tombstone_ms, hold=hold, until=0)
        self._lag_ms = lag_ms
        self._keys_max = keys_max
        self._latest: dict[bytes, int] = {}

    def is_last(self, key: bytes, offset: int) -> bool:
        return self._latest.get(key) == offset

    def learn(self, files: Files, segments: Sequence[Segment], end: int) -> None:
        """What a transaction wrote counts once its commit is seen, and never if it was aborted. While neither is,
        the records from its first one on stay as they are."""
        undecided: dict[int, dict[bytes, int]] = {}
        begun: dict[int, int] = {}
        for data, info in self._within(files, segments, end):
            if info.is_control:
                begun.pop(info.producer_id, None)
                written = undecided.pop(info.producer_id, {})
                if written and is_commit(data, info):
                    for key, offset in written.items():
                        self._latest[key] = max(offset, self._latest.get(key, -1))
            else:
                latest = self._latest
                if info.is_transactional:
                    begun.setdefault(info.producer_id, info.base_offset)
                    latest = undecided.setdefault(info.producer_id, {})
                for record in codec.records(data, info.position, info.position + info.size):
                    if record.key is not None:
                        latest[record.key] = record.offset
            self.until = info.last_offset + 1
        self.until = min(self.until, *begun.values()) if begun else self.until

    def _within(
        self, files: Files, segments: Sequence[Segment], end: int
    ) -> Iterator[tuple[memoryview, BatchInfo]]:
        for segment in segments:
            for data, info in batches(files, segment):
                if info.base_offset >= end or self._is_young(info.max_timestamp):
                    return
                if len(self._latest) >= self._keys_max:
                    return
                yield data, info

    def _is_young(self, timestamp: int) -> bool:
        return self._lag_ms > 0 and self._now_ms - timestamp < self._lag_ms
