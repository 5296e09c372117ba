"""Reading batches of one log: from an offset, from a timestamp, or a slice that was cut earlier.

The index gives a position at or before the offset; from there batch headers lead on. If the index points at something
that is not a batch, the index is wrong and not the data: it is rebuilt once and consulted again. Data that fails its
checksum is never returned. Batches that were checked when they were written or read are not checked again while they
stay in memory, which would be a sixth of the cost of a large read.

Runs on the owner thread and reads only what is in memory; otherwise it raises ReadWaits (cold_reads.py).
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import Protocol

from headrace.errors import CorruptBatch, CorruptLog, DecompressedTooLarge, LogClosed
from headrace.log.counters import Counters
from headrace.log.disk import paths
from headrace.log.disk.file_cache import NO_FILES, NO_ROOM, FileCache
from headrace.log.read.chunk import Chunk as Chunk
from headrace.log.read.cold_reads import CachedFiles, Loader, Loads
from headrace.log.read.file_range import FileRange, FileRanges
from headrace.log.read.recent_reads import RecentReads
from headrace.log.segments import index
from headrace.log.segments.index_cache import IndexCache
from headrace.log.segments.segment import Segment, SegmentWriter, read_seal, walk_segment, write_indexes
from headrace.log.segments.source import Cut
from headrace.log.settings import StreamSettings
from headrace.record import codec
from headrace.record.layout import HEADER_BYTES
from headrace.record.types import BatchInfo, Slice

logger = logging.getLogger("headrace.log")

RESUME_POINTS_MAX = 64
_STALE_BYTES = 2 << 20
_ENTRIES_TRIED_MAX = 8  # index entries to try behind damage: each that leads into more costs a walk of the segment
INLINE_BYTES_MAX = 1 << 20  # decompressed on the owner thread at most, which takes a millisecond or two
PART_BYTES_MIN = 64 << 10  # smaller ranges are cheaper to read and write than to send with sendfile


def _base(segment: Segment) -> int:
    return segment.base


Search = Callable[..., tuple[int, int] | None]  # codec.first_at with its arguments bound


class ReadableTail(Protocol):
    """The segments of a log and the writer of the last one; implemented by `commit.log_writer.Tail`."""

    settings: StreamSettings
    segments: tuple[Segment, ...]
    writer: SegmentWriter | None
    rotten: frozenset[str]  # data files in which a read met damage


class LogReader:
    __slots__ = (
        "_counters",
        "_decompressions",
        "_files",
        "_index_cache",
        "_loads",
        "_ranges",
        "_read",
        "_reads",
        "_recent",
        "_resume",
        "_tail",
    )

    def __init__(
        self,
        files: FileCache,
        cache: IndexCache,
        recent: RecentReads,
        ranges: FileRanges,
        tail: ReadableTail,
        counters: Counters,
        loader: Loader,
    ) -> None:
        self._files = files
        self._recent = recent
        self._ranges = ranges
        self._loads = Loads(loader)
        self._decompressions = Loads(loader.alone)
        self._reads = CachedFiles(files, self._loads, counters)
        self._read = self._reads.read
        self._index_cache = cache
        self._tail = tail
        self._counters = counters
        # Where sequential readers continue without an index lookup: next offset -> (segment, position).
        self._resume: dict[int, tuple[Segment, int]] = {}

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

    def file_range(self, offset: int, stop: int, max_bytes: int) -> FileRange | None:
        """The batches that `read` would return, left in their file for a sequential reader that only forwards them.
        None where there is too little, and where the batches have to be read: from the disk, or to be checked or
        decompressed."""
        segment, position = self._resume.get(offset, (None, 0))
        if segment is None or segment.is_deleted or segment.is_archived or not self._is_current(segment, offset):
            return None
        self._check_headers(segment)
        # An active segment grows meanwhile, so its size and its next offset may not belong together.
        if segment.is_sealed and segment.next_offset <= stop and segment.size - position <= max_bytes:
            end, next_offset, is_at_end = segment.size, segment.next_offset, True
        else:
            end, next_offset = self._find_end(segment, stop, position + max_bytes)
            is_at_end = False
        if end - position < PART_BYTES_MIN or not segment.is_sound(position, end):
            return None
        found = self._ranges.cut(segment, position, end, next_offset, is_at_end=is_at_end)
        if found is not None:
            self._remember(next_offset, segment, end)
            self._counters.bytes_read += found.size
            self._counters.records_read += next_offset - offset
        return found

    def _is_current(self, segment: Segment, offset: int) -> bool:
        """Whether the log still reads this offset from this segment, which may have been rewritten."""
        segments = self._tail.segments
        if segments and offset >= segments[-1].base:
            return segment is segments[-1]
        at = bisect_right(segments, offset, key=_base)
        return at > 0 and segment is segments[at - 1]  # a log has no segments while a truncation empties it

    def _find_end(self, segment: Segment, stop: int, position_max: int) -> tuple[int, int]:
        """(position, offset) of the last indexed batch that begins at or before both limits; zeros if there is none."""
        found = None
        relative = stop - segment.base
        writer = self._tail.writer
        if not segment.is_sealed and writer is not None and writer.segment is segment:
            found = writer.walker.find_pending_end(position_max, relative)
        if found is None:
            try:
                found = index.find_end(self._stored_index(segment), position_max, relative)
            except OSError:  # the caller falls back to `read`, which needs no index here
                return 0, 0
        return (0, 0) if found is None else (found[0], segment.base + found[1])

    def next_readable(self, offset: int, stop: int) -> int:
        """The first offset behind a damaged one from which reading works again; `stop` if there is none. Only index
        entries and later segments lead past damage: batch headers lead through it."""
        for found in self._starts_behind(offset, stop):
            try:
                self.read(found, stop, 1)
            except CorruptLog:
                continue
            return found
        return stop

    def _starts_behind(self, offset: int, stop: int) -> Iterator[int]:
        for segment in self._tail.segments:
            if segment.next_offset <= offset or segment.base >= stop or segment.size == 0:
                continue
            if segment.base > offset:
                yield segment.base
            elif not segment.is_archived:
                entries = memoryview(self._index_entries(segment))
                known = (segment.base + int.from_bytes(entries[at : at + 4], "big") for at in range(0, len(entries), 8))
                yield from islice((entry for entry in known if offset < entry < stop), _ENTRIES_TRIED_MAX)

    def read_segment(self, segment: Segment, offset: int, stop: int, max_bytes: int) -> Chunk:
        """Like `read`, but from this segment only, even if it is no longer part of the log."""
        chunk = self._read_segment(segment, offset, stop, max_bytes) if segment.size and offset < stop else None
        return chunk or Chunk(b"", offset, stop)

    def _read_segment(self, segment: Segment, offset: int, stop: int, max_bytes: int) -> Chunk | None:
        key = segment, offset, stop, max_bytes
        chunk = self._recent.get(key)
        if chunk is None:
            chunk = self._find_and_read(segment, offset, stop, max_bytes)
            if chunk is not None and not segment.is_archived:  # archived batches have a cache of their own
                self._recent.offer(key, chunk)
        if chunk is not None:
            self._counters.bytes_read += len(chunk.data)
            self._counters.records_read += chunk.next_offset - chunk.base_offset
        return chunk

    def _find_and_read(self, segment: Segment, offset: int, stop: int, max_bytes: int) -> Chunk | None:
        resume = self._resume.get(offset)
        self._check_headers(segment)
        if resume is not None and resume[0] is segment and not segment.is_deleted:
            position, expected, size = resume[1], offset, max_bytes
        else:
            position, expected = self._find_start(segment, offset)
            size = max_bytes + 2 * self._tail.settings.index_interval  # the batch may lie that far behind the entry
        try:
            return self._read_at(segment, position, expected, offset, stop, size, max_bytes)
        except CorruptBatch as error:
            # Either the index or the data is wrong: read from the beginning, where every batch leads to the next.
            self._resume.pop(offset, None)
            at = position + (error.position or 0)
        try:
            chunk = self._read_at(segment, 0, segment.base, offset, stop, size, max_bytes)
        except CorruptBatch as error:
            raise self._reported(CorruptLog(segment.path(), error.position or at, error.reason)) from error
        if segment.is_sealed and not segment.is_archived:
            # In the background: until the index is rebuilt, or if it cannot be, reads walk from the beginning.
            key = "index", segment.path()
            self._loads.run(key, lambda: self._rebuild(segment), lambda: self._rebuilt(key, segment))
        return chunk

    def _reported(self, damage: CorruptLog) -> CorruptLog:
        """Count the damage, and log it once per file: a client may retry the same read for ever."""
        self._counters.crc_failures += 1
        if damage.path not in self._tail.rotten:
            self._tail.rotten |= {damage.path}
            # As text: a log handler that keeps records would keep the error, and with it the reader's open files.
            logger.error("%s. This batch is not served; the batches before and after it are", str(damage))
        return damage

    def _rebuilt(self, key: tuple[str, str], segment: Segment) -> None:
        self._loads.forget(key)
        self._index_cache.drop(segment)

    def _check_headers(self, segment: Segment) -> None:
        """Compare the batch headers with the seal, once, if offsets have gaps: a wrong base offset would not stand
        out."""
        if segment.is_checked or not segment.is_sealed or segment.is_dense:
            return  # archived segments count as checked: every byte was compared when they were archived
        if not self._loads.result(("headers", segment.path()), lambda: self._agrees_with_seal(segment)):
            raise self._reported(CorruptLog(segment.path(), 0, "the batch headers are not those that were sealed"))
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
            data = segment.source.read_now(self._reads, segment, min(size, segment.size - position), position)
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
                size = -next_offset  # the batch is larger than what was read, and this is its exact size
                if size > segment.size - position - first:
                    raise CorruptBatch(f"a batch of {size} bytes runs past the end of its segment")
            elif first < len(data):
                break  # the rest of the segment holds nothing for this read
            if first:
                expected = codec.scan(data, 0, first, verify_crc=False)[-1].next_offset
            position += first
        if dense and offset < min(segment.next_offset, stop):
            raise CorruptBatch(f"offset {offset} is missing")
        return None

    def _remember(self, offset: int, segment: Segment, position: int) -> None:
        self._resume[offset] = segment, position
        if len(self._resume) > RESUME_POINTS_MAX:
            del self._resume[next(iter(self._resume))]

    def forget_positions(self) -> None:
        self._resume.clear()

    def _find_start(self, segment: Segment, offset: int) -> tuple[int, int]:
        """(position, base offset of the batch there) from which to look for an offset."""
        relative = offset - segment.base
        contents = segment.source.contents
        if contents is not None:
            return contents.find_start(offset)
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
        """The position from which to look for an offset: that of its batch, or a little before it."""
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
        """The content of the index file; empty if it is lost."""
        entries = segment.index
        # The index of an active segment grows, and a stale copy only means a longer walk; a sealed one is complete.
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
            if error.errno not in NO_ROOM + NO_FILES:  # reads must work on a full disk, or space could not be freed
                raise
        return bytes(walker.index)

    def offset_for_timestamp(self, timestamp_ms: int, start: int, stop: int) -> tuple[int, int] | None:
        """(offset, timestamp) of the first record at or after a time. The `offset` of a CorruptLog says where the
        search stopped: no record before it matches."""
        for segment in self._tail.segments:
            if segment.max_timestamp < timestamp_ms or segment.next_offset <= start or segment.base >= stop:
                continue
            contents = segment.source.contents
            if contents is not None:
                offset = max(contents.first_offset_at(timestamp_ms), start)
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
        """Like codec.first_at; a batch that decompresses to much does so on another thread."""
        # Clamped to the batch: the log's end moves, and the retry would otherwise have another key.
        start, stop = max(start, info.base_offset), min(stop, info.next_offset)
        search = partial(codec.first_at, timestamp_ms=timestamp_ms, from_offset=start, to_offset=stop)
        if info.size <= INLINE_BYTES_MAX:
            with suppress(DecompressedTooLarge):
                return search(chunk.data, info.position, decompressed_bytes_max=INLINE_BYTES_MAX)
        # The Segment is part of the key and not its path, which may be reused for other bytes before the retry.
        key = segment, info.base_offset, timestamp_ms, start, stop
        job = partial(self._search_batch, segment, chunk.position + info.position, info.size, info.base_offset, search)
        try:
            found: tuple[int, int] | None = self._decompressions.result(key, job)
        except CorruptLog as damage:
            segment.left_memory()  # the thread has read bytes from the disk that do not match their checksum
            damage.offset = start
            raise self._reported(damage) from None
        return found

    def _search_batch(
        self, segment: Segment, position: int, size: int, base_offset: int, search: Search
    ) -> tuple[int, int] | None:
        """A job for the loader. It reads the batch only when it runs: thousands of jobs may be queued, and would each
        hold a batch."""
        data = segment.source.read(self._files, segment, size, position)
        # The batch may have left memory while the job was queued, and be damaged on the disk.
        end, *_, reason = codec.valid_until(data, expected_offset=base_offset, dense=True)
        if end < size:
            raise CorruptLog(segment.path(), position, reason or f"{size:,} bytes expected, {len(data):,} found")
        return search(data, 0, in_thread=True)

    def slices(self, log_id: int, start: int, end: int, split_bytes: int) -> list[Slice]:
        found = []
        for segment in self._tail.segments:
            if segment.next_offset <= start or segment.base >= end or segment.size == 0:
                continue
            contents = segment.source.contents
            if contents is not None:
                cuts = contents.cuts(start, end, split_bytes)
            else:
                position = self.find_position(segment, max(start, segment.base))
                cuts = cut_at_entries(self._index_entries(segment), segment, position, end, split_bytes)
            found += [Slice(log_id, segment.base, segment.generation, *cut) for cut in cuts]
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
                if not segment.is_archived:
                    return self._read(segment.path(), piece.length, piece.position)
                found = bytearray()
                while len(found) < piece.length:
                    rest = piece.length - len(found)
                    found += segment.source.read(self._files, segment, rest, piece.position + len(found))
                return bytes(found)
        raise LogClosed(f"segment {piece.segment} generation {piece.generation} of log {piece.log_id} is gone")


def cut_at_entries(entries: bytes, segment: Segment, position: int, end: int, split_bytes: int) -> list[Cut]:
    """Cut a segment into pieces of about split_bytes at entries of its index.

    The last piece runs to the end of the segment's bytes: its reader stops at the piece's next offset.
    """
    pieces: list[Cut] = []
    first, first_offset = position, None
    for at in range(0, len(entries), 8):
        entry_offset = segment.base + int.from_bytes(entries[at : at + 4], "big")
        entry_position = int.from_bytes(entries[at + 4 : at + 8], "big")
        if entry_position < position:
            continue
        if first_offset is None:
            first, first_offset = entry_position, entry_offset
            continue
        if entry_offset >= end:
            pieces.append(Cut(first, entry_position - first, first_offset, min(entry_offset, end)))
            return pieces
        if entry_position - first >= split_bytes:
            pieces.append(Cut(first, entry_position - first, first_offset, entry_offset))
            first, first_offset = entry_position, entry_offset
    if first < segment.size:
        offset = segment.base if first_offset is None else first_offset
        pieces.append(Cut(first, segment.size - first, offset, min(segment.next_offset, end)))
    return pieces
