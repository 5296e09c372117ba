"""Cutting a log back to an offset, so that a crash at any point leaves something that can be finished.

What is to stay of the segment that holds the offset is copied first, so that a full disk is met before anything is
touched. Then newest first: later segments lose their names, and the copy takes its place. The intention is durable
before this begins (truncations.py), so a log found shorter than it was is no damage while it stands.

The copy is sealed, and the log goes on in a segment of its own that begins at the offset. What lay right before it may
have been compacted away: then no record says where the log ends, but the seal does, and it is durable before the
copy has a name. And the last segment, the only one that is ever searched for its end, has no gaps.
"""

import struct
from collections.abc import Sequence
from contextlib import ExitStack

from headrace.errors import DiskFull
from headrace.log.commit.log_writer import Tail
from headrace.log.disk import paths
from headrace.log.disk.disk import write_atomically
from headrace.log.disk.file_cache import NO_FILES, NO_ROOM, FileCache
from headrace.log.maintenance.compaction import batches
from headrace.log.segments import index
from headrace.log.segments.segment import Segment, seal_of
from headrace.record import codec
from headrace.record.batch.crc32c import crc32c
from headrace.record.layout import ATTRIBUTES_AT, CRC_AT, LAST_OFFSET_DELTA_AT
from headrace.record.types import BatchInfo


def cut_back(files: FileCache, tail: Tail, offset: int, replaced: Sequence[Segment]) -> list[Segment]:
    """Runs on the worker thread; returns the segments that are gone, files and all. Among them are those `replaced`
    that reach behind the offset: what is in the log hid their files from a start, and will not any more."""
    if tail.next_offset <= offset:
        _begin_active(tail, offset)
        return []
    with ExitStack() as held:
        try:  # what loses its name has to lose it for good, and to find no descriptor then is too late for a no
            held.enter_context(files.folder_held(tail.folder))
        except OSError as error:
            if error.errno not in NO_FILES:
                raise
            raise DiskFull(f"{tail.folder} cannot be cut back now: {error}") from error
        return _cut(files, tail, offset, replaced)


def _cut(files: FileCache, tail: Tail, offset: int, replaced: Sequence[Segment]) -> list[Segment]:
    kept = [segment for segment in tail.segments if segment.base < offset]
    gone = [segment for segment in tail.segments if segment.base >= offset]
    copy = None
    if kept and kept[-1].next_offset > offset:
        copy = _copy(files, kept[-1], offset, tail.settings.index_interval)
    hidden = [segment for segment in replaced if segment.next_offset > offset]
    for segment in (*hidden, *reversed(gone)):
        _unlink(files, segment)
    tail.writer = None
    if copy is not None:
        files.disk.rename(copy.path() + paths.UNFINISHED, copy.path())
        files.sync_folder(tail.folder)
        # For good, while the intention stands: it holds what was cut off, and would be read if the copy went first.
        _unlink(files, kept[-1])
        gone.append(kept.pop())
        kept.append(copy)
    tail.segments = tuple(kept)
    _begin_active(tail, offset)
    return [*gone, *hidden]


def _begin_active(tail: Tail, offset: int) -> None:
    """Recovery knows the segments before the active one as synced, gaps and all, so there has to be one."""
    if tail.writer is None and (tail.segments or offset):
        tail.roll(offset)


def _shortened(batch: bytearray | None, info: BatchInfo, offset: int) -> bytearray | None:
    """A batch filtered for compaction still says how far it reached; one that is cut must not."""
    if batch is None:
        return None
    struct.pack_into(">i", batch, LAST_OFFSET_DELTA_AT, offset - 1 - info.base_offset)
    struct.pack_into(">I", batch, CRC_AT, crc32c(memoryview(batch)[ATTRIBUTES_AT:]))
    return batch


def _unlink(files: FileCache, segment: Segment) -> None:
    _forget(files, segment)
    files.sync_folder(segment.folder)


def _forget(files: FileCache, segment: Segment) -> None:
    files.forget(segment.paths)
    for path in (*segment.paths, segment.path() + paths.UNFINISHED):
        if files.disk.exists(path):
            files.disk.unlink(path)


def _copy(files: FileCache, old: Segment, offset: int, interval: int) -> Segment:
    """What lies before offset, synced and sealed, under a name that is not final yet."""
    target = Segment(old.folder, old.base, old.generation + 1)
    walker = index.Walker(old.base, interval)
    _forget(files, target)
    try:
        _write_before(files, old, offset, walker, target.path() + paths.UNFINISHED)
        seal = seal_of(walker, offset)
        write_atomically(files.disk, target.path(paths.SEAL), seal.pack())
        files.write_derived(target.path(paths.INDEX), walker.index, 0)
        files.write_derived(target.path(paths.TIME_INDEX), walker.time_index, 0)
    except OSError as error:
        _forget(files, target)
        if error.errno in NO_ROOM + NO_FILES:
            raise DiskFull(f"{old.folder} cannot be cut back now: {error}") from error
        raise
    return Segment.sealed(old.folder, target.generation, seal)


def _write_before(files: FileCache, old: Segment, offset: int, walker: index.Walker, path: str) -> None:
    file = files.disk.open(path, create=True, exclusive=True)
    try:
        for data, info in batches(files, old):
            if info.base_offset >= offset:
                break
            whole: bytes | bytearray | memoryview | None = data[info.position : info.position + info.size]
            if info.last_offset >= offset:
                whole = _shortened(codec.filter_batch(data, info, range(info.base_offset, offset)), info, offset)
            if whole is not None:
                files.disk.pwrite(file, [whole], walker.position)
                walker.walk(whole)
        files.disk.sync(file)
    finally:
        files.disk.close(file)
