"""Spill files: unsynced files for batches that memory logs cannot keep in memory. The next start removes them."""

import weakref
from typing import NamedTuple, Protocol

from headrace.log.counters import Counters
from headrace.log.disk.disk import Disk
from headrace.log.disk.file_cache import FileCache
from headrace.log.disk.paths import SPILL, SPILLED
from headrace.log.read.cold_reads import CachedFiles, Loader, Loads

FILE_BYTES_MAX = 8 << 20  # a file is removed when none of its batches is needed: small ones sooner
LARGE_BYTES = 64 << 10  # smaller logs are not worth a file
LOG_BYTES_MAX = 4 << 20  # of one log in memory; more is spilled


class SpillableLog(Protocol):
    """A log that can move its oldest batches to files."""

    memory_bytes: int

    def spill(self, keep_bytes: int) -> int: ...


class SpillFile:
    __slots__ = ("live", "path", "size")

    def __init__(self, path: str) -> None:
        self.path = path
        self.size = 0
        self.live = 0  # number of batches that are still needed


class Spilled(NamedTuple):
    """A batch that was moved to a file."""

    file: SpillFile
    position: int
    size: int


class Spill:
    """Shared by all memory logs of a broker. Also reclaims their memory under pressure, so it knows the large ones."""

    name = "memory_logs"
    patience_s = 0.0

    def __init__(self, files: FileCache, disk: Disk, root: str, loader: Loader, counters: Counters) -> None:
        self._files, self._disk = files, disk
        self._cached = CachedFiles(files, Loads(loader), counters)
        self._folder = f"{root}/{SPILL}"
        self._number = 0
        self._is_ready = False
        self.large: weakref.WeakSet[SpillableLog] = weakref.WeakSet()
        self.spilled_bytes = 0  # in total, since the start
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
        """Write batches to a file. On an OSError nothing has changed, and the batches stay in memory."""
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
        """Like `read`; ReadWaits when the bytes are not in the page cache."""
        return self._cached.read(file.path, size, position)

    def drop(self, file: SpillFile) -> None:
        self._files.forget([file.path])
        if self._disk.exists(file.path):
            self._disk.unlink(file.path)

    # Reclaiming memory under pressure.

    def held_bytes(self) -> int:
        return sum(log.memory_bytes for log in self.large)

    def shed(self, wanted_bytes: int) -> int:
        freed = 0
        for log in sorted(self.large, key=lambda log: log.memory_bytes, reverse=True):
            if freed >= wanted_bytes:
                break
            freed += log.spill(0)
        return freed
