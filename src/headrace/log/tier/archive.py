"""Archiving sealed segments to Parquet, and restoring them.

A command or a Spark task reads the segment's file and writes a Parquet file, complete and synced, under a temporary
name. The broker reads that file back, compares it with the segment batch by batch and makes it the segment's next
generation by writing its manifest: the manifest's rename is the step that commits. A crash before it leaves a Parquet
file without a manifest, which the next start removes; a crash after it leaves the old segment, which is superseded.
Restoring works the same way in the other direction, and is adopted like every other rewritten segment.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress

from headrace.errors import CorruptBatch, CorruptLog, HeadraceError, InvalidInput, NotFound, StorageError
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, RealDisk, read_whole, write_atomically
from headrace.log.disk.file_cache import NO_FILES, FileCache
from headrace.log.disk.paths import SegmentStem
from headrace.log.segments.batches import batches
from headrace.log.segments.replacement import Rewritten, Written, adopt, as_storage_error
from headrace.log.segments.segment import Segment
from headrace.log.tier.location import location_of
from headrace.log.tier.manifest import Manifest, StoredGroup, read_manifest, write_manifest
from headrace.log.tier.sources import Archives
from headrace.record import codec
from headrace.record.batch.crc32c import crc32c
from headrace.record.batch.recompress import recompress
from headrace.record.layout import (
    ATTRIBUTES_AT,
    DECOMPRESSED_BYTES_MAX,
    HEADER_BYTES,
    LEADER_EPOCH_AT,
    NONE,
)
from headrace.record.types import BatchInfo, Columns

GROUP_BYTES_MAX = 2 * DECOMPRESSED_BYTES_MAX  # of batches decoded from one row group; larger ones are never written


class NotArchivable(InvalidInput):
    """A segment that cannot be archived; the message says why."""


# Where the files are.


def tier_root(disk: Disk, root: str, tier_dir: str | None) -> str:
    """The folder for the archived segments of one data folder. Under a `tier_dir` its name is unique: two brokers may
    share the same tier_dir, and each removes files in its own folder that it does not know."""
    if tier_dir is None:
        return f"{root}/{paths.TIERS}"
    path = f"{root}/{paths.TIER_ID}"
    if not disk.exists(path):
        write_atomically(disk, path, _new_name().encode())
    return f"{tier_dir.rstrip('/')}/{read_whole(disk, path).decode('ascii', 'replace')}"


def _new_name() -> str:
    import uuid

    return f"headrace-{uuid.uuid4().hex[:12]}"


def parquet_path(tier_root: str, segment: Segment) -> str:
    """The Parquet file for the next generation of a segment."""
    folder = segment.folder.rpartition("/")[2]
    return f"{tier_root}/{folder}/{SegmentStem(segment.base, segment.generation + 1)}{paths.PARQUET}"


def is_archivable(segment: Segment, durable_end: int) -> bool:
    return segment.is_sealed and segment.size > 0 and segment.next_offset <= durable_end and not segment.is_archived


# Writing, outside the broker.


def write_parquet(source: Segment, target: str, disk: Disk | None = None) -> Written:
    """Write the records of a sealed segment to a Parquet file; synced on return. Replaces the file of an earlier
    attempt."""
    from headrace.log.tier import parquet

    disk = disk or RealDisk()
    try:
        file = location_of(disk, target).create(target)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error}") from error
    files = FileCache(disk, 8)
    size = records = 0

    def write(data: memoryview) -> None:
        nonlocal size
        file.write(data)
        size += data.nbytes

    writer = None
    try:
        writer = parquet.GroupWriter(parquet.ParquetOutput(write))
        for infos, columns in _row_groups(files, source):
            writer.write(infos, columns)
            records += columns.count
        if not records:
            raise NotArchivable(f"{source!r} holds no record")
        writer.close()
        file.finish()
    except BaseException as error:
        if writer is not None:
            writer.abandon()
        file.abandon()
        raise as_storage_error(error, source, target) from error
    finally:
        files.close()
    return Written(source.size, size, records)


def _row_groups(files: FileCache, source: Segment) -> Iterator[tuple[list[BatchInfo], Columns]]:
    from headrace.log.tier import parquet

    position, want = 0, parquet.READ_BYTES
    while position < source.size:
        data = memoryview(source.source.read(files, source, min(want, source.size - position), position))
        try:
            used, infos, columns = parquet.next_group(data)
        except CorruptBatch as error:
            raise CorruptLog(source.path(), position + (error.position or 0), error.reason) from error
        if not used:
            want = _declared_size(data, source, position)
            continue
        if infos:
            yield infos, columns
        position += used
        want = parquet.READ_BYTES


def _declared_size(data: memoryview, source: Segment, position: int) -> int:
    """The size of the first batch, which is larger than what was read."""
    need = 12 + int.from_bytes(data[8:12], "big", signed=True) if len(data) >= 12 else 0
    if need <= len(data) or need > source.size - position:
        raise CorruptLog(source.path(), position, "a batch is cut short")
    return need


# Taking the Parquet file over, in the broker.


def adopt_parquet(
    files: FileCache, archives: Archives, segment: Segment, source: str, target: str, *, batch_bytes_max: int
) -> Rewritten:
    """Make a Parquet file the next generation of a sealed segment: compared, durable and named, but not yet in the
    log's list of segments."""
    location = location_of(files.disk, target)
    try:
        # Rename before comparing: a second run of the command may be about to write under the temporary name, and
        # the file that was compared would not be the one that is adopted.
        location.adopt(source, target)
        manifest = _compare(files, segment, target, batch_bytes_max)
        location.sync(target)
    except (HeadraceError, OSError) as error:
        location.remove(target)
        if isinstance(error, FileNotFoundError):
            raise NotFound(f"{error.filename or source} is gone: removed meanwhile, or never written") from None
        raise
    archived = Segment.archived(segment.folder, segment.generation + 1, archives.source_of(manifest))
    write_manifest(files.disk, archived.path(paths.TIER), manifest)
    return Rewritten(archived, segment.size, manifest.file_bytes, segment.records, manifest.records)


def _compare(files: FileCache, segment: Segment, path: str, batch_bytes_max: int) -> Manifest:
    """Read the whole Parquet file back and compare every batch with the segment's; returns its manifest."""
    from headrace.log.tier import parquet

    file = location_of(files.disk, path).open(path)
    try:
        file_bytes = file.size()
        start = parquet.footer_start(file.read(8, max(file_bytes - 8, 0)), file_bytes, path)
        raw = file.read(file_bytes - start, start)
        footer = parquet.read_footer(raw, file_bytes, path)
        groups: list[StoredGroup] = []
        originals = _with_records(batches(files, segment))
        position = records = 0
        latest = -1
        for number, (group_start, group_end) in enumerate(
            zip(footer.group_starts, [*footer.group_starts[1:], footer.start], strict=True)
        ):
            stored = file.read(group_end - group_start, group_start)
            decoded = memoryview(parquet.batches_of(footer, number, stored, GROUP_BYTES_MAX, path))
            infos = codec.scan(decoded)
            for info in infos:
                original = next(originals, None)
                if original is None or not same_batch(*original, decoded, info):
                    reason = f"the records from offset {info.base_offset} on are not those of the segment"
                    raise CorruptLog(path, group_start, reason)
                if info.size > max(batch_bytes_max, original[1].size):
                    raise NotArchivable(
                        f"{segment!r} cannot be archived: archived batches are served uncompressed, and the batch at "
                        f"offset {info.base_offset} has {info.size:,} bytes uncompressed, more than the topic's limit "
                        f"of {batch_bytes_max:,}"
                    )
                records += info.count
            newest = max(info.max_timestamp for info in infos)
            groups.append(StoredGroup(infos[0].base_offset, position, group_start, crc32c(stored), newest))
            position += len(decoded)
            latest = max(latest, newest)
        if next(originals, None) is not None or not groups or records != segment.records:
            raise CorruptLog(path, 0, f"{records:,} records are in it, {segment.records:,} in the segment")
    finally:
        file.close()
    return Manifest(
        path,
        file_bytes=file_bytes,
        footer_start=start,
        footer_crc=crc32c(raw),
        base=segment.base,
        next_offset=segment.next_offset,
        records=records,
        max_timestamp=latest,
        size=position,
        groups=groups,
    )


Batch = tuple[memoryview, BatchInfo]


def _with_records(found: Iterator[Batch]) -> Iterator[Batch]:
    return (batch for batch in found if batch[1].count)


def same_batch(a: memoryview, first: BatchInfo, b: memoryview, second: BatchInfo) -> bool:
    """Whether two batches hold the same records. If they differ byte for byte after decompression they are compared
    field by field: a client may encode integers longer than necessary, and with LogAppendTime the timestamps of single
    records do not count."""
    plain_a, plain_b = memoryview(recompress(a, first, NONE)), memoryview(recompress(b, second, NONE))
    if _header(plain_a) != _header(plain_b):
        return False
    if plain_a[HEADER_BYTES:] == plain_b[HEADER_BYTES:]:
        return True
    return codec.records(plain_a, control=True) == codec.records(plain_b, control=True)


def _header(plain: memoryview) -> tuple[bytes, bytes]:
    """Everything but length and checksum, which depend on the encoding."""
    return bytes(plain[:8]) + bytes(plain[LEADER_EPOCH_AT : LEADER_EPOCH_AT + 4]), bytes(
        plain[ATTRIBUTES_AT:HEADER_BYTES]
    )


# Restoring.


def write_segment(source: Segment, target: str, disk: Disk | None = None) -> Written:
    """Write the batches of an archived segment to a file as they were, each with the compression it had; synced on
    return."""
    disk = disk or RealDisk()
    with suppress(FileNotFoundError):
        disk.unlink(target)
    file = disk.open(target, create=True, exclusive=True)
    position = records = 0
    try:
        for batch, info in source.source.original_batches(disk):
            position += disk.pwrite(file, [batch], position)
            records += info.count
        disk.sync(file)
    except BaseException as error:
        with suppress(OSError):
            disk.unlink(target)
        raise as_storage_error(error, source, target) from error
    finally:
        disk.close(file)
    disk.sync_dir(target.rpartition("/")[0])
    return Written(source.stored_bytes, position, records)


def adopt_rewritten(files: FileCache, segment: Segment, source: str, interval: int) -> Rewritten:
    """Make a file of batches the next generation of a sealed segment, wherever that one is stored."""
    return (adopt_restored if segment.is_archived else adopt)(files, segment, source, interval)


def adopt_restored(files: FileCache, segment: Segment, source: str, interval: int) -> Rewritten:
    """Make a file of batches the next generation of an archived segment, after comparing the two."""
    restored = Segment(segment.folder, segment.base)  # a stand-in, so that the file can be read like a segment
    restored.data_path, restored.size = source, files.disk.file_size(source)
    try:
        _check_same(files, segment, batches(files, restored), source)
    finally:
        files.forget([source])
    return adopt(files, segment, source, interval)


def _check_same(files: FileCache, segment: Segment, found: Iterator[Batch], path: str) -> None:
    """CorruptLog where the batches of a file differ from those of the archived segment."""
    originals = _with_records(batches(files, segment))
    for data, info in found:
        original = next(originals, None)
        if original is None or not same_batch(*original, data, info):
            raise CorruptLog(path, 0, f"the records from offset {info.base_offset} on are not those archived")
    if next(originals, None) is not None:
        raise CorruptLog(path, 0, "records are missing at its end")


# Cleaning up.


def remove_strays(disk: Disk, tier_root: str, log_folder: str, segments: Sequence[Segment]) -> None:
    """Remove the Parquet files of a log that no manifest names, left by a crash between the file and its manifest."""
    folder = f"{tier_root}/{log_folder.rpartition('/')[2]}"
    location = location_of(disk, folder)
    known = {segment.data_path for segment in segments if segment.is_archived}
    for name in location.names(folder):
        if f"{folder}/{name}" not in known:
            location.remove(f"{folder}/{name}")


def remove_archived(disk: Disk, tier_root: str, doomed: str) -> bool:
    """Remove everything that a deleted log has in the tier: the files that its manifests name, and its folder there.
    False when something is left; the log's own folder must then stay, because it holds the manifests."""
    done = True
    try:
        names = disk.listdir(doomed)
    except OSError as error:
        if error.errno not in NO_FILES:
            raise
        return False
    for name in names:
        if name.endswith(paths.TIER):
            # A damaged manifest names no file; its Parquet file is removed with the folder below.
            with suppress(CorruptLog):
                file = read_manifest(disk, f"{doomed}/{name}").path
                done = location_of(disk, file).remove(file) and done
    folder = f"{tier_root}/{doomed.rpartition('/')[2].removesuffix(paths.DELETED)}"
    return location_of(disk, folder).remove_folder(folder) and done
