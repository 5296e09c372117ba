"""The start offset of a log: moved by retention and by the deletion of records.

The new start is durable before a segment is removed. If a pin is set while a move is in progress, retention gives way
to it, by another move that is in the journal before the pin is.
"""

from collections.abc import Callable

from headrace.errors import DiskFull, OffsetOutOfRange
from headrace.log.commit.atomic_group import AtomicGroup
from headrace.log.commit.committer import Committer
from headrace.log.commit.round import Ticket
from headrace.log.disk.disk import Disk
from headrace.log.disk.file_cache import NO_FILES, NO_ROOM
from headrace.log.disk.workers import Worker
from headrace.log.log import Log
from headrace.log.maintenance.jobs import Retries, ShardHealth
from headrace.log.maintenance.removal import SegmentRemoval
from headrace.log.maintenance.retention import RetentionLimits, new_start
from headrace.log.segments.segment import Segment
from headrace.log.state.tables import STARTS


class StartOffsets:
    def __init__(
        self,
        disk: Disk,
        worker: Worker,
        committer: Committer,
        group: Callable[[], AtomicGroup],
        removal: SegmentRemoval,
        retries: Retries,
        health: ShardHealth,
    ) -> None:
        self._disk = disk
        self._worker = worker
        self._committer = committer
        self._group = group
        self._removal = removal
        self._retries = retries
        self._health = health
        self._moving: dict[int, list[tuple[int, Ticket]]] = {}  # log id -> moves in progress, in the journal's order
        self._deleted: dict[int, int] = {}  # log id -> the highest of them that a user asked for

    def apply_retention(self, log: Log, now_ms: int) -> Ticket | None:
        """Drop segments that exceed the log's age or size limit. None when there are none."""
        limits = RetentionLimits.of(log.settings, log.pins.values())

        def last_ms(segment: Segment) -> int:
            """As in Kafka, records without a timestamp are as old as their file."""
            if segment.max_timestamp >= 0:
                return segment.max_timestamp
            try:
                return segment.source.modified_ms(self._disk, segment)
            except OSError:
                return now_ms  # keep it for now

        start = new_start(log.segments, limits, log.start_offset, log.visible_end, now_ms, last_ms=last_ms)
        return self.retire_before(log, start) if start > log.start_offset else None

    def retire_before(self, log: Log, offset: int) -> Ticket:
        """Move the start to an offset before which no record is needed. Segments wholly before it are removed once
        the move is durable; a pin that is set until then moves the start back."""
        if not log.start_offset <= offset <= log.visible_end:
            raise OffsetOutOfRange(offset, log.start_offset, log.visible_end)
        moving = self._moving.get(log.id)
        if moving is not None and moving[-1][0] >= offset:
            return moving[-1][1]  # a later move must not move the start back, and an equal one adds nothing
        return self._move(log, offset)

    def delete_before(self, log: Log, offset: int) -> Ticket:
        """Like `retire_before`, but on a user's request, so pins are ignored."""
        ticket = self.retire_before(log, offset)
        self._deleted[log.id] = max(offset, self._deleted.get(log.id, 0))
        return ticket

    def give_way(self, log: Log) -> None:
        """A pin was set and is about to be stored: move the start back if retention's move in progress would pass it,
        so that the pin holds once it is confirmed."""
        if log.id not in self._moving or not log.pins:
            return
        needed = min(log.pins.values())
        start = max((segment.base for segment in log.segments if segment.base <= needed), default=0)
        start = max(start, log.start_offset, self._deleted.get(log.id, 0))
        if start < self._moving[log.id][-1][0]:
            self._move(log, start)

    def _move(self, log: Log, offset: int) -> Ticket:
        group = self._group()
        group.put(STARTS, log.id.to_bytes(8, "big"), offset.to_bytes(8, "big"))
        ticket = group.commit()
        self._moving.setdefault(log.id, []).append((offset, ticket))
        ticket.add_callback(lambda done: self._moved(log, offset, done))
        return ticket

    def _moved(self, log: Log, offset: int, done: Ticket) -> None:
        moving = self._moving[log.id]
        moving.remove((offset, done))
        # Never beyond a later move in the journal: recovery would take a missing segment for damage.
        start = min([offset, *(later for later, _ in moving)])
        if not moving:
            del self._moving[log.id]
            self._deleted.pop(log.id, None)
        if done.error is None:
            self._drop_before(log, start)
        elif isinstance(done.error, DiskFull):
            # The move back for a pin may be refused while the move before it is durable: store the start again.
            self._retries.add(lambda: self._store_again(log))

    def _store_again(self, log: Log) -> None:
        if not log.is_closed and log.id not in self._moving and self._health.failure is None:
            self._move(log, log.start_offset)

    def _drop_before(self, log: Log, offset: int) -> None:
        """The start is durable: apply it, and retire the segments wholly before it."""
        if log.is_closed:
            return
        log.start_offset = max(log.start_offset, offset)

        def drop() -> tuple[list[Segment], bool]:
            tail = log.tail
            has_room = True
            if tail.segments and offset >= tail.next_offset and tail.writer is not None and tail.writer.position:
                try:
                    tail.roll(tail.next_offset)  # even the active segment is dropped; the new one keeps the end
                except OSError as error:
                    if error.errno not in NO_ROOM + NO_FILES:
                        raise
                    has_room = False
            gone = [
                s for s, following in zip(tail.segments, tail.segments[1:], strict=False) if following.base <= offset
            ]
            tail.segments = tail.segments[len(gone) :]
            self._committer.publish_ends(log)
            return gone, has_room

        def dropped(result: tuple[list[Segment], bool] | None, error: BaseException | None) -> None:
            gone, has_room = result or ([], True)
            if not has_room:  # a full disk needs retention most: drop now what needs no new file, the rest later
                self._retries.add(lambda: self._drop_before(log, offset))
            if error is not None:
                self._health.fail(error)
            else:
                self._removal.retire(log, gone)

        self._worker.submit(drop, dropped)
