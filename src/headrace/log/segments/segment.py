"""A segment: a run of batches in one file, with a sparse offset index and a time index beside it.

Life: active (the last one, appended to), sealed (full; its seal says what it holds), archived (its records are in
the tier, see tiering.py), retired (out of the log by retention or rewriting, its files kept for those who were handed
slices of it), deleted. Index and time index are
caches: they carry no checksum and are rebuilt whenever they disagree with the data.
"""

import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.errors import CorruptLog
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, read_whole, write_atomically
from headrace.log.disk.file_cache import NO_FILES, NO_ROOM, FileCache
from headrace.log.disk.paths import SegmentStem
from headrace.log.segments import index
from headrace.log.segments.segment_end import SegmentEnd
from headrace.log.tier.manifest import Tier
from headrace.record.batch.crc32c import crc32c

Bytes = bytes | bytearray | memoryview

_SEAL = struct.Struct("<8sqqqqqqI")  # magic, size, base, next offset, records, batches, max timestamp, headers crc
_SEAL_MAGIC = b"HRSEAL01"
AGE_UNKNOWN = 0  # in place of when it was begun: of one that a start found
_SCAN_BYTES = 4 << 20
INDEX_ENTRY, TIME_ENTRY = 8, 16  # as in kernel.pyx


@dataclass(frozen=True, slots=True)
class Seal:
    size: int
    base: int
    next_offset: int  # the first offset of the segment behind it, even if the records before it are gone
    records: int
    batches: int
    max_timestamp: int
    headers_crc: int

    def pack(self) -> bytes:
        raw = _SEAL.pack(
            _SEAL_MAGIC, self.size, self.base, self.next_offset,
            self.records, self.batches, self.max_timestamp, self.headers_crc,
        )  # fmt: skip
        return raw + crc32c(raw).to_bytes(4, "little")


def read_seal(disk: Disk, path: str) -> Seal | None:
    """None when there is none or it is damaged: the data is then scanned instead."""
    if not disk.exists(path):
        return None
    raw = read_whole(disk, path)
    if len(raw) != _SEAL.size + 4 or crc32c(raw[:-4]) != int.from_bytes(raw[-4:], "little"):
        return None
    magic, *fields = _SEAL.unpack(raw[:-4])
    return Seal(*fields) if magic == _SEAL_MAGIC else None


class Segment:
    """What readers need to know. Written by the log's one writer; a reader may see it at any moment, and
    never reads past the offset that the log says is visible, whatever the size is by then."""

    __slots__ = (
        "base", "created_ms", "data_path", "folder", "generation", "index", "index_is_whole", "index_size",
        "is_buried", "is_checked", "is_deleted", "is_sealed", "max_timestamp", "next_offset", "read_end", "read_start",
        "records", "size", "tier", "written_from",
    )  # fmt: skip

    def __init__(self, folder: str, base: int, generation: int = 0, *, created_ms: int = AGE_UNKNOWN) -> None:
        self.folder = folder
        self.base = base
        self.generation = generation
        self.data_path = f"{folder}/{SegmentStem(base, generation)}{paths.DATA}"
        self.created_ms = created_ms
        self.size = 0
        self.records = 0
        self.next_offset = base
        self.max_timestamp = -1
        self.is_sealed = False
        self.is_buried = False
        self.is_checked = False  # its batch headers were compared with its seal
        self.is_deleted = False
        self.tier: Tier | None = None  # where its records are, when they are not in a file of batches
        self.index: bytes | None = None  # the index file's content while the index cache keeps it
        self.index_size = 0  # how much of the segment it covers
        self.index_is_whole = False  # it was read after the segment was sealed
        # Positions whose checksums were right when they were written or read, and that have been in memory since.
        self.written_from = sys.maxsize
        self.read_start = self.read_end = 0

    @classmethod
    def sealed(cls, folder: str, generation: int, seal: Seal) -> "Segment":
        segment = cls(folder, seal.base, generation)
        segment.size, segment.records = seal.size, seal.records
        segment.next_offset, segment.max_timestamp = seal.next_offset, seal.max_timestamp
        segment.is_sealed = True
        return segment

    @classmethod
    def archived(cls, folder: str, generation: int, tier: Tier) -> "Segment":
        """Its size is that of its batches, as if they lay in a file."""
        segment = cls(folder, tier.base, generation)
        segment.tier, segment.data_path = tier, tier.path
        segment.size, segment.records = tier.size, tier.records
        segment.next_offset, segment.max_timestamp = tier.next_offset, tier.max_timestamp
        segment.is_sealed = segment.is_checked = True
        return segment

    def path(self, suffix: str = paths.DATA) -> str:
        if suffix is paths.DATA:
            return self.data_path
        return f"{self.folder}/{SegmentStem(self.base, self.generation)}{suffix}"

    def was_read(self, start: int, end: int) -> None:
        """These bytes, and their checksums are right. One run of them is remembered."""
        if start <= self.read_end and end >= self.read_start:
            start, end = min(start, self.read_start), max(end, self.read_end)
        self.read_start, self.read_end = start, end

    def is_sound(self, start: int, end: int) -> bool:
        """Whether these bytes need not be checked: they were, and did not have to come from the disk since."""
        return start >= self.written_from or self.read_start <= start <= end <= self.read_end

    def left_memory(self) -> None:
        """Some of it had to be read from the disk, and nobody knows what else, or what came back with it."""
        self.written_from = self.size
        self.read_start = self.read_end = 0

    @property
    def stored_bytes(self) -> int:
        """What it takes on disk."""
        return self.size if self.tier is None else self.tier.file_bytes

    @property
    def is_dense(self) -> bool:
        """Every offset has its record, so that a base offset can be told to be wrong by its neighbours."""
        return self.records == self.next_offset - self.base

    @property
    def paths(self) -> list[str]:
        if self.tier is not None:
            return [self.path(paths.TIER), self.data_path]  # without the first, the second is nobody's
        return [self.path(s) for s in (paths.DATA, paths.INDEX, paths.TIME_INDEX, paths.SEAL)]

    @property
    def state(self) -> str:
        if self.is_deleted:
            return "deleted"
        if self.is_buried:
            return "retired"
        if self.tier is not None:
            return "archived"
        return "sealed" if self.is_sealed else "active"

    def __repr__(self) -> str:
        return f"<{self.state} segment {self.path()} to {self.next_offset}, {self.size} bytes>"


class SegmentWriter(SegmentEnd):
    """Appends to one segment and keeps what is derived from it. Used by the worker thread only."""

    def __init__(self, files: FileCache, segment: Segment, walker: index.Walker, index_bytes: int = 0) -> None:
        super().__init__(segment, walker)
        self._files = files
        segment.written_from = walker.position
        entries = index_bytes // INDEX_ENTRY
        self._index_size = entries * INDEX_ENTRY
        self._time_index_size = entries * TIME_ENTRY

    @property
    def position(self) -> int:
        return self.walker.position

    @property
    def index_bytes(self) -> int:
        return self._index_size + len(self.walker.index)

    def append(self, data: Sequence[Bytes]) -> None:
        """Write whole batches; the walk over their headers happens only once they are in the file."""
        path = self.segment.path()
        if self.walker.position == 0:
            # The file is made now, perhaps long after the segment began and the folder was synced for it.
            self._files.folder_changed(self.segment.folder)
        try:
            self._files.write(path, data, self.walker.position, create=True)
        except OSError as error:
            self.is_torn = error.errno not in NO_FILES  # without a descriptor nothing was written
            raise
        self.appended(data)
        if self.index_is_due:
            self.flush_index()

    def flush_index(self) -> None:
        """Never synced: an index is rebuilt when it is wrong. Without room, or a descriptor, the entries wait."""
        walker = self.walker
        if not walker.index:
            return
        try:
            self._write_index(walker)
        except OSError as error:
            if error.errno not in NO_ROOM + NO_FILES:
                raise

    def _write_index(self, walker: index.Walker) -> None:
        self._files.write_derived(self.segment.path(paths.INDEX), walker.index, self._index_size)
        self._files.write_derived(self.segment.path(paths.TIME_INDEX), walker.time_index, self._time_index_size)
        self._index_size += len(walker.index)
        self._time_index_size += len(walker.time_index)
        walker.index = bytearray()
        walker.time_index = bytearray()

    def save(self) -> "SavedWriter":
        return SavedWriter.of(self.walker, self.index_bytes, self.segment.generation)

    def undo_to(self, saved: "SavedWriter") -> bool:
        """Take back appends that were refused: the bytes go, and so does what was derived from them. Whether there
        were any: a file that was not written is not opened either, there may be no descriptor for it."""
        if not self.is_torn and self.position == saved.position:
            return False
        self.is_torn = False
        pending = self.walker.index, self.walker.time_index
        self.walker = saved.restore(self.walker.interval)
        entries = (saved.index_size - self._index_size) // INDEX_ENTRY
        if entries >= 0:
            self.walker.index = pending[0][: entries * INDEX_ENTRY]
            self.walker.time_index = pending[1][: entries * TIME_ENTRY]
        else:
            self._index_size = saved.index_size
            self._time_index_size = saved.index_size // INDEX_ENTRY * TIME_ENTRY
        if saved.position:
            self._files.truncate(self.segment.path(), saved.position)
        else:
            self._remove_file()  # which may not even have been made; a name is what `secure_undo` syncs
        self._publish()
        return True

    def _remove_file(self) -> None:
        path = self.segment.path()
        self._files.forget([path])
        if self._files.disk.exists(path):
            self._files.disk.unlink(path)

    def seal(self) -> Seal:
        self.flush_index()
        seal = seal_of(self.walker)
        segment = self.segment
        self._files.write(segment.path(paths.SEAL), [seal.pack()], 0, create=True)
        segment.is_sealed = True
        return seal


def seal_of(walker: index.Walker, next_offset: int | None = None) -> Seal:
    return Seal(
        walker.position, walker.base, walker.next_offset if next_offset is None else next_offset,
        walker.records, walker.batches, walker.max_timestamp, walker.headers_crc,
    )  # fmt: skip


_SAVED = struct.Struct("<qqqqqqqIqq")


class SavedWriter(NamedTuple):
    """Where a segment's writer stood: enough to go on without reading the segment again. Made before every
    append, in case that has to be taken back: a frozen dataclass of ten fields costs more than the write."""

    base: int
    generation: int
    position: int
    next_offset: int
    max_timestamp: int
    records: int
    batches: int
    headers_crc: int
    last_indexed: int
    index_size: int

    @classmethod
    def of(cls, walker: index.Walker, index_size: int, generation: int = 0) -> "SavedWriter":
        return cls(
            walker.base, generation, walker.position, walker.next_offset, walker.max_timestamp,
            walker.records, walker.batches, walker.headers_crc, walker.last_indexed_position, index_size,
        )  # fmt: skip

    def restore(self, interval: int) -> index.Walker:
        return index.Walker(
            self.base, interval,
            position=self.position, next_offset=self.next_offset, max_timestamp=self.max_timestamp,
            records=self.records, batches=self.batches, headers_crc=self.headers_crc,
            last_indexed=self.last_indexed,
        )  # fmt: skip

    def pack(self) -> bytes:
        return _SAVED.pack(*self)

    @classmethod
    def unpack(cls, raw: bytes) -> "SavedWriter":
        return cls(*_SAVED.unpack(raw))


def rebuild_index(files: FileCache, segment: Segment, interval: int) -> tuple[bytearray, bytearray]:
    """Walk the data once more and write both indexes anew. Used when one is missing or wrong."""
    walker = index.Walker(segment.base, interval)
    walk_segment(files, segment, walker)
    write_indexes(files, segment, walker)
    return walker.index, walker.time_index


def write_indexes(files: FileCache, segment: Segment, walker: index.Walker) -> None:
    """In place of those that are there."""
    files.forget([segment.path(paths.INDEX), segment.path(paths.TIME_INDEX)])
    write_atomically(files.disk, segment.path(paths.INDEX), bytes(walker.index))
    write_atomically(files.disk, segment.path(paths.TIME_INDEX), bytes(walker.time_index))


def walk_segment(files: FileCache, segment: Segment, walker: index.Walker) -> None:
    path = segment.path()
    while walker.position < segment.size:
        at = walker.position
        data = files.read_segment(segment, min(_SCAN_BYTES, segment.size - at), at)
        if walker.walk(data) == 0:
            size = 12 + int.from_bytes(data[8:12], "big") if len(data) >= 12 else 0
            if size <= len(data) or at + size > segment.size:
                raise CorruptLog(path, at, "a batch is cut short")
            walker.walk(files.read_segment(segment, size, at))
