"""Reading batches back: from an offset, from a timestamp, or a slice cut earlier.

The index gives a position at or before the offset; from there batch headers lead on. An index that points at
something that is not a batch is wrong, not the data: it is rebuilt once and asked again. Data that fails its
checksum is never handed out. What was checked when it came, or when it was read, is not checked again as long as it
is in memory: that would be a sixth of what a large read costs.

Runs on the owner thread and takes only what is in memory: everything else is a ReadWaits (loading.py).
"""

import logging
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import NamedTuple

from headrace.errors import CorruptBatch, CorruptLog, DecompressedTooLarge, LogClosed
from headrace.log.commit.log_writer import Tail
from headrace.log.counters import Counters
from headrace.log.disk import paths
from headrace.log.disk.file_cache import NO_FILES, NO_ROOM, FileCache
from headrace.log.read.cold_reads import CachedFiles, Loader, Loads
from headrace.log.read.file_range import FileRange
from headrace.log.read.recent_reads import RecentReads
from headrace.log.segments import index
from headrace.log.segments.index_cache import IndexCache
from headrace.log.segments.segment import Segment, read_seal, walk_segment, write_indexes
from headrace.log.tier.row_group_cache import within
from headrace.record import codec
from headrace.record.layout import HEADER_BYTES
from headrace.record.types import BatchInfo, Slice

logger = logging.getLogger("headrace.log")

RESUME_POINTS_MAX = 64
_STALE_BYTES = 2 << 20
_WAYS_MAX = 8  # entries of an index to try: each that leads into more damage costs a walk through the segment
UNFOLDED_BYTES_MAX = 1 << 20  # of a batch, while everybody waits: a millisecond or two
PART_BYTES_MIN = 64 << 10  # less is cheaper read and written than sent from its file


def _base(segment: Segment) -> int:
    return segment.base


class Chunk(NamedTuple):
    data: bytes | memoryview  # whole batches
    base_offset: int
    next_offset: int  # where to read on
    position: int = 0  # of the first batch in its segment


Look = Callable[..., tuple[int, int] | None]  # codec.first_at, told what to look for


class Reader:
    def __init__(
        self,
        files: FileCache,
        cache: IndexCache,
        recent: RecentReads,
        tail: Tail,
        counters: Counters,
        loader: Loader,
    ) -> None:
        self._files = files
        self._recent = recent
        self._loads = Loads(loader)
        self._unfolds = Loads(loader.alone)
        self._read = CachedFiles(files, self._loads, counters).read
        self._index_cache = cache
        self._tail = tail
        self._counters = counters
        # Where sequential readers go on, so that they need no index: next offset -> (segment, position).
        self._resume: OrderedDict[int, tuple[Segment, int]] = OrderedDict()

    def _read_batches(self, segment: Segment, size: int, position: int) -> bytes:
        """Of an archived segment only up to the end of a row group: the next one may have to be waited for."""
        tier = segment.tier
        if tier is None:
            cold_reads = self._counters.cold_reads
            try:
                return self._read(segment.data_path, size, position)
            finally:
                if self._counters.cold_reads != cold_reads:
                    segment.left_memory()
        group = tier.at_position(position)
        batches = self._files.groups.cached(tier, group)
        key = tier.path, group.number
        if batches is None:
            self._counters.tier_reads += 1
            self._loads.result(key, lambda: bool(self._files.groups.load(tier, group)))
            batches = self._files.groups.load(tier, group)  # gone again already, if it takes long
        else:
            self._loads.forget(key)
        return within(batches, group, size, position)

    def read(self, offset: int, stop: int, max_bytes: int) -> Chunk:
        segments = self._tail.segments
        if segments and offset >= segments[-1].base:
            segments = segments[-1:]
        else:
            segments = segments[max(bisect_right(segments, offset, key=_base) - 1, 0) :]
        for segment in segments:
            if segment.base >= stop:
                break
            if segment.next_offset <= offset or segment.size == 0:
                continue  # the records from here to the segment's end were compacted away
            chunk = self._read_segment(segment, offset, stop, max_bytes)
            if chunk is not None:
                return chunk
        return Chunk(b"", offset, stop)  # a gap up to the end: nothing left to read, and nothing lost

    def part(self, offset: int, stop: int, max_bytes: int) -> FileRange | None:
        """What `read` would find, left where it is, for a sequential reader that only sends it on. None where there is
        too little of it, and where it has to be read: to be checked, to be unpacked, from the disk."""
        segment, position = self._resume.get(offset, (None, 0))
        if segment is None or segment.is_deleted or segment.tier is not None or not self._holds(segment, offset):
            return None
        self._check_headers(segment)
        # An active segment grows meanwhile, so that its size and its next offset may not belong together.
        if segment.is_sealed and segment.next_offset <= stop and segment.size - position <= max_bytes:
            end, next_offset, is_at_end = segment.size, segment.next_offset, True
        else:
            end, next_offset = self._find_end(segment, stop, position + max_bytes)
            is_at_end = False
        if end - position < PART_BYTES_MIN or not segment.is_sound(position, end):
            return None
        part = self._files.part(segment, position, end, next_offset, is_at_end=is_at_end)
        if part is not None:
            self._remember(next_offset, segment, end)
            self._counters.bytes_read += part.size
            self._counters.records_read += next_offset - offset
        return part

    def _holds(self, segment: Segment, offset: int) -> bool:
        """Whether it is the one of the log that has the offset: it may have been rewritten."""
        segments = self._tail.segments
        if segments and offset >= segments[-1].base:
            return segment is segments[-1]
        at = bisect_right(segments, offset, key=_base)
        return at > 0 and segment is segments[at - 1]  # it has none while a truncation empties it

    def _find_end(self, segment: Segment, stop: int, position_max: int) -> tuple[int, int]:
        """(position, offset) of the last batch in the index that begins at or before both; zeros if there is none."""
        found = None
        relative = stop - segment.base
        writer = self._tail.writer
        if not segment.is_sealed and writer is not None and writer.segment is segment:
            found = writer.walker.find_pending_end(position_max, relative)
        if found is None:
            try:
                found = index.find_end(self._stored_index(segment), position_max, relative)
            except OSError:  # whoever reads on needs no index
                return 0, 0
        return (0, 0) if found is None else (found[0], segment.base + found[1])

    def behind(self, offset: int, stop: int) -> int:
        """The next offset from which reading goes on, past one that cannot be read; `stop` where there is none. Only
        an entry of an index or another segment is a way around damage: every other way leads through it."""
        for found in self._ways_around(offset, stop):
            try:
                self.read(found, stop, 1)
            except CorruptLog:
                continue
            return found
        return stop

    def _ways_around(self, offset: int, stop: int) -> Iterator[int]:
        for segment in self._tail.segments:
            if segment.next_offset <= offset or segment.base >= stop or segment.size == 0:
                continue
            if segment.base > offset:
                yield segment.base
            elif segment.tier is None:
                entries = memoryview(self._index_entries(segment))
                known = (segment.base + int.from_bytes(entries[at : at + 4], "big") for at in range(0, len(entries), 8))
                yield from islice((entry for entry in known if offset < entry < stop), _WAYS_MAX)

    def read_segment(self, segment: Segment, offset: int, stop: int, max_bytes: int) -> Chunk:
        """As read, but of this segment alone, whether or not it is still part of the log."""
        chunk = self._read_segment(segment, offset, stop, max_bytes) if segment.size and offset < stop else None
        return chunk or Chunk(b"", offset, stop)

    def _read_segment(self, segment: Segment, offset: int, stop: int, max_bytes: int) -> Chunk | None:
        key = segment, offset, stop, max_bytes
        chunk = self._recent.get(key)
        if chunk is None:
            chunk = self._look_for(segment, offset, stop, max_bytes)
            if chunk is not None and segment.tier is None:  # what is unpacked from the tier has its own cache
                self._recent.offer(key, chunk)
        if chunk is not None:
            self._counters.bytes_read += len(chunk.data)
            self._counters.records_read += chunk.next_offset - chunk.base_offset
        return chunk

    def _look_for(self, segment: Segment, offset: int, stop: int, max_bytes: int) -> Chunk | None:
        resume = self._resume.get(offset)
        self._check_headers(segment)
        if resume is not None and resume[0] is segment and not segment.is_deleted:
            position, expected, size = resume[1], offset, max_bytes
        else:
            position, expected = self._find_start(segment, offset)
            size = max_bytes + 2 * self._tail.settings.index_interval  # what may lie between the entry and the batch
        try:
            return self._read_at(segment, position, expected, offset, stop, size, max_bytes)
        except CorruptBatch as error:
            # The index may be wrong, or the data: from the beginning on, every batch vouches for the next.
            self._resume.pop(offset, None)
            at = position + (error.position or 0)
        try:
            chunk = self._read_at(segment, 0, segment.base, offset, stop, size, max_bytes)
        except CorruptBatch as error:
            raise self._met(CorruptLog(segment.path(), error.position or at, error.reason)) from error
        if segment.is_sealed and segment.tier is None:
            # Not waited for: until it is done, or if it cannot be, the walk from the beginning serves.
            key = "index", segment.path()
            self._loads.run(key, lambda: self._rebuild(segment), lambda: self._rebuilt(key, segment))
        return chunk

    def _met(self, damage: CorruptLog) -> CorruptLog:
        """Said once, not to every reader that comes by: who reads may be a program that only tries again."""
        self._counters.crc_failures += 1
        if damage.path not in self._tail.rotten:
            self._tail.rotten.add(damage.path)
            # As text: who keeps log lines would keep the error, and with it the open files of whoever was reading.
            logger.error("%s. That batch is not served, what is before and behind it is", str(damage))
        return damage

    def _rebuilt(self, key: tuple[str, str], segment: Segment) -> None:
        self._loads.forget(key)
        self._index_cache.drop(segment)

    def _check_headers(self, segment: Segment) -> None:
        """Where offsets have gaps a wrong base offset does not stand out, so compare with the seal, once."""
        if segment.is_checked or not segment.is_sealed or segment.is_dense:
            return  # of an archived one every byte was compared
        if not self._loads.result(("headers", segment.path()), lambda: self._agrees_with_seal(segment)):
            raise self._met(CorruptLog(segment.path(), 0, "the batches' headers are not those that were sealed"))
        segment.is_checked = True

    def _agrees_with_seal(self, segment: Segment) -> bool:
        """Reads the whole segment: a job for the loader."""
        seal = read_seal(self._files.disk, segment.path(paths.SEAL))
        if seal is None:
            return True
        walker = index.Walker(segment.base, self._tail.settings.index_interval)
        walk_segment(self._files, segment, walker)
        return bool(walker.headers_crc == seal.headers_crc)

    def _read_at(
        self,
        segment: Segment,
        position: int,
        expected: int,
        offset: int,
        stop: int,
        size: int,
        max_bytes: int,
    ) -> Chunk | None:
        dense = segment.is_dense
        while position < segment.size:
            data = self._read_batches(segment, min(size, segment.size - position), position)
            if len(data) < min(HEADER_BYTES, size):
                raise CorruptBatch(f"{segment.size - position} bytes expected, {len(data)} found")
            verify = not (self._files.disk.tells_cached and segment.is_sound(position, position + len(data)))
            first, end, next_offset = codec.trim(data, 0, len(data), offset, stop, max_bytes, expected, dense, verify)
            if end > first:
                self._remember(next_offset, segment, position + end)
                if verify:
                    segment.was_read(position + first, position + end)
                base = int.from_bytes(data[first : first + 8], "big")
                whole = first == 0 and end == len(data)
                return Chunk(data if whole else memoryview(data)[first:end], base, next_offset, position + first)
            if next_offset < 0:
                size = -next_offset  # the batch is larger than what was read: exactly that much is needed
                if size > segment.size - position - first:
                    raise CorruptBatch(f"a batch of {size} bytes runs past the end of its segment")
            elif first < len(data):
                break  # nothing wanted from here to the end of the segment
            if first:
                expected = codec.scan(data, 0, first, verify_crc=False)[-1].next_offset
            position += first
        if dense and offset < min(segment.next_offset, stop):
            raise CorruptBatch(f"offset {offset} is missing")
        return None

    def _remember(self, offset: int, segment: Segment, position: int) -> None:
        self._resume[offset] = segment, position
        if len(self._resume) > RESUME_POINTS_MAX:
            self._resume.popitem(last=False)

    def forget_positions(self) -> None:
        self._resume.clear()

    def _find_start(self, segment: Segment, offset: int) -> tuple[int, int]:
        """(position, base offset of the batch there) to begin looking for offset."""
        relative = offset - segment.base
        if segment.tier is not None:
            group = segment.tier.at_offset(offset)
            return group.position, group.first_offset
        if not segment.is_sealed:
            writer = self._tail.writer
            if writer is not None and writer.segment is segment:
                pending = writer.walker.find_pending_entry(relative)
                if pending is not None:
                    self._counters.index_lookups += 1
                    return pending[0], segment.base + pending[1]
        self._counters.index_lookups += 1
        position, base = index.find_entry(self._index_of(segment), relative)
        return (position, segment.base + base) if position < segment.size else (0, segment.base)

    def find_position(self, segment: Segment, offset: int) -> int:
        """Where to begin looking for offset: at its batch or a little before it."""
        self._counters.index_lookups += 1
        relative = offset - segment.base
        if not segment.is_sealed:
            writer = self._tail.writer
            if writer is not None and writer.segment is segment:
                position = writer.walker.find_pending(relative)
                if position >= 0:
                    return position
        position = index.find_position(self._index_of(segment), relative)
        return position if position < segment.size else 0

    def _index_of(self, segment: Segment) -> bytes:
        entries = self._stored_index(segment)
        if not entries and segment.is_sealed and segment.size:
            self._index_cache.drop(segment)
            entries = self._loads.result(("index", segment.path()), lambda: self._rebuild(segment))
            self._index_cache.keep(segment, entries, segment.size, is_whole=True)
        return entries

    def _stored_index(self, segment: Segment) -> bytes:
        """What its file has: nothing, if it is lost."""
        entries = segment.index
        # An active segment's index grows, and a stale copy only means a longer walk; a sealed one's is complete.
        if entries is None or (
            not segment.index_is_whole and (segment.is_sealed or segment.size - segment.index_size > _STALE_BYTES)
        ):
            entries = self._index_cache.load(segment, self._read)
        return entries

    def _rebuild(self, segment: Segment) -> bytes:
        """Reads the whole segment: a job for the loader."""
        self._counters.indexes_rebuilt += 1
        walker = index.Walker(segment.base, self._tail.settings.index_interval)
        walk_segment(self._files, segment, walker)
        try:
            write_indexes(self._files, segment, walker)
        except OSError as error:
            if error.errno not in NO_ROOM + NO_FILES:  # it is read all the same, or nobody could make room on it
                raise
        return bytes(walker.index)

    def offset_for_timestamp(self, timestamp_ms: int, start: int, stop: int) -> tuple[int, int] | None:
        """CorruptLog with the offset behind which a search can go on: before it there is none."""
        for segment in self._tail.segments:
            if segment.max_timestamp < timestamp_ms or segment.next_offset <= start or segment.base >= stop:
                continue
            if segment.tier is not None:
                offset = max(segment.tier.first_offset_at(timestamp_ms), start)
            else:
                entries = self._time_index(segment)
                offset = max(segment.base + index.find_offset_for_time(entries, segment.base, timestamp_ms), start)
            while offset < min(segment.next_offset, stop):
                try:
                    chunk = self._read_segment(segment, offset, stop, 1 << 20)
                except CorruptLog as damage:
                    damage.offset = offset
                    raise
                if chunk is None:
                    break
                for info in codec.scan(chunk.data, verify_crc=False):
                    if info.max_timestamp < timestamp_ms or info.is_control:
                        continue
                    found = self._first_at(segment, chunk, info, timestamp_ms, offset, stop)
                    if found is not None:
                        return found
                offset = chunk.next_offset
        return None

    def _first_at(
        self, segment: Segment, chunk: Chunk, info: BatchInfo, timestamp_ms: int, start: int, stop: int
    ) -> tuple[int, int] | None:
        """As codec.first_at. What unfolds to much does so in a thread."""
        # As far as it is the batch's: the end moves on, and the retry would look for something else.
        start, stop = max(start, info.base_offset), min(stop, info.next_offset)
        look = partial(codec.first_at, timestamp_ms=timestamp_ms, from_offset=start, to_offset=stop)
        if info.size <= UNFOLDED_BYTES_MAX:
            with suppress(DecompressedTooLarge):
                return look(chunk.data, info.position, decompressed_bytes_max=UNFOLDED_BYTES_MAX)
        # The segment itself: another one may have its name by the time of the retry, with other bytes.
        key = segment, info.base_offset, timestamp_ms, start, stop
        unfold = partial(self._unfold, segment, chunk.position + info.position, info.size, info.base_offset, look)
        try:
            found: tuple[int, int] | None = self._unfolds.result(key, unfold)
        except CorruptLog as damage:
            segment.left_memory()  # in part at least: what the thread brought back is in memory, and not sound
            damage.offset = start
            raise self._met(damage) from None
        return found

    def _unfold(
        self, segment: Segment, position: int, size: int, base_offset: int, look: Look
    ) -> tuple[int, int] | None:
        """A job for the loader. It reads the batch when its turn comes: thousands may wait for theirs, and would hold
        as many batches."""
        data = self._files.read_segment(segment, size, position)
        # It may have left memory while it waited, and come back as something else.
        end, *_, reason = codec.valid_until(data, expected_offset=base_offset, dense=True)
        if end < size:
            raise CorruptLog(segment.path(), position, reason or f"{size:,} bytes expected, {len(data):,} found")
        return look(data, 0, in_thread=True)

    def slices(self, log_id: int, start: int, end: int, split_bytes: int) -> list[Slice]:
        found = []
        for segment in self._tail.segments:
            if segment.next_offset <= start or segment.base >= end or segment.size == 0:
                continue
            if segment.tier is not None:
                cuts = segment.tier.group_cuts(start, end, split_bytes)
                found += [Slice(log_id, segment.base, segment.generation, *cut) for cut in cuts]
                continue
            position = self.find_position(segment, max(start, segment.base))
            for piece in cut(self._index_entries(segment), segment, position, end, split_bytes):
                found.append(Slice(log_id, segment.base, segment.generation, *piece))
        return found

    def _time_index(self, segment: Segment) -> bytes:
        path = segment.path(paths.TIME_INDEX)
        entries = self._read(path, self._files.size(path), 0) if self._files.disk.exists(path) else b""
        writer = self._tail.writer
        if writer is not None and writer.segment is segment:
            entries += bytes(writer.walker.time_index)
        return entries

    def _index_entries(self, segment: Segment) -> bytes:
        entries = self._index_cache.load(segment, self._read)
        writer = self._tail.writer
        if writer is not None and writer.segment is segment:
            entries += bytes(writer.walker.index)
        return entries

    def read_slice(self, piece: Slice) -> bytes:
        for segment in self._tail.segments:
            if segment.base == piece.segment and segment.generation == piece.generation:
                if segment.tier is None:
                    return self._read(segment.path(), piece.length, piece.position)
                found = bytearray()
                while len(found) < piece.length:
                    rest = piece.length - len(found)
                    found += self._files.read_segment(segment, rest, piece.position + len(found))
                return bytes(found)
        raise LogClosed(f"segment {piece.segment} generation {piece.generation} of log {piece.log_id} is gone")


def cut(entries: bytes, segment: Segment, position: int, end: int, split_bytes: int) -> list[tuple[int, int, int, int]]:
    """(position, length, first offset, next offset) of pieces of about split_bytes, cut where the index has an entry.

    The last one runs to the end of the segment's bytes: its reader stops at the offset it was told.
    """
    pieces = []
    begin, begin_offset = position, None
    for at in range(0, len(entries), 8):
        entry_offset = segment.base + int.from_bytes(entries[at : at + 4], "big")
        entry_position = int.from_bytes(entries[at + 4 : at + 8], "big")
        if entry_position < position:
            continue
        if begin_offset is None:
            begin, begin_offset = entry_position, entry_offset
            continue
        if entry_offset >= end:
            pieces.append((begin, entry_position - begin, begin_offset, min(entry_offset, end)))
            return pieces
        if entry_position - begin >= split_bytes:
            pieces.append((begin, entry_position - begin, begin_offset, entry_offset))
            begin, begin_offset = entry_position, entry_offset
    if begin < segment.size:
        first = segment.base if begin_offset is None else begin_offset
        pieces.append((begin, segment.size - begin, first, min(segment.next_offset, end)))
    return pieces
