"""Archived segments as segment sources, and the one place that chooses the source for a manifest.

`location.py` decides where archived files are stored. To store them in another format, write another SegmentSource and
have `Archives.open` choose it.
"""

import os
from collections.abc import Iterator

from headrace.log.disk import paths
from headrace.log.disk.disk import Disk
from headrace.log.disk.file_cache import FileCache
from headrace.log.disk.paths import SegmentStem
from headrace.log.segments.segment import Segment
from headrace.log.segments.source import OpenSource, OwnerReads, SegmentSource, SourceProblem, StoredSegment
from headrace.log.tier.location import ArchiveReader, location_of
from headrace.log.tier.manifest import Manifest, read_manifest
from headrace.log.tier.row_group_cache import RowGroupCache, slice_of
from headrace.record import codec
from headrace.record.batch.recompress import recompress
from headrace.record.types import BatchInfo, Buffer


class Archives:
    """Opens archived segments by their manifests; all of them share one cache of decoded row groups."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.cache = RowGroupCache(disk)

    def open(self, manifest_path: str, file: str | None = None) -> SegmentSource:
        """The source that a manifest describes; `file` overrides where its Parquet file is. CorruptLog when the
        manifest is damaged."""
        return self.source_of(read_manifest(self._disk, manifest_path, file))

    def open_link(self, manifest_path: str) -> SegmentSource:
        """The source of a segment that `SegmentSource.hold` has kept for a reader, by the link to its manifest."""
        path = read_manifest(self._disk, manifest_path).path
        target = manifest_path.removesuffix(paths.TIER) + paths.PARQUET
        return self.open(manifest_path, location_of(self._disk, path).held(path, target))

    def source_of(self, manifest: Manifest) -> SegmentSource:
        return ParquetFile(manifest, self.cache)

    def segment(self, folder: str, stem: SegmentStem) -> Segment | None:
        """An archived segment of a log's folder; None when no manifest has this name."""
        path = f"{folder}/{stem}{paths.TIER}"
        return Segment.archived(folder, stem.generation, self.open(path)) if self._disk.exists(path) else None


class ParquetFile(SegmentSource):
    """A sealed segment in a Parquet file, of which one row group is decoded at a time."""

    __slots__ = ("_cache", "contents")
    is_archived = True
    contents: Manifest

    def __init__(self, manifest: Manifest, cache: RowGroupCache) -> None:
        self.contents = manifest
        self._cache = cache

    def stored_bytes(self, segment: StoredSegment) -> int:
        return self.contents.file_bytes

    def files(self, segment: StoredSegment) -> list[str]:
        return [segment.path(paths.TIER), self.contents.path]  # without its manifest the Parquet file is a leftover

    def read(self, files: FileCache, segment: StoredSegment, size: int, position: int) -> bytes:
        return self._cache.read(self.contents, size, position)

    def read_now(self, reads: OwnerReads, segment: StoredSegment, size: int, position: int) -> bytes:
        manifest = self.contents
        group = manifest.at_position(position)
        batches = self._cache.cached(manifest, group)
        key = manifest.path, group.number
        if batches is None:
            reads.counters.tier_reads += 1
            reads.loads.result(key, lambda: bool(self._cache.load(manifest, group)))
            batches = self._cache.load(manifest, group)  # it may have been evicted again before this retry
        else:
            reads.loads.forget(key)
        return slice_of(batches, group, size, position)

    def open(self, disk: Disk, path: str) -> OpenSource:
        return _OpenParquet(disk, location_of(disk, path).open(path), self.contents)

    def problem(self, disk: Disk, segment: StoredSegment) -> SourceProblem | None:
        manifest = self.contents
        size = location_of(disk, manifest.path).size(manifest.path)
        return (
            SourceProblem(size, f"{manifest.file_bytes:,} bytes were archived there")
            if size != manifest.file_bytes
            else None
        )

    def remove(self, disk: Disk, segment: StoredSegment) -> bool:
        remove_if_present(disk, segment.path(paths.TIER))
        return location_of(disk, self.contents.path).remove(self.contents.path)

    def modified_ms(self, disk: Disk, segment: StoredSegment) -> int:
        return location_of(disk, self.contents.path).modified_ms(self.contents.path)

    def hold(self, disk: Disk, segment: StoredSegment, target: str) -> str | None:
        path = self.contents.path
        if not location_of(disk, path).hold(path, target + paths.PARQUET):
            return None
        try:
            os.link(segment.path(paths.TIER), target + paths.TIER)
        except FileNotFoundError:
            raise
        except OSError:
            return None
        return target + paths.TIER

    def evict(self) -> None:
        self._cache.forget(self.contents)

    def original_batches(self, disk: Disk) -> Iterator[tuple[Buffer, BatchInfo]]:
        cache = RowGroupCache(disk)
        for group in self.contents.groups():
            data = memoryview(cache.load(self.contents, group))
            codecs = cache.codecs(self.contents, group)
            for info in codec.scan(data, verify_crc=False):
                yield recompress(data, info, codecs[info.base_offset]), info


class _OpenParquet:
    """Keeps one decoded row group at a time."""

    def __init__(self, disk: Disk, file: ArchiveReader, manifest: Manifest) -> None:
        self._disk = disk
        self._file = file
        self._manifest = manifest
        self._groups = RowGroupCache(disk, 0, file)

    def read(self, size: int, position: int) -> memoryview:
        return memoryview(self._groups.read(self._manifest, size, position))

    def reopened(self) -> "_OpenParquet":
        return _OpenParquet(self._disk, self._file, self._manifest)

    def close(self) -> None:
        self._file.close()


def remove_if_present(disk: Disk, path: str) -> None:
    try:
        disk.unlink(path)
    except FileNotFoundError:
        return
