"""Where the batches of a segment are stored: the interface of every storage, and the local file.

Every segment has one source. Positions are the same in all of them: those of the segment's batches laid end to end,
as they lie in a local file. A sealed segment can move to another source, as its next generation; the sources for
archived segments are in log/tier, and `tier/sources.py` chooses among them.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from contextlib import suppress
from typing import Any, ClassVar, NamedTuple, Protocol

from headrace.log.counters import Counters
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, FileId
from headrace.log.disk.file_cache import FileCache
from headrace.record.types import BatchInfo, Buffer


class StoredSegment(Protocol):
    """What a source needs to know of its segment."""

    size: int
    data_path: str

    def path(self, suffix: str = ...) -> str: ...
    def left_memory(self) -> None: ...


class Cut(NamedTuple):
    """A piece of a segment that can be read on its own."""

    position: int
    length: int
    first_offset: int
    next_offset: int


class SourceProblem(NamedTuple):
    """Why recovery cannot use a source, and at which byte of its file."""

    position: int
    reason: str


class BackgroundLoads(Protocol):
    """Loads that run on other threads; implemented by `read.cold_reads.Loads`."""

    def result(self, key: Hashable, job: Callable[[], Any]) -> Any: ...
    def forget(self, key: Hashable) -> None: ...


class OwnerReads(Protocol):
    """Reads on the owner thread, which never waits for the disk; implemented by `read.cold_reads.CachedFiles`."""

    @property
    def counters(self) -> Counters: ...
    @property
    def loads(self) -> BackgroundLoads: ...
    def read(self, path: str, size: int, position: int) -> bytes: ...


class Contents(Protocol):
    """The extent of an archived segment and its table of contents, which stands in for index files and seal."""

    @property
    def path(self) -> str: ...  # the file that holds the records
    @property
    def base(self) -> int: ...
    @property
    def next_offset(self) -> int: ...
    @property
    def records(self) -> int: ...
    @property
    def max_timestamp(self) -> int: ...
    @property
    def size(self) -> int: ...

    def find_start(self, offset: int) -> tuple[int, int]:
        """(position, base offset of the batch there) from which to look for an offset."""

    def first_offset_at(self, timestamp_ms: int) -> int:
        """Where to begin looking for a time: every record before this offset is older."""

    def cuts(self, start: int, end: int, split_bytes: int) -> list[Cut]:
        """Pieces of about `split_bytes` that together hold the offsets [start, end)."""


class OpenSource(Protocol):
    """A source opened by another process. It stays readable after the broker has removed the segment."""

    def read(self, size: int, position: int) -> memoryview:
        """Up to `size` bytes; the buffer may be reused by the next read."""

    def reopened(self) -> "OpenSource":
        """The same open file with a buffer of its own; closed together with this one."""

    def close(self) -> None: ...


class SegmentSource(ABC):
    """How the batches of a segment are read, checked and removed. Used from any thread, except `read_now`."""

    __slots__ = ()
    is_archived: ClassVar[bool]
    contents: Contents | None  # None: index files and a seal lie beside the data

    @abstractmethod
    def stored_bytes(self, segment: StoredSegment) -> int:
        """Bytes that the segment occupies in storage."""

    @abstractmethod
    def files(self, segment: StoredSegment) -> list[str]:
        """The segment's files in the order in which they are removed."""

    @abstractmethod
    def read(self, files: FileCache, segment: StoredSegment, size: int, position: int) -> bytes:
        """Up to `size` bytes of batches; may wait for storage. Archived sources stop at the end of a row group."""

    @abstractmethod
    def read_now(self, reads: OwnerReads, segment: StoredSegment, size: int, position: int) -> bytes:
        """Like `read`, on the owner thread: ReadWaits when the bytes are not in memory."""

    @abstractmethod
    def open(self, disk: Disk, path: str) -> OpenSource:
        """Open for a reader in another process; `path` is the segment's data file. FileNotFoundError if it is gone."""

    @abstractmethod
    def problem(self, disk: Disk, segment: StoredSegment) -> SourceProblem | None:
        """Whether the stored file is missing or too short. Its content is checked when it is read."""

    @abstractmethod
    def remove(self, disk: Disk, segment: StoredSegment) -> bool:
        """Remove the segment's files. False when storage refuses for now and the caller is to try again later."""

    @abstractmethod
    def modified_ms(self, disk: Disk, segment: StoredSegment) -> int:
        """When the stored file was written. OSError if that cannot be found out."""

    @abstractmethod
    def hold(self, disk: Disk, segment: StoredSegment, target: str) -> str | None:
        """Keep the segment readable for a reader in another process, even if the broker removes it, by links whose
        paths begin with `target`. The path to open; None if that is not possible. FileNotFoundError if it is gone."""

    @abstractmethod
    def evict(self) -> None:
        """Drop cached batches of this source."""

    @abstractmethod
    def original_batches(self, disk: Disk) -> Iterator[tuple[Buffer, BatchInfo]]:
        """Every batch of an archived segment as it was before archiving, including its compression."""


class LocalFile(SegmentSource):
    """Batches in a file of the log's folder, at `segment.data_path`. Stateless: all segments share one instance."""

    __slots__ = ()
    is_archived = False
    contents = None

    def stored_bytes(self, segment: StoredSegment) -> int:
        return segment.size

    def files(self, segment: StoredSegment) -> list[str]:
        return [segment.path(suffix) for suffix in (paths.DATA, paths.INDEX, paths.TIME_INDEX, paths.SEAL)]

    def read(self, files: FileCache, segment: StoredSegment, size: int, position: int) -> bytes:
        return files.read(segment.data_path, size, position)

    def read_now(self, reads: OwnerReads, segment: StoredSegment, size: int, position: int) -> bytes:
        cold_reads = reads.counters.cold_reads
        try:
            return reads.read(segment.data_path, size, position)
        finally:
            if reads.counters.cold_reads != cold_reads:
                segment.left_memory()

    def open(self, disk: Disk, path: str) -> OpenSource:
        return _OpenFile(disk, disk.open(path, readonly=True))

    def problem(self, disk: Disk, segment: StoredSegment) -> SourceProblem | None:
        size = disk.file_size(segment.data_path)
        return SourceProblem(size, f"{segment.size:,} bytes were sealed") if size < segment.size else None

    def remove(self, disk: Disk, segment: StoredSegment) -> bool:
        for path in self.files(segment):
            with suppress(FileNotFoundError):  # not every segment has every kind of file
                disk.unlink(path)
        return True

    def modified_ms(self, disk: Disk, segment: StoredSegment) -> int:
        return disk.modified_ms(segment.data_path)

    def hold(self, disk: Disk, segment: StoredSegment, target: str) -> str | None:
        os.link(segment.data_path, target + paths.DATA)
        return target + paths.DATA

    def evict(self) -> None:
        """Nothing to do: local files are cached by the operating system."""

    def original_batches(self, disk: Disk) -> Iterator[tuple[Buffer, BatchInfo]]:
        raise AssertionError("only archived segments are restored")


class _OpenFile:
    def __init__(self, disk: Disk, file: FileId) -> None:
        self._disk = disk
        self._file = file
        self._buffer = bytearray()

    def read(self, size: int, position: int) -> memoryview:
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        view = memoryview(self._buffer)[:size]
        return view[: self._disk.pread_into(self._file, view, position)]

    def reopened(self) -> "_OpenFile":
        return _OpenFile(self._disk, self._file)

    def close(self) -> None:
        self._disk.close(self._file)


LOCAL_FILE = LocalFile()
