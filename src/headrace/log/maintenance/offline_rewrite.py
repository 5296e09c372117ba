"""Rewriting a sealed segment outside the broker, and taking the result in.

Whoever rewrites (a command, a Spark task) reads the segment's file and writes another, whole and synced. The broker
then checks that file and makes it the next generation of the segment by a rename, as its own compaction does: a
crash leaves the old one or the new one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.errors import CorruptBatch, InvalidInput, NotFound, StorageError
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, RealDisk, write_atomically
from headrace.log.disk.file_cache import FileCache
from headrace.log.maintenance.compaction import Rewritten, batches, remove_made
from headrace.log.segments import index
from headrace.log.segments.segment import Segment, seal_of
from headrace.record import codec
from headrace.record.types import BatchInfo, Buffer

# What becomes of a batch: the same, another, or None for nothing.
Change = Callable[[memoryview, BatchInfo], Buffer | None]
_READ_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Written:
    bytes_before: int
    bytes_after: int
    records: int
    horizons: int = 0  # batches that have a delete horizon now, and had none


def rewrite_file(source: Segment, target: str, change: Change, disk: Disk | None = None) -> Written:
    """Write the changed batches of a sealed segment to a new file; synced on return."""
    disk = disk or RealDisk()
    files = FileCache(disk, 8)
    file = disk.open(target, create=True, exclusive=True)
    position = records = horizons = 0
    try:
        for data, info in batches(files, source):
            made = change(data, info)
            if made is not None:
                position += disk.pwrite(file, [made], position)
                for found in codec.scan(made, verify_crc=False):
                    records += found.count
                    horizons += found.delete_horizon_ms != info.delete_horizon_ms
        disk.sync(file)
    except OSError as error:
        raise plainly(error, source, target) from error
    finally:
        disk.close(file)
        files.close()
    disk.sync_dir(target.rpartition("/")[0])
    return Written(source.size, position, records, horizons)


def plainly(error: BaseException, source: Segment, target: str) -> BaseException:
    """What went wrong while one file was made of another, in words."""
    if isinstance(error, FileNotFoundError):
        return NotFound(f"{source.path()} is gone: it was removed or rewritten meanwhile")
    if isinstance(error, OSError):
        return StorageError(f"{target} cannot be written: {error}")
    return error


def adopt(files: FileCache, segment: Segment, source: str, interval: int) -> Rewritten:
    """Make a file the next generation of a sealed segment: complete and named, but not yet in the log's list."""
    target = Segment(segment.folder, segment.base, segment.generation + 1)
    walker = _walk(files.disk, segment, source, interval)
    seal = seal_of(walker, segment.next_offset)
    try:
        with files.folder_held(segment.folder):  # it has its name for good, or not at all
            write_atomically(files.disk, target.path(paths.SEAL), seal.pack())
            files.write_derived(target.path(paths.INDEX), walker.index, 0)
            files.write_derived(target.path(paths.TIME_INDEX), walker.time_index, 0)
            files.disk.rename(source, target.path())
            files.sync_folder(segment.folder)
    except BaseException:
        remove_made(files, target)
        raise
    target.size, target.records = seal.size, seal.records
    target.next_offset, target.max_timestamp, target.is_sealed = seal.next_offset, seal.max_timestamp, True
    return Rewritten(target, segment.size, target.size, segment.records, target.records)


def _walk(disk: Disk, segment: Segment, source: str, interval: int) -> index.Walker:
    """Every batch checked: whole, its checksum right, its offsets ascending and inside the segment's."""
    walker = index.Walker(segment.base, interval)
    expected = segment.base
    file = disk.open(source)
    try:
        size = disk.size(file)
        want = _READ_BYTES
        while walker.position < size:
            data = disk.pread(file, min(want, size - walker.position), walker.position)
            infos = codec.scan(data)
            if not infos:
                need = 12 + int.from_bytes(data[8:12], "big", signed=True)
                if need <= len(data) or need > size - walker.position:
                    raise CorruptBatch("a batch is cut short", walker.position)
                want = need
                continue
            want = _READ_BYTES
            for info in infos:
                if info.base_offset < expected or info.next_offset > segment.next_offset:
                    raise InvalidInput(f"offsets {info.base_offset} to {info.last_offset} have no place in {segment!r}")
                expected = info.next_offset
            walker.walk(data, 0, infos[-1].end)
        disk.sync(file)
    finally:
        disk.close(file)
    return walker
