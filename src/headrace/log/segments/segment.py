"""A segment: consecutive batches in one file, with a sparse offset index and a time index beside it.

States: active (the last one, appended to), sealed (full; its seal says what it holds), archived (its records are in
the tier, see log/tier), retired (removed from the log by retention or rewriting; its files stay while a reader has
leased it), deleted. The indexes are caches, and are rebuilt whenever they disagree with the data.
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
from headrace.log.segments.source import LOCAL_FILE, SegmentSource
from headrace.record.batch.crc32c import crc32c

Bytes = bytes | bytearray | memoryview

_SEAL = struct.Struct("<8sqqqqqqI")  # magic, size, base, next offset, records, batches, max timestamp, headers crc
_SEAL_MAGIC = b"HRSEAL01"
AGE_UNKNOWN = 0  # the creation time of a segment that a start found
_SCAN_BYTES = 4 << 20
INDEX_ENTRY, TIME_ENTRY = 8, 16  # bytes; as in index.pyx
_INDEX_ENTRY = struct.Struct(">II")  # offset relative to the base, position
_SECTOR_BYTES = 512


@dataclass(frozen=True, slots=True)
class Seal:
    """What a sealed segment holds."""

    size: int
    base: int
    next_offset: int  # where the next segment begins, even if compaction dropped the records right before it
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
    """None when the seal is missing or damaged; the data is then scanned instead."""
    if not disk.exists(path):
        return None
    raw = read_whole(disk, path)
    if len(raw) != _SEAL.size + 4 or crc32c(raw[:-4]) != int.from_bytes(raw[-4:], "little"):
        return None
    magic, *fields = _SEAL.unpack(raw[:-4])
    return Seal(*fields) if magic == _SEAL_MAGIC else None


class Segment:
    """A segment as readers see it. Changed by the log's only writer while readers use it: they never read past the
    log's visible end, whatever the size is by then."""

    __slots__ = (
        "base",
        "created_ms",
        "data_path",
        "folder",
        "generation",
        "index",
        "index_is_whole",
        "index_size",
        "is_archived",
        "is_checked",
        "is_deleted",
        "is_retired",
        "is_sealed",
        "max_timestamp",
        "next_offset",
        "read_end",
        "read_start",
        "records",
        "size",
        "source",
        "written_from",
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
        self.is_retired = False
        self.is_checked = False  # the batch headers were compared with the seal
        self.is_deleted = False
        self.source: SegmentSource = LOCAL_FILE  # where the batches are stored
        self.is_archived = False  # source.is_archived, kept here because every read needs it
        self.index: bytes | None = None  # the content of the index file, while the index cache holds it
        self.index_size = 0  # bytes of the segment that `index` covers
        self.index_is_whole = False  # `index` was read after the segment was sealed
        # Ranges of positions whose checksums were verified, and that have stayed in memory since: everything from
        # `written_from` on, and one range that was read.
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
    def archived(cls, folder: str, generation: int, source: SegmentSource) -> "Segment":
        """A segment in an archive. Its size is that of its batches, as if they lay in a local file."""
        contents = source.contents
        assert contents is not None, "an archive has a table of contents"
        segment = cls(folder, contents.base, generation)
        segment.source, segment.data_path, segment.is_archived = source, contents.path, source.is_archived
        segment.size, segment.records = contents.size, contents.records
        segment.next_offset, segment.max_timestamp = contents.next_offset, contents.max_timestamp
        segment.is_sealed = segment.is_checked = True
        return segment

    def path(self, suffix: str = paths.DATA) -> str:
        if suffix is paths.DATA:
            return self.data_path
        return f"{self.folder}/{SegmentStem(self.base, self.generation)}{suffix}"

    def was_read(self, start: int, end: int) -> None:
        """Note that the checksums of these bytes were verified. Only one range is remembered."""
        if start <= self.read_end and end >= self.read_start:
            start, end = min(start, self.read_start), max(end, self.read_end)
        self.read_start, self.read_end = start, end

    def is_sound(self, start: int, end: int) -> bool:
        """Whether checksums need not be verified again: the bytes have stayed in memory since they were."""
        return start >= self.written_from or self.read_start <= start <= end <= self.read_end

    def left_memory(self) -> None:
        """Some bytes had to be read from the disk, perhaps damaged, and others may have left memory unnoticed: verify
        everything again."""
        self.written_from = self.size
        self.read_start = self.read_end = 0

    @property
    def stored_bytes(self) -> int:
        """Bytes that the segment occupies in storage."""
        return self.source.stored_bytes(self)

    @property
    def is_dense(self) -> bool:
        """Whether every offset has a record, so that a wrong base offset can be recognized by its neighbours."""
        return self.records == self.next_offset - self.base

    @property
    def paths(self) -> list[str]:
        """All files of the segment, in the order in which they are removed."""
        return self.source.files(self)

    @property
    def state(self) -> str:
        if self.is_deleted:
            return "deleted"
        if self.is_retired:
            return "retired"
        if self.is_archived:
            return "archived"
        return "sealed" if self.is_sealed else "active"

    def __repr__(self) -> str:
        return f"<{self.state} segment {self.path()} to {self.next_offset}, {self.size} bytes>"


class SegmentWriter(SegmentEnd):
    """Appends to one segment and maintains its indexes. Used by the worker thread only."""

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
        """Write whole batches. The indexes are derived from their headers only after the write has succeeded."""
        path = self.segment.path()
        if self.walker.position == 0:
            # The file is created only now, perhaps long after the folder was synced for the new segment.
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
        """Write pending index entries. Not synced before the segment is sealed, since a wrong index is rebuilt. On a
        full disk, or without a descriptor, the entries stay pending."""
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

    def _sync_index_later(self) -> None:
        """Have the next checkpoint sync the indexes: they do not change any more, and recovery does not have to check
        those of every segment."""
        for suffix in (paths.INDEX, paths.TIME_INDEX):
            try:
                self._files.release(self._files.acquire(self.segment.path(suffix)), dirty=True)
            except OSError as error:
                if not isinstance(error, FileNotFoundError) and error.errno not in NO_FILES:
                    raise

    def save(self) -> "SavedWriter":
        return SavedWriter.of(self.walker, self.index_bytes, self.segment.generation)

    def undo_to(self, saved: "SavedWriter") -> bool:
        """Undo appends that were refused, and the index entries derived from them. False if there were none: then the
        file is not opened, because there may be no descriptor for it."""
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
            self._remove_file()  # it may not exist; `secure_undo` syncs the folder
        self._publish()
        return True

    def _remove_file(self) -> None:
        path = self.segment.path()
        self._files.forget([path])
        if self._files.disk.exists(path):
            self._files.disk.unlink(path)

    def seal(self) -> Seal:
        self.flush_index()
        self._sync_index_later()
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
    """The state of a segment's writer, enough to continue without reading the segment again. Made before every append
    in case it has to be undone, hence a tuple: creating a frozen dataclass of ten fields costs more than the write."""

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
    """Rebuild both indexes from the data, when one is missing or wrong."""
    walker = index.Walker(segment.base, interval)
    walk_segment(files, segment, walker)
    write_indexes(files, segment, walker)
    return walker.index, walker.time_index


def indexes_are_sound(files: FileCache, segment: Segment, index_bytes: int | None = None) -> bool:
    """Whether the index files can be trusted after a crash, without reading the whole segment. Indexes are rarely
    synced, so a power cut may leave zeros or a part of them. `index_bytes`: how much of the index counts; None for
    all."""
    entries, times = (_read_derived(files, segment.path(suffix)) for suffix in (paths.INDEX, paths.TIME_INDEX))
    if index_bytes is not None:
        if len(entries) < index_bytes:
            return False
        entries, times = entries[:index_bytes], times[: index_bytes // INDEX_ENTRY * TIME_ENTRY]
    if segment.size and not entries:
        return False
    if not index.is_sound(entries, times, segment.base, segment.size, segment.next_offset):
        return False
    # The position of an entry has no checksum. The last sector of the file is the one that a crash may have torn.
    for at in range(max(0, len(entries) - _SECTOR_BYTES), len(entries), INDEX_ENTRY):
        offset, position = _INDEX_ENTRY.unpack_from(entries, at)
        if int.from_bytes(files.read(segment.path(), 8, position), "big") != segment.base + offset:
            return False
    return True


def _read_derived(files: FileCache, path: str) -> bytes:
    return read_whole(files.disk, path) if files.disk.exists(path) else b""


def write_indexes(files: FileCache, segment: Segment, walker: index.Walker) -> None:
    """Replace the index files."""
    files.forget([segment.path(paths.INDEX), segment.path(paths.TIME_INDEX)])
    write_atomically(files.disk, segment.path(paths.INDEX), bytes(walker.index))
    write_atomically(files.disk, segment.path(paths.TIME_INDEX), bytes(walker.time_index))


def walk_segment(files: FileCache, segment: Segment, walker: index.Walker) -> None:
    """Feed all batches of a segment to a walker. CorruptLog where a batch is cut short."""
    path = segment.path()
    while walker.position < segment.size:
        at = walker.position
        data = segment.source.read(files, segment, min(_SCAN_BYTES, segment.size - at), at)
        if walker.walk(data) == 0:
            size = 12 + int.from_bytes(data[8:12], "big") if len(data) >= 12 else 0
            if size <= len(data) or at + size > segment.size:
                raise CorruptLog(path, at, "a batch is cut short")
            walker.walk(segment.source.read(files, segment, size, at))
