"""Where memory logs put what they cannot keep in memory: files nobody syncs, gone with the next start."""

import weakref
from typing import TYPE_CHECKING, NamedTuple

from headrace.log.counters import Counters
from headrace.log.disk.disk import Disk
from headrace.log.disk.file_cache import FileCache
from headrace.log.disk.paths import SPILL, SPILLED
from headrace.log.read.cold_reads import CachedFiles, Loader, Loads

if TYPE_CHECKING:
    from headrace.log.memory.memory_log import MemoryLog

FILE_BYTES_MAX = 8 << 20  # a file goes when all of it has been read: small ones go sooner
LARGE_BYTES = 64 << 10  # a log that holds less is not worth a file
LOG_BYTES_MAX = 4 << 20  # of one log in memory; the rest is spilled


class SpillFile:
    __slots__ = ("live", "path", "size")

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = 0
        self.live = 0  # batches in it that are still wanted


class Spilled(NamedTuple):
    """A batch that is in a file now."""

    file: SpillFile
    position: int
    size: int


class Spill:
    """Shared by all memory logs of a broker; also their registry, as one of the holders of memory."""

    name = "memory_logs"
    patience_s = 0.0

    def __init__(self, files: FileCache, disk: Disk, root: str, loader: Loader, counters: Counters) -> None:
        self._files, self._disk = files, disk
        self._cached = CachedFiles(files, Loads(loader), counters)
        self._folder = f"{root}/{SPILL}"
        self._number = 0
        self._is_ready = False
        self.large: weakref.WeakSet[MemoryLog] = weakref.WeakSet()
        self.spilled_bytes = 0  # ever
        if disk.exists(self._folder):
            for name in disk.listdir(self._folder):
                disk.unlink(f"{self._folder}/{name}")

    def new_file(self) -> SpillFile:
        if not self._is_ready:
            self._disk.mkdir(self._folder)
            self._is_ready = True
        self._number += 1
        return SpillFile(f"{self._folder}/{self._number:020d}{SPILLED}")

    def write(self, file: SpillFile, batches: list[bytearray]) -> list[Spilled]:
        """OSError when there is no room: then nothing has changed, and the batches stay where they are."""
        data = b"".join(batches)
        self._files.write_derived(file.path, data, file.size)
        places = []
        for batch in batches:
            places.append(Spilled(file, file.size, len(batch)))
            file.size += len(batch)
        file.live += len(batches)
        self.spilled_bytes += len(data)
        return places

    def read(self, file: SpillFile, position: int, size: int) -> bytes:
        return self._files.read(file.path, size, position)

    def read_now(self, file: SpillFile, position: int, size: int) -> bytes:
        """ReadWaits when it is not in the page cache any more."""
        return self._cached.read(file.path, size, position)

    def drop(self, file: SpillFile) -> None:
        self._files.forget([file.path])
        if self._disk.exists(file.path):
            self._disk.unlink(file.path)

    # As a holder.

    def held_bytes(self) -> int:
        return sum(log.memory_bytes for log in self.large)

    def shed(self, wanted_bytes: int) -> int:
        freed = 0
        for log in sorted(self.large, key=lambda log: log.memory_bytes, reverse=True):
            if freed >= wanted_bytes:
                break
            freed += log.spill(0)
        return freed
