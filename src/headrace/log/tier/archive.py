"""Archiving a sealed segment to Parquet, and bringing it back.

Whoever archives (a command, a Spark task) reads the segment's file and writes another, whole and synced, under a
name that is not final. The broker then reads that file back, compares it with the segment batch by batch and makes
it the next generation of the segment by writing its manifest: that rename is the one step which counts. A crash before
it leaves a file that nobody knows, removed at the next start; a crash after it leaves the old segment, superseded.
Bringing back is the same with the roles changed, and takes the way of every other rewriting (rewriting.py).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from headrace.errors import CorruptBatch, CorruptLog, HeadraceError, InvalidInput, NotFound, StorageError
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, RealDisk, make_folder, read_whole, write_atomically
from headrace.log.disk.file_cache import NO_FILES, FileCache
from headrace.log.disk.paths import SegmentStem
from headrace.log.maintenance.compaction import Rewritten, batches
from headrace.log.maintenance.offline_rewrite import Written, adopt, plainly
from headrace.log.segments.segment import Segment
from headrace.log.tier.manifest import Tier, make_tier, read_tier, write_tier
from headrace.log.tier.row_group_cache import GroupCache
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

if TYPE_CHECKING:
    from headrace.log.log import Log
    from headrace.log.shard import Shard

GROUP_BYTES_MAX = 2 * DECOMPRESSED_BYTES_MAX  # of batches made of one row group; more was never written


Done = Callable[[Rewritten | None, BaseException | None], object]


class NotArchivable(InvalidInput):
    """A segment that stays as it is; the sentence says why."""


# Where files go.


def tier_root(disk: Disk, root: str, tier_dir: str | None) -> str:
    """The folder for the tier of one data folder. Outside of it the name is one that no other data folder has: two
    brokers may be given the same place, and each takes for its own what it finds."""
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
    """Of the next generation of a segment."""
    folder = segment.folder.rpartition("/")[2]
    return f"{tier_root}/{folder}/{SegmentStem(segment.base, segment.generation + 1)}{paths.PARQUET}"


# Writing.


def write_parquet(source: Segment, target: str, disk: Disk | None = None) -> Written:
    """The records of a sealed segment as a Parquet file; synced on return. What an earlier try left is replaced."""
    from headrace.log.tier import parquet

    disk = disk or RealDisk()
    try:
        make_folder(disk, target.rpartition("/")[0])
        with suppress(FileNotFoundError):
            disk.unlink(target)
        file = disk.open(target, create=True, exclusive=True)
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error}") from error
    files = FileCache(disk, 8)
    size = records = 0

    def write(data: memoryview) -> None:
        nonlocal size
        size += disk.pwrite(file, [data], size)

    writer = None
    try:
        writer = parquet.GroupWriter(parquet.Sink(write))
        for infos, columns in _row_groups(files, source):
            writer.write(infos, columns)
            records += columns.count
        if not records:
            raise NotArchivable(f"{source!r} holds no record")
        writer.close()
        disk.sync(file)
    except BaseException as error:
        if writer is not None:
            writer.abandon()
        with suppress(OSError):
            disk.unlink(target)
        raise plainly(error, source, target) from error
    finally:
        disk.close(file)
        files.close()
    disk.sync_dir(target.rpartition("/")[0])
    return Written(source.size, size, records)


def _row_groups(files: FileCache, source: Segment) -> Iterator[tuple[list[BatchInfo], Columns]]:
    from headrace.log.tier import parquet

    position, want = 0, parquet.READ_BYTES
    while position < source.size:
        data = memoryview(files.read_segment(source, min(want, source.size - position), position))
        try:
            used, infos, columns = parquet.next_group(data)
        except CorruptBatch as error:
            raise CorruptLog(source.path(), position + (error.position or 0), error.reason) from error
        if not used:
            want = _declared(data, source, position)
            continue
        if infos:
            yield infos, columns
        position += used
        want = parquet.READ_BYTES


def _declared(data: memoryview, source: Segment, position: int) -> int:
    need = 12 + int.from_bytes(data[8:12], "big", signed=True) if len(data) >= 12 else 0
    if need <= len(data) or need > source.size - position:
        raise CorruptLog(source.path(), position, "a batch is cut short")
    return need


# Taking in, by the broker.


def take_in(files: FileCache, segment: Segment, source: str, target: str, *, batch_bytes_max: int) -> Rewritten:
    """Make a Parquet file the next generation of a sealed segment: compared, durable and named, but not yet in the
    log's list."""
    disk = files.disk
    try:
        # First out of reach: a second run of the command may be about to write under the same name, and what was
        # compared would not be what is taken in.
        disk.rename(source, target)
        tier = _examine(files, segment, target, batch_bytes_max)
    except (HeadraceError, OSError) as error:
        with suppress(OSError):
            disk.unlink(target)
        if isinstance(error, FileNotFoundError):
            raise NotFound(f"{error.filename or source} is gone: removed meanwhile, or never written") from None
        raise
    disk.sync_dir(target.rpartition("/")[0])
    made = Segment.archived(segment.folder, segment.generation + 1, tier)
    write_tier(disk, made.path(paths.TIER), tier)
    return Rewritten(made, segment.size, tier.file_bytes, segment.records, tier.records)


def is_archivable(log: "Log", segment: Segment) -> bool:
    return segment.is_sealed and segment.size > 0 and segment.next_offset <= log.durable_end and segment.tier is None


def archive(shard: "Shard", log: "Log", segment: Segment, done: Done) -> None:
    """Have the broker take in what was written for a segment (parquet_path, unfinished); the segment's own file goes
    when nobody reads it any more. `done` is told what came of it; nothing at all when the log is busy."""
    target = parquet_path(shard.tier_root, segment)
    limit = log.settings.batch_bytes_max
    shard.maintenance.rewrite_segments(
        log,
        [segment],
        lambda _data, _info: None,
        done,
        make=lambda: take_in(shard.files, segment, target + paths.UNFINISHED, target, batch_bytes_max=limit),
    )


def _examine(files: FileCache, segment: Segment, path: str, batch_bytes_max: int) -> Tier:
    """Read it all back, and hold every batch it makes beside the one in the segment."""
    from headrace.log.tier import parquet

    disk = files.disk
    file = disk.open(path)
    try:
        file_bytes = disk.size(file)
        start = parquet.footer_start(disk.pread(file, 8, max(file_bytes - 8, 0)), file_bytes, path)
        raw = disk.pread(file, file_bytes - start, start)
        footer = parquet.read_footer(raw, file_bytes, path)
        groups: list[tuple[int, int, int, int, int]] = []
        originals = _with_records(batches(files, segment))
        position = records = 0
        latest = -1
        for number, (begin, end) in enumerate(
            zip(footer.group_starts, [*footer.group_starts[1:], footer.start], strict=True)
        ):
            packed = disk.pread(file, end - begin, begin)
            made = memoryview(parquet.batches_of(footer, number, packed, GROUP_BYTES_MAX, path))
            infos = codec.scan(made)
            for info in infos:
                original = next(originals, None)
                if original is None or not same_batch(*original, made, info):
                    at = f"the records from offset {info.base_offset} on"
                    raise CorruptLog(path, begin, f"{at} are not those of the segment")
                if info.size > max(batch_bytes_max, original[1].size):
                    raise NotArchivable(
                        f"{segment!r} stays: its batch at offset {info.base_offset} unfolds to {info.size:,} bytes; "
                        f"what is archived is served unfolded, and the topic's batches have at most {batch_bytes_max:,}"
                    )
                records += info.count
            newest = max(info.max_timestamp for info in infos)
            groups.append((infos[0].base_offset, position, begin, crc32c(packed), newest))
            position += len(made)
            latest = max(latest, newest)
        if next(originals, None) is not None or not groups or records != segment.records:
            raise CorruptLog(path, 0, f"{records:,} records are in it, {segment.records:,} in the segment")
        disk.sync(file)
    finally:
        disk.close(file)
    return make_tier(
        path,
        file_bytes=file_bytes,
        footer=(start, crc32c(raw)),
        base=segment.base,
        next_offset=segment.next_offset,
        records=records,
        max_timestamp=latest,
        size=position,
        groups=groups,
    )


Found = tuple[memoryview, BatchInfo]


def _with_records(found: Iterator[Found]) -> Iterator[Found]:
    return (one for one in found if one[1].count)


def same_batch(a: memoryview, first: BatchInfo, b: memoryview, second: BatchInfo) -> bool:
    """Whether two batches say the same: byte for byte but for the codec, or else field by field, since a client may
    write numbers longer than need be and the broker's time stands for that of each record."""
    plain_a, plain_b = memoryview(recompress(a, first, NONE)), memoryview(recompress(b, second, NONE))
    if _header(plain_a) != _header(plain_b):
        return False
    if plain_a[HEADER_BYTES:] == plain_b[HEADER_BYTES:]:
        return True
    return codec.records(plain_a, control=True) == codec.records(plain_b, control=True)


def _header(plain: memoryview) -> tuple[bytes, bytes]:
    """Everything but length, checksum and codec."""
    return bytes(plain[:8]) + bytes(plain[LEADER_EPOCH_AT : LEADER_EPOCH_AT + 4]), bytes(
        plain[ATTRIBUTES_AT:HEADER_BYTES]
    )


# Bringing back.


def write_segment(source: Segment, target: str, disk: Disk | None = None) -> Written:
    """The batches of an archived segment in a file as it was, each under the codec it had; synced on return."""
    disk = disk or RealDisk()
    tier = source.tier
    assert tier is not None, "only what is archived is brought back"
    groups = GroupCache(disk)
    with suppress(FileNotFoundError):
        disk.unlink(target)
    file = disk.open(target, create=True, exclusive=True)
    position = records = 0
    try:
        for group in tier.groups():
            data = memoryview(groups.load(tier, group))
            packed = groups.codecs(tier, group)
            for info in codec.scan(data, verify_crc=False):
                made = recompress(data, info, packed[info.base_offset])
                position += disk.pwrite(file, [made], position)
                records += info.count
        disk.sync(file)
    except BaseException as error:
        with suppress(OSError):
            disk.unlink(target)
        raise plainly(error, source, target) from error
    finally:
        disk.close(file)
    disk.sync_dir(target.rpartition("/")[0])
    return Written(tier.file_bytes, position, records)


def check_same(files: FileCache, segment: Segment, found: Iterator[Found], path: str) -> None:
    """Every batch of `found` beside its original in a segment; CorruptLog where they differ."""
    originals = _with_records(batches(files, segment))
    for data, info in found:
        original = next(originals, None)
        if original is None or not same_batch(*original, data, info):
            raise CorruptLog(path, 0, f"the records from offset {info.base_offset} on are not those archived")
    if next(originals, None) is not None:
        raise CorruptLog(path, 0, "records are missing at its end")


# Cleaning up.


def remove_file(disk: Disk, path: str) -> bool:
    """Whether a file of the tier is gone. That may be another disk, away or read-only for a while: no reason to stop
    confirming what goes elsewhere. Who is told no tries again later."""
    try:
        disk.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def remove_strays(disk: Disk, tier_root: str, log_folder: str, segments: Sequence[Segment]) -> None:
    """Remove the Parquet files of a log that no manifest names: what a crash left between the file and its manifest."""
    folder = f"{tier_root}/{log_folder.rpartition('/')[2]}"
    if not disk.exists(folder):
        return
    known = {segment.tier.path for segment in segments if segment.tier is not None}
    try:
        names = disk.listdir(folder)
    except OSError:  # see remove_file
        return
    for name in names:
        if f"{folder}/{name}" not in known:
            remove_file(disk, f"{folder}/{name}")


def remove_archived(disk: Disk, tier_root: str, doomed: str) -> bool:
    """Remove all that a deleted log has in the tier: what its manifests name, and its folder there. False when
    something is left: the log's own folder is to stay until it is not."""
    done = True
    try:
        names = disk.listdir(doomed)
    except OSError as error:
        if error.errno not in NO_FILES:
            raise
        return False
    for name in names:
        if name.endswith(paths.TIER):
            # One that cannot be read names nothing; its file goes with the folder below.
            with suppress(CorruptLog):
                done = remove_file(disk, read_tier(disk, f"{doomed}/{name}").path) and done
    folder = f"{tier_root}/{doomed.rpartition('/')[2].removesuffix(paths.DELETED)}"
    try:
        if disk.exists(folder):
            for name in disk.listdir(folder):
                done = remove_file(disk, f"{folder}/{name}") and done
            if done:
                disk.rmdir(folder)
    except OSError:  # see remove_file; or a command that archives has just put something there
        return False
    return done


# Bringing back, by the broker.


def take_back(files: FileCache, segment: Segment, source: str, interval: int) -> Rewritten:
    """Make a file of batches the next generation of an archived segment, once it was compared with it."""
    staged = Segment(segment.folder, segment.base)  # only to be read as one
    staged.data_path, staged.size = source, files.disk.file_size(source)
    try:
        check_same(files, segment, batches(files, staged), source)
    finally:
        files.forget([source])
    return adopt(files, segment, source, interval)


def bring_back(shard: "Shard", log: "Log", segment: Segment, source: str, done: Done) -> None:
    """As archive, the other way: `source` is what write_segment has written."""
    interval = log.settings.index_interval
    shard.maintenance.rewrite_segments(
        log,
        [segment],
        lambda _data, _info: None,
        done,
        make=lambda: take_back(shard.files, segment, source, interval),
    )
