"""Row groups of archived segments decoded to batches, with a cache of those used last.

Used from any thread. The size of a decoded row group is bounded by the manifest, and its bytes are checked against
the manifest's checksum before they are decoded, so that damaged bytes are never served.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace.errors import CorruptLog
from headrace.log.disk.disk import Disk
from headrace.log.tier.location import ArchiveReader, location_of
from headrace.log.tier.manifest import Manifest, RowGroup
from headrace.record.batch.crc32c import crc32c

if TYPE_CHECKING:
    from headrace.log.tier.parquet import Footer

CACHE_BYTES = 16 << 20
FOOTERS_MAX = 8


class RowGroupCache:
    """An LRU of decoded row groups, bounded by bytes; the newest one stays whatever its size.

    Entries belong to a Manifest object, not to a path: after a truncation a path may be reused for other records.
    """

    def __init__(self, disk: Disk, bytes_max: int = CACHE_BYTES, file: ArchiveReader | None = None) -> None:
        self._disk = disk
        self._file = file  # the already open file of the only segment that is read: its name may be gone
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._groups: OrderedDict[tuple[Manifest, int], bytes] = OrderedDict()
        self._footers: OrderedDict[Manifest, Footer] = OrderedDict()
        self.size_bytes = 0

    def __reduce__(self) -> tuple[type["RowGroupCache"], tuple[Disk, int]]:
        """A pickled cache, as in the plan of a Spark task, arrives empty."""
        assert self._file is None, "an open file cannot be pickled"
        return RowGroupCache, (self._disk, self._bytes_max)

    def cached(self, manifest: Manifest, group: RowGroup) -> bytes | None:
        with self._lock:
            found = self._groups.get((manifest, group.number))
            if found is not None:
                self._groups.move_to_end((manifest, group.number))
            return found

    def load(self, manifest: Manifest, group: RowGroup) -> bytes:
        """The batches of a row group, read from its file unless they are cached."""
        found = self.cached(manifest, group)
        if found is None:
            found = self._decode(manifest, group)
            self._keep((manifest, group.number), found)
        return found

    def read(self, manifest: Manifest, size: int, position: int) -> bytes:
        """Up to `size` bytes of batches from a position; fewer where a row group ends."""
        group = manifest.at_position(position)
        return slice_of(self.load(manifest, group), group, size, position)

    def _keep(self, key: tuple[Manifest, int], batches: bytes) -> None:
        with self._lock:
            self.size_bytes += len(batches) - len(self._groups.pop(key, b""))
            self._groups[key] = batches
            while self.size_bytes > self._bytes_max and len(self._groups) > 1:
                self.size_bytes -= len(self._groups.popitem(last=False)[1])

    def forget(self, manifest: Manifest) -> None:
        """Drop everything of one segment, whose file is about to be removed."""
        with self._lock:
            self._footers.pop(manifest, None)
            for key in [key for key in self._groups if key[0] is manifest]:
                self.size_bytes -= len(self._groups.pop(key))

    def clear(self) -> None:
        with self._lock:
            self._groups.clear()
            self._footers.clear()
            self.size_bytes = 0

    def _decode(self, manifest: Manifest, group: RowGroup) -> bytes:
        from headrace.log.tier import parquet

        with self._opened(manifest) as file:
            footer = self._footer(file, manifest)
            raw = read_checked(file, manifest, group.file_start, group.file_size, group.crc)
        batches = parquet.batches_of(footer, group.number, raw, group.size, manifest.path)
        if len(batches) != group.size:
            reason = f"{len(batches):,} bytes of batches, {group.size:,} were archived"
            raise CorruptLog(manifest.path, group.file_start, reason)
        return batches

    def _footer(self, file: ArchiveReader, manifest: Manifest) -> "Footer":
        from headrace.log.tier import parquet

        with self._lock:
            found = self._footers.get(manifest)
        if found is None:
            size = manifest.file_bytes - manifest.footer_start
            raw = read_checked(file, manifest, manifest.footer_start, size, manifest.footer_crc)
            found = parquet.read_footer(raw, manifest.file_bytes, manifest.path)
            with self._lock:
                self._footers[manifest] = found
                while len(self._footers) > FOOTERS_MAX:
                    self._footers.popitem(last=False)
        return found

    def codecs(self, manifest: Manifest, group: RowGroup) -> dict[int, int]:
        """The compression that each batch of a row group had before it was archived, by base offset."""
        from headrace.log.tier import parquet

        with self._opened(manifest) as file:
            raw = read_checked(file, manifest, group.file_start, group.file_size, group.crc)
            return parquet.codecs_of(self._footer(file, manifest), group.number, raw, manifest.path)

    @contextmanager
    def _opened(self, manifest: Manifest) -> Iterator[ArchiveReader]:
        if self._file is not None:
            yield self._file
            return
        file = location_of(self._disk, manifest.path).open(manifest.path)
        try:
            yield file
        finally:
            file.close()


def read_checked(file: ArchiveReader, manifest: Manifest, start: int, size: int, crc: int) -> bytes:
    raw = file.read(size, start)
    if len(raw) != size:
        raise CorruptLog(manifest.path, start + len(raw), f"{manifest.file_bytes:,} bytes were archived")
    if crc32c(raw) != crc:
        raise CorruptLog(manifest.path, start, "its bytes are not those that were archived")
    return raw


def slice_of(batches: bytes, group: RowGroup, size: int, position: int) -> bytes:
    """Up to `size` bytes of a row group's batches; `position` counts in the segment."""
    at = position - group.position
    return batches if at == 0 and size >= len(batches) else batches[at : at + size]
