"""Rewriting a sealed segment outside the broker.

A command or a Spark task reads the segment's file and writes another one, complete and synced. The broker then checks
that file and makes it the next generation of the segment (`segments/replacement.py: adopt`).
"""

from collections.abc import Callable

from headrace.log.disk.disk import Disk, RealDisk
from headrace.log.disk.file_cache import FileCache
from headrace.log.segments.batches import batches
from headrace.log.segments.replacement import Written, as_storage_error
from headrace.log.segments.segment import Segment
from headrace.record import codec
from headrace.record.types import BatchInfo, Buffer

# What becomes of a batch: the same batch, a changed one, or None to drop it.
Change = Callable[[memoryview, BatchInfo], Buffer | None]


def rewrite_file(source: Segment, target: str, change: Change, disk: Disk | None = None) -> Written:
    """Write the changed batches of a sealed segment to a new file; synced on return."""
    disk = disk or RealDisk()
    files = FileCache(disk, 8)
    file = disk.open(target, create=True, exclusive=True)
    position = records = horizons = 0
    try:
        for data, info in batches(files, source):
            changed = change(data, info)
            if changed is not None:
                position += disk.pwrite(file, [changed], position)
                for found in codec.scan(changed, verify_crc=False):
                    records += found.count
                    horizons += found.delete_horizon_ms != info.delete_horizon_ms
        disk.sync(file)
    except OSError as error:
        raise as_storage_error(error, source, target) from error
    finally:
        disk.close(file)
        files.close()
    disk.sync_dir(target.rpartition("/")[0])
    return Written(source.size, position, records, horizons)


__all__ = ["Change", "Written", "rewrite_file"]
