"""Replacing sealed segments: the next generation of a segment, made by compaction, by archiving or outside the broker.

A replacement is complete and synced before it takes its final name, and it has a higher generation than the segments
that it replaces: a crash leaves either the old segments or the new one.
"""

from contextlib import suppress
from dataclasses import dataclass

from headrace.errors import CorruptBatch, InvalidInput, NotFound, StorageError
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, write_atomically
from headrace.log.disk.file_cache import FileCache
from headrace.log.segments import index
from headrace.log.segments.segment import Segment, seal_of
from headrace.record import codec

_READ_BYTES = 4 << 20


@dataclass(slots=True)
class Rewritten:
    """A replacement and what it gained."""

    segment: Segment
    bytes_before: int
    bytes_after: int
    records_before: int
    records_after: int
    unnamed: str | None = None  # the file that has yet to be renamed to the segment's data file

    def added_to(self, earlier: "Rewritten | None") -> "Rewritten":
        """The sum of both, where this one replaces the segments that follow the earlier one's."""
        if earlier is None:
            return self
        return Rewritten(
            self.segment,
            earlier.bytes_before + self.bytes_before,
            earlier.bytes_after + self.bytes_after,
            earlier.records_before + self.records_before,
            earlier.records_after + self.records_after,
        )

    def made_of(self, earlier: "Rewritten | None") -> "Rewritten":
        """The gain of both, where this one rewrites the earlier one's result and more."""
        if earlier is None:
            return self
        return Rewritten(
            self.segment,
            self.bytes_before + earlier.bytes_before - earlier.bytes_after,
            self.bytes_after,
            self.records_before + earlier.records_before - earlier.records_after,
            self.records_after,
        )


@dataclass(frozen=True, slots=True)
class Written:
    """The result of writing a replacement file outside the broker."""

    bytes_before: int
    bytes_after: int
    records: int
    horizons: int = 0  # batches that received a delete horizon


def adopt(files: FileCache, segment: Segment, source: str, interval: int) -> Rewritten:
    """Make a file the next generation of a sealed segment: checked, complete and named, but not yet in the log's
    list of segments."""
    target = Segment(segment.folder, segment.base, segment.generation + 1)
    walker = _walk_checked(files.disk, segment, source, interval)
    seal = seal_of(walker, segment.next_offset)
    try:
        with files.folder_held(segment.folder):  # the sync that makes the name durable must find a descriptor
            write_atomically(files.disk, target.path(paths.SEAL), seal.pack())
            files.write_derived(target.path(paths.INDEX), walker.index, 0)
            files.write_derived(target.path(paths.TIME_INDEX), walker.time_index, 0)
            files.disk.rename(source, target.path())
            files.sync_folder(segment.folder)
    except BaseException:
        remove_unfinished(files, target)
        raise
    target.size, target.records = seal.size, seal.records
    target.next_offset, target.max_timestamp, target.is_sealed = seal.next_offset, seal.max_timestamp, True
    return Rewritten(target, segment.size, target.size, segment.records, target.records)


def _walk_checked(disk: Disk, segment: Segment, source: str, interval: int) -> index.Walker:
    """Check that every batch is complete, matches its checksum and has ascending offsets inside the segment's."""
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
                    raise InvalidInput(f"offsets {info.base_offset} to {info.last_offset} do not belong in {segment!r}")
                expected = info.next_offset
            walker.walk(data, 0, infos[-1].end)
        disk.sync(file)
    finally:
        disk.close(file)
    return walker


def remove_unfinished(files: FileCache, target: Segment) -> None:
    """Remove the files of a replacement that failed, to free their space; the next start removes the rest."""
    files.forget(target.paths)
    unfinished = [target.path(suffix) + paths.UNFINISHED for suffix in (paths.DATA, paths.SEAL)]
    for path in (*unfinished, *target.paths):
        with suppress(OSError):
            files.disk.unlink(path)


def as_storage_error(error: BaseException, source: Segment, target: str) -> BaseException:
    """An OSError met while `target` was written from `source`, as an error that users understand."""
    if isinstance(error, FileNotFoundError):
        return NotFound(f"{source.path()} is gone: it was removed or rewritten meanwhile")
    if isinstance(error, OSError):
        return StorageError(f"{target} cannot be written: {error}")
    return error
