"""Reading archived segments: row groups become batches again, a few of them are kept.

Used from any thread. What comes out of a row group is bounded by what the manifest says, and its bytes are checked
against the manifest before they are unpacked: what has rotted is never served.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.errors import CorruptLog
from headrace.log.disk.disk import Disk, FileId
from headrace.log.tier.manifest import RowGroup, Tier
from headrace.record.batch.crc32c import crc32c

if TYPE_CHECKING:
    from headrace.log.tier.parquet import Footer

CACHE_BYTES = 16 << 20
FOOTERS_MAX = 8


class GroupCache:
    """Batches of the row groups used last, oldest out first; the newest stays whatever its size."""

    def __init__(self, disk: Disk, bytes_max: int = CACHE_BYTES, file: FileId | None = None) -> None:
        self._disk = disk
        self._file = file  # of the one segment that is read, open as long as somebody reads: its name may go
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._groups: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._footers: OrderedDict[str, Footer] = OrderedDict()
        self.size_bytes = 0

    def cached(self, tier: Tier, group: RowGroup) -> bytes | None:
        with self._lock:
            found = self._groups.get((tier.path, group.number))
            if found is not None:
                self._groups.move_to_end((tier.path, group.number))
            return found

    def load(self, tier: Tier, group: RowGroup) -> bytes:
        """Batches of a row group, from the file if need be."""
        found = self.cached(tier, group)
        if found is None:
            found = self._unpack(tier, group)
            self._keep((tier.path, group.number), found)
        return found

    def read(self, tier: Tier, size: int, position: int) -> bytes:
        """Up to `size` bytes of batches from a position; fewer where a row group ends."""
        group = tier.at_position(position)
        return within(self.load(tier, group), group, size, position)

    def _keep(self, key: tuple[str, int], batches: bytes) -> None:
        with self._lock:
            self.size_bytes += len(batches) - len(self._groups.pop(key, b""))
            self._groups[key] = batches
            while self.size_bytes > self._bytes_max and len(self._groups) > 1:
                self.size_bytes -= len(self._groups.popitem(last=False)[1])

    def forget(self, path: str) -> None:
        """The file is about to go."""
        with self._lock:
            self._footers.pop(path, None)
            for key in [key for key in self._groups if key[0] == path]:
                self.size_bytes -= len(self._groups.pop(key))

    def clear(self) -> None:
        with self._lock:
            self._groups.clear()
            self._footers.clear()
            self.size_bytes = 0

    def _unpack(self, tier: Tier, group: RowGroup) -> bytes:
        from headrace.log.tier import parquet

        with self._opened(tier) as file:
            footer = self._footer(file, tier)
            raw = checked(self._disk, file, tier, group.file_start, group.file_size, group.crc)
        batches = parquet.batches_of(footer, group.number, raw, group.size, tier.path)
        if len(batches) != group.size:
            found = f"{len(batches):,} bytes of batches, {group.size:,} were archived"
            raise CorruptLog(tier.path, group.file_start, found)
        return batches

    def _footer(self, file: FileId, tier: Tier) -> "Footer":
        from headrace.log.tier import parquet

        with self._lock:
            found = self._footers.get(tier.path)
        if found is None:
            size = tier.file_bytes - tier.footer_start
            raw = checked(self._disk, file, tier, tier.footer_start, size, tier.footer_crc)
            found = parquet.read_footer(raw, tier.file_bytes, tier.path)
            with self._lock:
                self._footers[tier.path] = found
                while len(self._footers) > FOOTERS_MAX:
                    self._footers.popitem(last=False)
        return found

    def codecs(self, tier: Tier, group: RowGroup) -> dict[int, int]:
        """How each batch of a row group was packed before it was archived, by base offset."""
        from headrace.log.tier import parquet

        with self._opened(tier) as file:
            raw = checked(self._disk, file, tier, group.file_start, group.file_size, group.crc)
            return parquet.codecs_of(self._footer(file, tier), group.number, raw, tier.path)

    @contextmanager
    def _opened(self, tier: Tier) -> Iterator[FileId]:
        if self._file is not None:
            yield self._file
            return
        file = self._disk.open(tier.path, readonly=True)
        try:
            yield file
        finally:
            self._disk.close(file)


def checked(disk: Disk, file: FileId, tier: Tier, start: int, size: int, crc: int) -> bytes:
    raw = disk.pread(file, size, start)
    if len(raw) != size:
        raise CorruptLog(tier.path, start + len(raw), f"{tier.file_bytes:,} bytes were archived")
    if crc32c(raw) != crc:
        raise CorruptLog(tier.path, start, "its bytes are not those that were archived")
    return raw


def within(batches: bytes, group: RowGroup, size: int, position: int) -> bytes:
    at = position - group.position
    return batches if at == 0 and size >= len(batches) else batches[at : at + size]
