"""Truncating a log: dropping its records from an offset on.

The intention is durable in the state before a file is touched, and withdrawn when all is done: a log that is found
shorter than it was is not damaged while the intention stands, and recovery finishes the truncation after a crash.

The records that stay of the segment that holds the offset are copied first, so that a full disk is noticed before
anything is changed. Then, newest first, later segments are removed, and the copy takes its place. The copy is sealed,
and the log continues in a new segment that begins at the offset. Compaction may have dropped the records right before
it: then no record shows where the log ends, but the seal does, and it is durable before the copy has its name. And the
last segment, the only one that is ever scanned for its end, has no gaps.
"""

import struct
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from headrace.errors import Conflict, DiskFull, OffsetOutOfRange
from headrace.log.commit.atomic_group import AtomicGroup
from headrace.log.commit.checkpoint import Checkpoints
from headrace.log.commit.committer import Committer
from headrace.log.commit.log_writer import Tail
from headrace.log.commit.round import Ticket
from headrace.log.commit.slots import Slots
from headrace.log.disk import paths
from headrace.log.disk.disk import write_atomically
from headrace.log.disk.file_cache import NO_FILES, NO_ROOM, FileCache
from headrace.log.disk.workers import Worker
from headrace.log.log import Log
from headrace.log.maintenance import abort_markers
from headrace.log.maintenance.jobs import Retries, ShardHealth
from headrace.log.maintenance.removal import SegmentRemoval
from headrace.log.segments import index
from headrace.log.segments.batches import batches
from headrace.log.segments.segment import SavedWriter, Segment, seal_of
from headrace.log.state.tables import ENDS, TRUNCATIONS
from headrace.record import codec
from headrace.record.batch.crc32c import crc32c
from headrace.record.layout import ATTRIBUTES_AT, CRC_AT, LAST_OFFSET_DELTA_AT
from headrace.record.types import BatchInfo

Done = Callable[[BaseException | None], object]


class _Truncated(NamedTuple):
    gone: list[Segment]
    writer: SavedWriter | None


class Truncations:
    """Truncations in progress. Owner thread only; the files are changed on the worker."""

    def __init__(
        self,
        files: FileCache,
        worker: Worker,
        checkpoints: Checkpoints,
        committer: Committer,
        slots: Slots,
        group: Callable[[], AtomicGroup],
        removal: SegmentRemoval,
        retries: Retries,
        busy: set[int],
        health: ShardHealth,
    ) -> None:
        self._files = files
        self._worker = worker
        self._checkpoints = checkpoints
        self._committer = committer
        self._slots = slots
        self._group = group
        self._removal = removal
        self._retries = retries
        self._busy = busy
        self._health = health

    def truncate(self, log: Log, offset: int, done: Done) -> None:
        """Drop the records from an offset on. Appends to this log are refused meanwhile.

        First a checkpoint, so that the journal holds none of the dropped records; then the intention; then the files.
        """
        if not log.start_offset <= offset <= log.visible_end:
            raise OffsetOutOfRange(offset, log.start_offset, log.visible_end)
        if log.id in self._busy or log.next_offset != log.visible_end:
            raise Conflict(f"log {log.id} is being written or rewritten: try again")
        self._busy.add(log.id)
        log.is_frozen = True

        def store_intention(error: BaseException | None) -> None:
            if error is not None:
                self._finished(log, error, done)
                return
            group = self._group()
            group.put(TRUNCATIONS, log.id.to_bytes(8, "big"), offset.to_bytes(8, "big"))
            group.commit().add_callback(lambda t: self._truncate(log, offset, t.error, done))

        self._checkpoints.run(done=store_intention)

    def finish(self, pending: Sequence[tuple[Log, int]]) -> None:
        """Carry out the truncations that a crash interrupted, before anything else happens to their logs."""
        for log, offset in pending:
            self._busy.add(log.id)
            log.is_frozen = True
            self._truncate(log, min(offset, log.visible_end), None, lambda _error: None)

    def _truncate(self, log: Log, offset: int, error: BaseException | None, done: Done) -> None:
        if error is not None:
            self._finished(log, error, done)
            return
        if self._removal.is_removing(log):
            self._retries.add(lambda: self._truncate(log, offset, None, done))
            return

        retired = self._removal.retired_of(log)

        def work() -> _Truncated:
            gone = truncate_files(self._files, log.tail, offset, retired)
            return _Truncated(gone, log.tail.saved_writer())

        self._worker.submit(work, lambda result, failed: self._truncated(log, offset, result, failed, done))

    def _truncated(
        self, log: Log, offset: int, result: _Truncated | None, error: BaseException | None, done: Done
    ) -> None:
        if isinstance(error, DiskFull) and self._health.failure is None:
            self._give_up(log, error, done)
            return
        if error is not None or result is None:
            self._health.fail(error or AssertionError("a truncation has a result or an error"))
            self._finished(log, self._health.failure, done)
            return
        log.next_offset = log.visible_end = log.durable_end = offset
        log.compacted_until = min(log.compacted_until, offset)
        log.forget_positions()
        log.epochs = [entry for entry in log.epochs if entry[1] < offset]
        self._removal.removed(result.gone)
        values = {ENDS: b"" if result.writer is None else result.writer.pack(), abort_markers.TABLE: b""}
        self._write_slot(log, lambda: self._withdraw(log, values, lambda error: self._finished(log, error, done)))

    def _write_slot(self, log: Log, then: Callable[[], None]) -> None:
        """Write and sync the slot while the intention stands: without it the old end would prove a loss."""

        def write() -> None:
            self._committer.publish_ends(log, must=True)
            self._slots.sync()

        def written(_result: object, error: BaseException | None) -> None:
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                self._retries.add(lambda: self._write_slot(log, then))
            elif error is not None:
                self._health.fail(error)
            else:
                then()

        self._worker.submit(write, written)

    def _give_up(self, log: Log, error: DiskFull, done: Done) -> None:
        """There is no space for the copy, and nothing was changed: withdraw the intention, then report the error."""
        self._withdraw(log, {}, lambda failed: self._finished(log, failed or error, done))

    def _withdraw(self, log: Log, values: dict[str, bytes], done: Done) -> None:
        """Remove the intention, durably, together with a change of other tables. On a full disk this is repeated, and
        the log stays frozen: while the intention stands, the next start would drop records appended behind it."""
        key = log.id.to_bytes(8, "big")
        group = self._group()
        for table, value in values.items():
            group.put(table, key, value) if value else group.delete(table, key)
        group.delete(TRUNCATIONS, key)

        def withdrawn(ticket: Ticket) -> None:
            if isinstance(ticket.error, DiskFull):
                self._retries.add(lambda: self._withdraw(log, values, done))
            else:
                done(ticket.error)

        group.commit().add_callback(withdrawn)

    def _finished(self, log: Log, error: BaseException | None, done: Done) -> None:
        self._busy.discard(log.id)
        log.is_frozen = False
        done(error)


def truncate_files(files: FileCache, tail: Tail, offset: int, retired: Sequence[Segment]) -> list[Segment]:
    """Runs on the worker thread; returns the segments whose files were removed. Among them are retired segments that
    reach past the offset: their replacements in the log hid them from a start, and no longer do."""
    if tail.next_offset <= offset:
        _begin_active(tail, offset)
        return []
    with ExitStack() as held:
        try:  # removals must be durable, and once a file is removed it is too late to find no descriptor for the sync
            held.enter_context(files.folder_held(tail.folder))
        except OSError as error:
            if error.errno not in NO_FILES:
                raise
            raise DiskFull(f"{tail.folder} cannot be truncated now: {error}") from error
        return _truncate_segments(files, tail, offset, retired)


def _truncate_segments(files: FileCache, tail: Tail, offset: int, retired: Sequence[Segment]) -> list[Segment]:
    kept = [segment for segment in tail.segments if segment.base < offset]
    gone = [segment for segment in tail.segments if segment.base >= offset]
    copy = None
    if kept and kept[-1].next_offset > offset:
        copy = _copy_before(files, kept[-1], offset, tail.settings.index_interval)
    hidden = [segment for segment in retired if segment.next_offset > offset]
    for segment in (*hidden, *reversed(gone)):
        _unlink_durably(files, segment)
    tail.writer = None
    if copy is not None:
        files.disk.rename(copy.path() + paths.UNFINISHED, copy.path())
        files.sync_folder(tail.folder)
        # Durably, while the intention stands: the old segment holds the dropped records, and would be read if the
        # copy was removed first.
        _unlink_durably(files, kept[-1])
        gone.append(kept.pop())
        kept.append(copy)
    tail.segments = tuple(kept)
    _begin_active(tail, offset)
    return [*gone, *hidden]


def _begin_active(tail: Tail, offset: int) -> None:
    """Begin a new active segment: recovery allows gaps only in the segments before it, which are known as synced."""
    if tail.writer is None and (tail.segments or offset):
        tail.roll(offset)


def _unlink_durably(files: FileCache, segment: Segment) -> None:
    _unlink(files, segment)
    files.sync_folder(segment.folder)


def _unlink(files: FileCache, segment: Segment) -> None:
    files.forget(segment.paths)
    segment.source.evict()
    segment.source.remove(files.disk, segment)  # what an archive refuses to remove is removed by a later start
    unfinished = segment.path() + paths.UNFINISHED
    if files.disk.exists(unfinished):
        files.disk.unlink(unfinished)


def _copy_before(files: FileCache, old: Segment, offset: int, interval: int) -> Segment:
    """Copy the records before an offset to a segment that is synced and sealed, under a temporary name."""
    target = Segment(old.folder, old.base, old.generation + 1)
    walker = index.Walker(old.base, interval)
    _unlink(files, target)
    try:
        _write_before(files, old, offset, walker, target.path() + paths.UNFINISHED)
        seal = seal_of(walker, offset)
        write_atomically(files.disk, target.path(paths.SEAL), seal.pack())
        files.write_derived(target.path(paths.INDEX), walker.index, 0)
        files.write_derived(target.path(paths.TIME_INDEX), walker.time_index, 0)
    except OSError as error:
        _unlink(files, target)
        if error.errno in NO_ROOM + NO_FILES:
            raise DiskFull(f"{old.folder} cannot be truncated now: {error}") from error
        raise
    return Segment.sealed(old.folder, target.generation, seal)


def _write_before(files: FileCache, old: Segment, offset: int, walker: index.Walker, path: str) -> None:
    file = files.disk.open(path, create=True, exclusive=True)
    try:
        for data, info in batches(files, old):
            if info.base_offset >= offset:
                break
            kept: bytes | bytearray | memoryview | None = data[info.position : info.position + info.size]
            if info.last_offset >= offset:
                kept = _shortened(codec.filter_batch(data, info, range(info.base_offset, offset)), info, offset)
            if kept is not None:
                files.disk.pwrite(file, [kept], walker.position)
                walker.walk(kept)
        files.disk.sync(file)
    finally:
        files.disk.close(file)


def _shortened(batch: bytearray | None, info: BatchInfo, offset: int) -> bytearray | None:
    """Set the last offset of a filtered batch, which filtering leaves as it was, to the one before `offset`."""
    if batch is None:
        return None
    struct.pack_into(">i", batch, LAST_OFFSET_DELTA_AT, offset - 1 - info.base_offset)
    struct.pack_into(">I", batch, CRC_AT, crc32c(memoryview(batch)[ATTRIBUTES_AT:]))
    return batch
