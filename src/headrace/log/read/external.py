"""Reading logs from another process: ends from the slots, slices from file names and indexes, without the broker.

A slot's end was durable before the slot was written, and the bytes were in the segment before that, so a reader that
stops at a slot's end never meets a half-written batch. The newest generation of a segment counts, unless a rewritten
neighbour covers it. Nothing here writes, locks or waits for the broker.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise

from headrace.errors import CorruptBatch, CorruptLog, SegmentGone
from headrace.log.commit import slots
from headrace.log.commit.slots import Ends
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, RealDisk, read_whole
from headrace.log.disk.paths import SegmentStem
from headrace.log.read.reader import cut_at_entries
from headrace.log.segments import index
from headrace.log.segments.segment import INDEX_ENTRY, TIME_ENTRY, Segment, read_seal
from headrace.log.segments.source import LOCAL_FILE, OpenSource, SegmentSource
from headrace.log.tier.sources import Archives
from headrace.record import codec
from headrace.record.codec import is_commit
from headrace.record.layout import HEADER_BYTES, MAX_OFFSET, PREFIX_BYTES
from headrace.record.types import BatchInfo, Buffer, Slice

SCAN_BYTES = 1 << 20
ARCHIVED_MAX = 4096
LISTINGS_MAX = 20
GAP_LISTINGS = 3


class LogFiles:
    """The logs of one data folder, read from another process. For one thread at a time; keeps no file open."""

    def __init__(self, root: str, disk: Disk | None = None) -> None:
        self.root = root
        self._disk = disk or RealDisk()
        self._folders: dict[int, str] = {}
        self._archives = Archives(self._disk)
        self._archived: dict[str, SegmentSource] = {}  # by the path of the manifest

    # Where a log begins and ends.

    def ends(self) -> dict[int, Ends]:
        """Ends by log id, without logs whose slot is being written at the moment. Empty while a broker starts."""
        try:
            return slots.read_all(self._disk, f"{self.root}/{paths.SLOTS}")
        except FileNotFoundError:
            return {}

    def folder(self, log_id: int) -> str | None:
        """The log's folder; None for a log that never had a record."""
        known = self._folders.get(log_id)
        if known is not None and self._disk.exists(known):
            return known
        root = f"{self.root}/{paths.LOGS}"
        for name in self._disk.listdir(root):
            if not name.endswith(paths.DELETED) and paths.parse_log_folder(name) == log_id:
                self._folders[log_id] = f"{root}/{name}"
                return self._folders[log_id]
        return None

    def segments(self, log_id: int, end: int) -> list[Segment]:
        """The log's segments in order; the last one reaches to `end`.

        A segment that is rewritten between listing and opening has another name, and its records would be left out:
        the folder is listed again until every listed segment was found. SegmentGone if that never happens."""
        for attempt in range(LISTINGS_MAX):
            folder = self.folder(log_id)
            if folder is None:
                return []
            found, has_all = self._listed(folder, end)
            # A gap in three listings in a row is real. `log verify` reports it; here the segments are just returned.
            if has_all and (attempt + 1 >= GAP_LISTINGS or not _has_gap(found)):
                return found
        raise SegmentGone(f"the segments of log {log_id} in {self.root} are rewritten faster than they can be listed")

    def _listed(self, folder: str, end: int) -> tuple[list[Segment], bool]:
        """The segments of a folder, and whether every listed file was found."""
        newest: dict[int, int] = {}
        try:
            names = self._disk.listdir(folder)
        except FileNotFoundError:
            return [], False  # the log was deleted
        for name in names:
            stem = paths.parse_segment(name)
            if stem is not None:
                newest[stem.base] = max(stem.generation, newest.get(stem.base, 0))
        found: list[Segment] = []
        has_all = True
        for base in sorted(newest):
            if found and found[-1].is_sealed and base < found[-1].next_offset:
                continue  # superseded by a rewritten segment, and about to be removed
            segment = self._segment(folder, SegmentStem(base, newest[base]))
            if segment is None:
                has_all = False
                continue
            if found and not found[-1].is_sealed:
                found[-1].next_offset = base
            found.append(segment)
        if found and not found[-1].is_sealed:
            found[-1].next_offset = max(end, found[-1].base)
        return found, has_all

    def _segment(self, folder: str, stem: SegmentStem) -> Segment | None:
        try:
            archived = self._archived_source(folder, stem)
            if archived is not None:
                return Segment.archived(folder, stem.generation, archived)
            seal = read_seal(self._disk, f"{folder}/{stem}{paths.SEAL}")
            segment = Segment(folder, stem.base, stem.generation)
            segment.size = self._disk.file_size(segment.path())
        except FileNotFoundError:
            return None
        if seal is None or seal.size > segment.size:
            return segment
        return Segment.sealed(folder, stem.generation, seal)

    def _archived_source(self, folder: str, stem: SegmentStem) -> SegmentSource | None:
        """Where an archived segment is stored; None if it is not archived. Cached: manifests never change, and
        planning needs them again and again."""
        path = f"{folder}/{stem}{paths.TIER}"
        if not self._disk.exists(path):
            return None
        found = self._archived.get(path)
        if found is None:
            if len(self._archived) >= ARCHIVED_MAX:
                self._archived.clear()
            found = self._archived[path] = self._archives.open(path)
        return found

    def start(self, log_id: int, ends: Ends) -> int:
        """The first readable offset; the slot may be older than retention's last removal."""
        segments = self.segments(log_id, ends.visible_end)
        return max(ends.start, segments[0].base) if segments else ends.start

    # Slices.

    def slices(self, log_id: int, start: int, end: int, split_bytes: int) -> list[Slice]:
        """Cut [start, end) into slices of about split_bytes, at entries of the indexes."""
        found = []
        for segment in self.segments(log_id, end):
            if segment.next_offset <= start or segment.base >= end or segment.size == 0:
                continue
            contents = segment.source.contents
            if contents is not None:
                cuts = contents.cuts(start, end, split_bytes)
            else:
                entries = self._index(segment)
                position = index.find_position(entries, max(start, segment.base) - segment.base)
                cuts = cut_at_entries(entries, segment, min(position, segment.size), end, split_bytes)
            found += [Slice(log_id, segment.base, segment.generation, *cut) for cut in cuts]
        return found

    def _index(self, segment: Segment, suffix: str = paths.INDEX) -> bytes:
        path = segment.path(suffix)
        try:
            data = read_whole(self._disk, path) if self._disk.exists(path) else b""
        except FileNotFoundError:
            return b""
        width = INDEX_ENTRY if suffix == paths.INDEX else TIME_ENTRY
        return data[: len(data) // width * width]

    @contextmanager
    def open(self, piece: Slice) -> "Iterator[SliceFile]":
        """Open a slice. SegmentGone when its generation no longer exists."""
        folder = self.folder(piece.log_id)
        stem = SegmentStem(piece.segment, piece.generation)
        try:
            if folder is None:
                raise FileNotFoundError
            source = self._archived_source(folder, stem)
            if source is None:
                path = f"{folder}/{stem}{paths.DATA}"
                opened = LOCAL_FILE.open(self._disk, path)
            else:
                assert source.contents is not None
                path = source.contents.path
                opened = source.open(self._disk, path)
        except FileNotFoundError:
            raise SegmentGone(f"segment {stem} of log {piece.log_id} in {self.root} is gone") from None
        try:
            yield SliceFile(opened, path, piece)
        finally:
            opened.close()

    @contextmanager
    def open_link(self, path: str, piece: Slice) -> "Iterator[SliceFile]":
        """Open a slice by a hard link that its planner made, since the segment may have left its log. For an archived
        segment the link is that of the manifest, with one of the Parquet file beside it."""
        try:
            source = self._linked_source(path)
            if source is not None and source.contents is not None:
                path = source.contents.path
            opened = (source or LOCAL_FILE).open(self._disk, path)
        except FileNotFoundError:
            raise SegmentGone(f"{path} is gone: its lease expired") from None
        try:
            yield SliceFile(opened, path, piece)
        finally:
            opened.close()

    def _linked_source(self, path: str) -> SegmentSource | None:
        if not path.endswith(paths.TIER):
            return None
        return self._archives.open_link(path)

    def link_headers(
        self, path: str, start: int, end: int, position: int = 0
    ) -> Iterator[tuple[memoryview, BatchInfo]]:
        """Like `headers`, for one segment by its hard link, from a position on. SegmentGone when the link is gone."""
        try:
            source = self._linked_source(path)
            if source is not None and source.contents is not None:
                size = source.contents.size
            else:
                size = self._disk.file_size(path)
        except FileNotFoundError:
            raise SegmentGone(f"{path} is gone: its lease expired") from None
        with self.open_link(path, Slice(0, 0, 0, position, size - position, 0, 0)) as source_file:
            yield from source_file.headers(start, end)

    def link(self, log_id: int, stem: SegmentStem, target: str) -> str | None:
        """Keep a segment readable by links whose paths begin with `target`. Returns the path for `open_link`; None if
        its location has no links. SegmentGone when this generation no longer exists."""
        folder = self.folder(log_id)
        try:
            if folder is None:
                raise FileNotFoundError
            source = self._archived_source(folder, stem)
            if source is not None:
                return source.hold(self._disk, Segment.archived(folder, stem.generation, source), target)
            return LOCAL_FILE.hold(self._disk, Segment(folder, stem.base, stem.generation), target)
        except FileNotFoundError:
            raise SegmentGone(f"segment {stem} of log {log_id} was deleted during planning") from None

    # Searching.

    def headers(self, log_id: int, start: int, end: int) -> Iterator[tuple[memoryview, BatchInfo]]:
        """The headers of the batches of [start, end). Checksums are not verified: readers of the records do that."""
        for piece in self.slices(log_id, start, end, 1 << 62):
            with self.open(piece) as source:
                yield from source.headers(start, end)

    def offset_for_timestamp(self, log_id: int, timestamp_ms: int, start: int, end: int) -> int | None:
        """The offset of the first record at or after a time; None when all are older."""
        for segment in self.segments(log_id, end):
            if segment.next_offset <= start or segment.base >= end:
                continue
            if segment.is_sealed and segment.max_timestamp < timestamp_ms:
                continue
            contents = segment.source.contents
            if contents is not None:
                first = max(contents.first_offset_at(timestamp_ms), start)
            else:
                entries = self._index(segment, paths.TIME_INDEX)
                first = max(segment.base + index.find_offset_for_time(entries, segment.base, timestamp_ms), start)
            for data, info in self.headers(log_id, first, min(segment.next_offset, end)):
                if info.max_timestamp < timestamp_ms or info.is_control:
                    continue
                found = codec.first_at(data, info.position, timestamp_ms, from_offset=first, to_offset=end)
                if found is not None:
                    return found[0]
        return None

    def epoch_before(self, log_id: int, offset: int, start: int) -> int | None:
        """The epoch in which the record before `offset` was written; None when that record is gone."""
        if offset <= start:
            return None
        for _, info in self.headers(log_id, offset - 1, offset):
            return info.leader_epoch
        return None

    def offset_after_bytes(self, log_id: int, start: int, end: int, size: int) -> int:
        """The offset at which about `size` bytes of batches from `start` on end."""
        for piece in self.slices(log_id, start, end, size):
            if piece.next_offset <= start:
                continue
            if piece.length < 2 * size:
                return piece.next_offset
            break  # the newest index entries are still in the broker's memory: walk the batches instead
        used = 0
        for _, info in self.headers(log_id, start, end):
            used += info.size
            if used >= size:
                return min(info.next_offset, end)
        return end

    def size_between(self, log_id: int, start: int, end: int) -> int:
        """The approximate number of bytes between two offsets, according to the indexes."""
        return sum(piece.length for piece in self.slices(log_id, start, end, 1 << 62))

    def estimated_size(self, log_id: int, start: int, end: int) -> int:
        """Like size_between, but without reading an index: part of a segment counts by its share of the offsets."""
        total = 0
        for segment in self.segments(log_id, end):
            inside = min(segment.next_offset, end) - max(segment.base, start)
            if inside > 0:
                total += segment.size * inside // (segment.next_offset - segment.base)
        return total


def _has_gap(segments: list[Segment]) -> bool:
    """Whether a segment begins later than its predecessor ends."""
    return any(before.is_sealed and before.next_offset < after.base for before, after in pairwise(segments))


class SliceFile:
    """An open slice, read from front to back: `read`, inspect, `advance` by the bytes that were used."""

    def __init__(self, source: OpenSource, path: str, piece: Slice) -> None:
        self._source = source
        self.path = path
        self.slice = piece
        self.position = piece.position
        self.end = piece.end
        self._least = HEADER_BYTES

    def again(self) -> "SliceFile":
        """A second reader of the same slice, from its front. It shares the open file, whose name may be gone."""
        return SliceFile(self._source.reopened(), self.path, self.slice)

    def read(self, size: int) -> memoryview:
        """Bytes from the current position. The buffer is reused by the next read."""
        return self._source.read(min(max(size, self._least), self.end - self.position), self.position)

    def advance(self, size: int) -> None:
        self.position += size
        self._least = HEADER_BYTES

    def headers(self, start: int, end: int = MAX_OFFSET) -> Iterator[tuple[memoryview, BatchInfo]]:
        """The headers of the batches of [start, end) from the current position on. The yielded buffer is valid until
        the next step."""
        while self.position < self.end:
            data = self.read(SCAN_BYTES)
            infos = codec.scan(data, verify_crc=False)
            for info in infos:
                if info.base_offset >= end:
                    return
                if info.last_offset >= start:
                    yield data, info
            if not infos:
                self.need_more(data)
                continue
            self.advance(infos[-1].end)
            if infos[-1].next_offset >= end:
                return

    def rewind(self) -> None:
        """Go back to the start of the segment, because the index that gave the position was wrong."""
        self.position = 0
        self._least = HEADER_BYTES

    def need_more(self, data: memoryview) -> None:
        """Have the next read return the whole first batch, which is longer than `data`. CorruptLog if it cannot."""
        declared = PREFIX_BYTES + int.from_bytes(data[8:12], "big", signed=True) if len(data) >= 12 else 0
        if declared <= len(data) or declared > self.end - self.position:
            raise CorruptLog(self.path, self.position, "a batch is cut short")
        self._least = declared


def aborted_ranges(batches: Iterable[tuple[Buffer, BatchInfo]], end: int) -> list[tuple[int, int, int]]:
    """(producer id, first offset, last offset) of aborted transactions with batches before `end`.

    Reads past `end`, which is a stable end, until the marker of every transaction seen before it was found.
    SegmentGone when a marker no longer exists: then the transaction's outcome is unknown.
    """
    open_since: dict[int, int] = {}
    found = []
    for data, info in batches:
        if not open_since and info.base_offset >= end:
            break
        if not info.is_transactional:
            continue
        if not info.is_control:
            if info.base_offset < end:
                open_since.setdefault(info.producer_id, info.base_offset)
            continue
        first = open_since.pop(info.producer_id, None)
        if first is not None and not is_commit(data, info):
            found.append((info.producer_id, first, info.base_offset))
        if not open_since and info.next_offset >= end:
            break  # before the next batch, which might have to be read from the disk
    for producer_id, first in open_since.items():
        raise SegmentGone(f"the end of the transaction of producer {producer_id} from offset {first} on was removed")
    return found


__all__ = ["CorruptBatch", "Ends", "LogFiles", "SegmentGone", "SliceFile", "aborted_ranges"]
