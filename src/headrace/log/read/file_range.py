"""Runs of batches that a listener sends from the page cache to a socket, without their passing through this process.

They are not read, so whoever cuts one must know where batches begin, and that their checksums are right.
"""

import os
from collections.abc import Callable

from headrace.log.disk.disk import Disk, FileId
from headrace.log.disk.pread import is_cached, pread_nowait
from headrace.record import codec
from headrace.record.layout import MAGIC, MAGIC_AT

PARTS_MAX = 256  # at a time, of all clients: each has a descriptor of its own, and one to wait for its client with


def parts_max(open_files_max: int) -> int:
    """A process that may open few files has better uses for them."""
    return min(PARTS_MAX, open_files_max // 32)


class FileRange:
    """Whole batches at a place in a file, which stays open for them whatever becomes of its name."""

    __slots__ = ("_disk", "_left_memory", "file", "next_offset", "position", "size")
    made = 0  # and not gone yet

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
        """On the owner thread. If not, the segment's other readers have to know."""
        if is_cached(self.file, self.position + start, self.size - start):
            return True
        self._left_memory()
        return False

    def read(self, start: int = 0) -> bytes:
        """On the owner thread, for those who need the bytes after all."""
        return self._read(start) if self.is_cached(start) else self.load(start)

    def load(self, start: int = 0) -> bytes:
        """From the disk, on any thread: checked again, and so all of it is read."""
        data = self._read(0)
        *_, wrong = codec.valid_until(data)
        if wrong is not None:
            raise OSError(f"what came back from the disk is not what was written: {wrong}")
        return data[start:]

    def _read(self, start: int) -> bytes:
        data = self._disk.pread(self.file, self.size - start, self.position + start)
        if len(data) < self.size - start:
            raise OSError(f"{self.size - start:,} bytes expected at {self.position + start:,}, {len(data):,} found")
        return data


def cut_part(
    disk: Disk,
    file: FileId,
    position: int,
    end: int,
    next_offset: int,
    left_memory: Callable[[], object],
    *,
    is_at_end: bool,
) -> FileRange | None:
    """file[position:end]; behind it the batch with next_offset begins, or nothing (is_at_end). None if that is not so,
    since indexes can be wrong, and where it has to be read from the disk. `left_memory` is called when it is not in
    memory any more."""
    if not is_cached(file, position, end - position):
        return None
    try:
        if not is_at_end and not _begins(pread_nowait(file, MAGIC_AT + 1, end), next_offset):
            return None
        return FileRange(disk, file, position, end - position, next_offset, left_memory)
    except OSError:  # not in memory, or no descriptors left: whoever reads it instead finds out what is wrong
        return None


def _begins(header: bytes, offset: int) -> bool:
    return len(header) > MAGIC_AT and header[:8] == offset.to_bytes(8, "big") and header[MAGIC_AT] == MAGIC
