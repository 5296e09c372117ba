"""Reading logs from another process: ends from the slots, slices from file names and indexes. Nobody is asked.

What a slot says was durable before it was written, and the bytes were in the segment before the slot was, so a
reader that stops at a slot's end never meets a half-written batch. Of a segment the newest generation counts;
one that a rewritten neighbour covers does not. Nothing here writes, locks or waits for the broker.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise

from headrace.errors import CorruptBatch, CorruptLog, SegmentGone
from headrace.log.commit import slots
from headrace.log.commit.slots import Ends
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, FileId, RealDisk, read_whole
from headrace.log.disk.paths import SegmentStem
from headrace.log.read.reader import cut
from headrace.log.segments import index
from headrace.log.segments.segment import INDEX_ENTRY, TIME_ENTRY, Segment, read_seal
from headrace.log.tier.manifest import Tier, read_tier
from headrace.log.tier.row_group_cache import GroupCache
from headrace.record import codec
from headrace.record.codec import is_commit
from headrace.record.layout import HEADER_BYTES, MAX_OFFSET, PREFIX_BYTES
from headrace.record.types import BatchInfo, Slice

SCAN_BYTES = 1 << 20
TIERS_MAX = 4096
LISTINGS_MAX = 20
GAP_LISTINGS = 3


class LogFiles:
    """The logs of one data folder, seen from outside. For one thread at a time; keeps no file open."""

    def __init__(self, root: str, disk: Disk | None = None) -> None:
        self.root = root
        self._disk = disk or RealDisk()
        self._folders: dict[int, str] = {}
        self._tiers: dict[str, Tier] = {}

    # Where a log begins and ends.

    def ends(self) -> dict[int, Ends]:
        """By log id; without those whose slot is just being written. Empty while a broker starts."""
        try:
            return slots.read_all(self._disk, f"{self.root}/{paths.SLOTS}")
        except FileNotFoundError:
            return {}

    def folder(self, log_id: int) -> str | None:
        """None for a log that never had a record."""
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
        """In order; the last one reaches to `end`. Names come and go meanwhile, and what was rewritten between the
        listing and the look has another: it is listed until all of it was there, or its records would be left out.
        SegmentGone when that does not happen."""
        for attempt in range(LISTINGS_MAX):
            folder = self.folder(log_id)
            if folder is None:
                return []
            found, has_all = self._listed(folder, end)
            # Where there is a gap whenever one looks, it is one: that is for those to find who check the log.
            if has_all and (attempt + 1 >= GAP_LISTINGS or not _has_gap(found)):
                return found
        raise SegmentGone(f"the segments of log {log_id} in {self.root} are rewritten faster than they can be listed")

    def _listed(self, folder: str, end: int) -> tuple[list[Segment], bool]:
        """The segments of a folder, and whether all that were listed were there."""
        newest: dict[int, int] = {}
        try:
            names = self._disk.listdir(folder)
        except FileNotFoundError:
            return [], False  # its log was deleted
        for name in names:
            stem = paths.parse_segment(name)
            if stem is not None:
                newest[stem.base] = max(stem.generation, newest.get(stem.base, 0))
        found: list[Segment] = []
        has_all = True
        for base in sorted(newest):
            if found and found[-1].is_sealed and base < found[-1].next_offset:
                continue  # a rewritten segment covers it, and it is about to go
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
            if self._disk.exists(f"{folder}/{stem}{paths.TIER}"):
                return Segment.archived(folder, stem.generation, self._tier(f"{folder}/{stem}{paths.TIER}"))
            seal = read_seal(self._disk, f"{folder}/{stem}{paths.SEAL}")
            segment = Segment(folder, stem.base, stem.generation)
            segment.size = self._disk.file_size(segment.path())
        except FileNotFoundError:
            return None
        if seal is None or seal.size > segment.size:
            return segment
        return Segment.sealed(folder, stem.generation, seal)

    def _tier(self, path: str) -> Tier:
        """Manifests never change, and planning asks for them again and again."""
        found = self._tiers.get(path)
        if found is None:
            if len(self._tiers) >= TIERS_MAX:
                self._tiers.clear()
            found = self._tiers[path] = read_tier(self._disk, path)
        return found

    def start(self, log_id: int, ends: Ends) -> int:
        """The first offset that can be read: the slot may be older than the last removal."""
        segments = self.segments(log_id, ends.visible_end)
        return max(ends.start, segments[0].base) if segments else ends.start

    # Slices.

    def slices(self, log_id: int, start: int, end: int, split_bytes: int) -> list[Slice]:
        """Cut [start, end) into pieces of about split_bytes, where an index has an entry."""
        found = []
        for segment in self.segments(log_id, end):
            if segment.next_offset <= start or segment.base >= end or segment.size == 0:
                continue
            if segment.tier is not None:
                cuts = segment.tier.group_cuts(start, end, split_bytes)
                found += [Slice(log_id, segment.base, segment.generation, *cut) for cut in cuts]
                continue
            entries = self._index(segment)
            position = index.find_position(entries, max(start, segment.base) - segment.base)
            for piece in cut(entries, segment, min(position, segment.size), end, split_bytes):
                found.append(Slice(log_id, segment.base, segment.generation, *piece))
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
        """SegmentGone when its generation is no longer there."""
        folder = self.folder(piece.log_id)
        stem = SegmentStem(piece.segment, piece.generation)
        try:
            if folder is None:
                raise FileNotFoundError
            manifest = f"{folder}/{stem}{paths.TIER}"
            tier = self._tier(manifest) if self._disk.exists(manifest) else None
            if tier is not None:
                file = self._disk.open(tier.path, readonly=True)
            else:
                file = self._disk.open(f"{folder}/{stem}{paths.DATA}", readonly=True)
        except FileNotFoundError:
            raise SegmentGone(f"segment {stem} of log {piece.log_id} in {self.root} is gone") from None
        try:
            if tier is not None:
                yield TierSlice(self._disk, file, tier, piece)
            else:
                yield SliceFile(self._disk, file, f"{folder}/{stem}{paths.DATA}", piece)
        finally:
            self._disk.close(file)

    @contextmanager
    def open_link(self, path: str, piece: Slice) -> "Iterator[SliceFile]":
        """A slice by another name of its file, which whoever planned it made: the file may have left its log. Of what
        is archived that is the manifest's, with the Parquet file beside it."""
        tier = None
        try:
            if path.endswith(paths.TIER):
                tier = read_tier(self._disk, path, path.removesuffix(paths.TIER) + paths.PARQUET)
            file = self._disk.open(path if tier is None else tier.path, readonly=True)
        except FileNotFoundError:
            raise SegmentGone(f"{path} is gone: its time was over") from None
        try:
            if tier is not None:
                yield TierSlice(self._disk, file, tier, piece)
            else:
                yield SliceFile(self._disk, file, path, piece)
        finally:
            self._disk.close(file)

    def link_headers(
        self, path: str, start: int, end: int, position: int = 0
    ) -> Iterator[tuple[memoryview, BatchInfo]]:
        """As `headers`, of what lies behind a position of one segment, by another name of its file. SegmentGone when
        that is no longer there."""
        try:
            if path.endswith(paths.TIER):
                size = read_tier(self._disk, path, path.removesuffix(paths.TIER) + paths.PARQUET).size
            else:
                size = self._disk.file_size(path)
        except FileNotFoundError:
            raise SegmentGone(f"{path} is gone: its time was over") from None
        with self.open_link(path, Slice(0, 0, 0, position, size - position, 0, 0)) as source:
            yield from source.headers(start, end)

    def archived_at(self, folder: str, stem: SegmentStem) -> tuple[str, str] | None:
        """The manifest and the Parquet file of an archived segment."""
        manifest = f"{folder}/{stem}{paths.TIER}"
        return (manifest, self._tier(manifest).path) if self._disk.exists(manifest) else None

    # Looking for something.

    def headers(self, log_id: int, start: int, end: int) -> Iterator[tuple[memoryview, BatchInfo]]:
        """The batches of [start, end) by their headers; checksums are left to whoever reads the records."""
        for piece in self.slices(log_id, start, end, 1 << 62):
            with self.open(piece) as source:
                yield from source.headers(start, end)

    def offset_for_timestamp(self, log_id: int, timestamp_ms: int, start: int, end: int) -> int | None:
        """The first offset whose record is at or after a time; None when all are older."""
        for segment in self.segments(log_id, end):
            if segment.next_offset <= start or segment.base >= end:
                continue
            if segment.is_sealed and segment.max_timestamp < timestamp_ms:
                continue
            if segment.tier is not None:
                first = max(segment.tier.first_offset_at(timestamp_ms), start)
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
        """The epoch in which the record before `offset` was written; None when it is no longer there."""
        if offset <= start:
            return None
        for _, info in self.headers(log_id, offset - 1, offset):
            return info.leader_epoch
        return None

    def reach(self, log_id: int, start: int, end: int, size: int) -> int:
        """The offset behind the batch with which about so many bytes from `start` on are full."""
        for piece in self.slices(log_id, start, end, size):
            if piece.next_offset <= start:
                continue
            if piece.length < 2 * size:
                return piece.next_offset
            break  # the index of what was just written is still in the broker's memory: walk
        used = 0
        for _, info in self.headers(log_id, start, end):
            used += info.size
            if used >= size:
                return min(info.next_offset, end)
        return end

    def size_between(self, log_id: int, start: int, end: int) -> int:
        """About how many bytes lie between two offsets, as far as the indexes tell."""
        return sum(piece.length for piece in self.slices(log_id, start, end, 1 << 62))

    def rough_size(self, log_id: int, start: int, end: int) -> int:
        """As size_between, but a part of a segment counts by its share of the offsets: no index is looked at."""
        total = 0
        for segment in self.segments(log_id, end):
            inside = min(segment.next_offset, end) - max(segment.base, start)
            if inside > 0:
                total += segment.size * inside // (segment.next_offset - segment.base)
        return total


def _has_gap(segments: list[Segment]) -> bool:
    """Each begins where the one before it ends."""
    return any(before.is_sealed and before.next_offset < after.base for before, after in pairwise(segments))


class SliceFile:
    """An open slice, read from front to back: `read`, look, `advance` by what was used."""

    def __init__(self, disk: Disk, file: FileId, path: str, piece: Slice) -> None:
        self._disk = disk
        self._file = file
        self.path = path
        self.slice = piece
        self.position = piece.position
        self.end = piece.end
        self._least = HEADER_BYTES
        self._buffer = bytearray()

    def again(self) -> "SliceFile":
        """From the front, beside this one. The same open file: its name may be gone by now."""
        return SliceFile(self._disk, self._file, self.path, self.slice)

    def read(self, size: int) -> memoryview:
        """Bytes from where the reader stands. The buffer is used again by the next read."""
        size = min(max(size, self._least), self.end - self.position)
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size]
        got = self._disk.pread_into(self._file, view, self.position)
        return view[:got]

    def advance(self, size: int) -> None:
        self.position += size
        self._least = HEADER_BYTES

    def headers(self, start: int, end: int = MAX_OFFSET) -> Iterator[tuple[memoryview, BatchInfo]]:
        """The batches of [start, end) from where the reader stands. What was yielded is gone with the next step."""
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
        """To the start of the segment: the index that gave the position was wrong."""
        self.position = 0
        self._least = HEADER_BYTES

    def need_more(self, data: memoryview) -> None:
        """The first batch is longer than what was read: the next read has it all, or there is none."""
        declared = PREFIX_BYTES + int.from_bytes(data[8:12], "big", signed=True) if len(data) >= 12 else 0
        if declared <= len(data) or declared > self.end - self.position:
            raise CorruptLog(self.path, self.position, "a batch is cut short")
        self._least = declared


class TierSlice(SliceFile):
    """Row groups of an archived segment: their batches, as if they lay in a file. Holds one group at a time."""

    def __init__(self, disk: Disk, file: FileId, tier: Tier, piece: Slice) -> None:
        super().__init__(disk, file, tier.path, piece)
        self._tier = tier
        self._groups = GroupCache(disk, 0, file)

    def again(self) -> "SliceFile":
        return TierSlice(self._disk, self._file, self._tier, self.slice)

    def read(self, size: int) -> memoryview:
        size = min(max(size, self._least), self.end - self.position)
        return memoryview(self._groups.read(self._tier, size, self.position))


def aborted_ranges(batches: Iterable[tuple[memoryview | bytes, BatchInfo]], end: int) -> list[tuple[int, int, int]]:
    """(producer id, first offset, last offset) of aborted transactions with batches before `end`.

    Reads on past `end`, which is stable, until every transaction that was seen before it has met its marker.
    SegmentGone when that is no longer there: then nobody knows any more what became of it.
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
            break  # without a look at what comes next, which may have to be read for it
    for producer_id, first in open_since.items():
        raise SegmentGone(f"how the transaction of producer {producer_id} from offset {first} on ended was removed")
    return found


__all__ = ["CorruptBatch", "Ends", "LogFiles", "SegmentGone", "SliceFile", "aborted_ranges"]
