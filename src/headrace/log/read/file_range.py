"""Ranges of segment files that a listener sends from the page cache to a socket with sendfile.

Their bytes never pass through this process, so the code that cuts a range must know where batches begin and that
their checksums are right.
"""

import os
from collections.abc import Callable

from headrace.log.disk.disk import Disk, FileId, is_untouched
from headrace.log.disk.file_cache import FileCache
from headrace.log.disk.pread import is_cached, pread_nowait
from headrace.log.segments.segment import Segment
from headrace.record import codec
from headrace.record.layout import MAGIC, MAGIC_AT

PARTS_MAX = 256  # open at a time, for all clients: each needs a descriptor, and one more while its client is slow


def parts_max(open_files_max: int) -> int:
    """The limit on open ranges; lower for a process that may open few files."""
    return min(PARTS_MAX, open_files_max // 32)


class FileRange:
    """Whole batches in a file that stays open for them, even if the file is removed."""

    __slots__ = ("_disk", "_left_memory", "file", "next_offset", "position", "size")
    made = 0  # ranges that exist now

    def __init__(
        self,
        disk: Disk,
        file: FileId,
        position: int,
        size: int,
        next_offset: int,
        left_memory: Callable[[], object],
    ) -> None:
        self._disk = disk
        self._left_memory = left_memory
        self.file = os.dup(file)
        FileRange.made += 1
        self.position = position
        self.size = size
        self.next_offset = next_offset

    def __del__(self) -> None:
        if hasattr(self, "file"):
            self._disk.close(self.file)
            FileRange.made -= 1

    def __len__(self) -> int:
        return self.size

    def is_cached(self, start: int = 0) -> bool:
        """Whether sendfile would not wait for the disk. If it would, the segment's other readers are notified, too.
        Owner thread only."""
        if is_cached(self.file, self.position + start, self.size - start):
            return True
        self._left_memory()
        return False

    def read(self, start: int = 0) -> bytes:
        """The bytes, for a listener that needs them after all. Owner thread only."""
        return self._read(start) if self.is_cached(start) else self.load(start)

    def load(self, start: int = 0) -> bytes:
        """The bytes from the disk, on any thread. The whole range is read, because its checksums are verified again."""
        data = self._read(0)
        *_, wrong = codec.valid_until(data)
        if wrong is not None:
            raise OSError(f"the disk returned other bytes than were written: {wrong}")
        return data[start:]

    def _read(self, start: int) -> bytes:
        data = self._disk.pread(self.file, self.size - start, self.position + start)
        if len(data) < self.size - start:
            raise OSError(f"{self.size - start:,} bytes expected at {self.position + start:,}, {len(data):,} found")
        return data


class FileRanges:
    """Cuts ranges from the segments of a shard, up to a limit. Owner thread only."""

    def __init__(self, files: FileCache) -> None:
        self._files = files
        self.limit = parts_max(files.disk.open_files_max())

    def cut(self, segment: Segment, position: int, end: int, next_offset: int, *, is_at_end: bool) -> FileRange | None:
        """The bytes [position, end) of a segment's file. The batch with `next_offset` begins at `end`, or the file
        ends there (`is_at_end`).

        None when the bytes are not in the page cache, when there is no batch at `end` because the index is wrong,
        when too many ranges are open, and on the disk of a test that wants to see every read.
        """
        files = self._files
        if FileRange.made >= self.limit or not is_untouched(files.disk):
            return None
        entry = files.acquire(segment.data_path)
        try:
            file = entry.file
            if not is_cached(file, position, end - position):
                return None
            if not is_at_end and not _begins(pread_nowait(file, MAGIC_AT + 1, end), next_offset):
                return None
            return FileRange(files.disk, file, position, end - position, next_offset, segment.left_memory)
        except OSError:  # not in memory, or no descriptors left: the read that follows finds out what is wrong
            return None
        finally:
            files.release(entry)


def _begins(header: bytes, offset: int) -> bool:
    return len(header) > MAGIC_AT and header[:8] == offset.to_bytes(8, "big") and header[MAGIC_AT] == MAGIC
