"""A view: one log read as a queue. Keeps which offsets are settled, in flight or returned, and which is next.

Everything is kept as ranges, so memory does not grow with the backlog. Settled ranges are saved in the state table with
the next flush. `reserved` is the offset that deliveries may have reached; it is saved ahead in blocks, so that after a
crash every message that may have been delivered gets the redelivered flag.
"""

import asyncio
from collections.abc import Callable
from typing import NamedTuple, cast

from headrace.broker.queues.delivery_counts import DeliveryCounts
from headrace.broker.queues.flush import FlushCoordinator
from headrace.broker.queues.publish_batch import CachedRoute, PublishBatch
from headrace.broker.queues.view_reader import Run, ViewReader
from headrace.broker.queues.view_state import Delta, decode_settles
from headrace.broker.streams.partition import Partition
from headrace.broker.types.aborted_ranges import Aborts
from headrace.broker.types.range_set import RangeSet
from headrace.log.log import Log
from headrace.log.memory.memory_log import MemoryLog
from headrace.record.layout import MAX_OFFSET

RESERVE_MIN = 1024
RESERVE_MAX = 65_536


def _ignore() -> None: ...


class ViewEvents(NamedTuple):
    """Callbacks of a view's owner."""

    reserved: Callable[[], object] = _ignore  # deliveries may continue
    lost: Callable[[], object] = _ignore  # messages were deleted before they were settled
    moves_failed: Callable[[], object] = _ignore  # messages that were to move elsewhere are back: time to retry


class View:
    """Owned by one queue or delay log; used on the event-loop thread."""

    def __init__(
        self,
        log: Log | MemoryLog,
        flushes: FlushCoordinator,
        events: ViewEvents,
        *,
        key: bytes = b"",
        durable: bool,
        saved: bytes | None = None,
        level: int = 0,
        compression: int = 0,
        aborted: Callable[[], Aborts] = Aborts,  # transactions of Kafka producers: their records are no messages
    ) -> None:
        self.log = log
        self.events = events
        self.key = key  # in the state table
        self.durable = durable
        self.level = level  # priority
        self._flushes = flushes
        state = decode_settles(saved)
        self.settled = state.settled
        self.counts = DeliveryCounts(state.counts)
        self.settled.add(0, log.start_offset)
        self.returned = RangeSet()
        self.next = self.low
        # Offsets appended after a crash are new, even if they lie within the old reservation.
        self.redelivered_below = min(state.reserved, log.visible_end)
        self.reserved = state.reserved if durable else MAX_OFFSET
        self._reserving = 0  # like `reserved`, but not durable yet
        self._reserve_block = RESERVE_MIN
        self._reservation_waiters: list[asyncio.Future[None]] = []
        self._unsaved = RangeSet()
        self._moving = RangeSet()  # settled together with a publish elsewhere, and undone if that is refused
        self._leaving = RangeSet()  # of a log in memory: moving and not yet known to be stored elsewhere
        self.reader = ViewReader(log, aborted)
        self._compression = compression
        self.batch: PublishBatch | None = None  # waits for the next flush
        self.in_flight: list[PublishBatch] = []  # of flushes that have not ended

    @property
    def partition(self) -> Partition:
        """The port through which listeners see the log."""
        return Partition(self.level, cast("Log", self.log))  # a log in memory has the part of it that is used

    # Counting.

    @property
    def low(self) -> int:
        """Every offset below is settled."""
        first = self.settled.first()
        return first[1] if first is not None and first[0] == 0 else 0

    @property
    def ready(self) -> int:
        start, end = self.log.start_offset, self.log.stable_end
        returned = len(self.returned) - self.returned.count(0, start)
        start = max(self.next, start)
        if start >= end:
            return returned
        return int(end - start - self.settled.count(start, end) + returned)

    @property
    def out(self) -> int:
        """Number of messages in flight: delivered and not settled."""
        start = self.log.start_offset
        if self.next <= start:
            return 0
        return int(self.next - start - self.settled.count(start, self.next) - self.returned.count(start, self.next))

    @property
    def has_ready(self) -> bool:
        return bool(self.returned) or self.next < self.log.stable_end

    # Writing.

    def open_batch(self, target: CachedRoute | None = None) -> PublishBatch:
        """The batch that waits for the next flush. A target that caches its writer is reset then."""
        batch, flushes = self.batch, self._flushes
        if batch is None:
            batch = self.batch = PublishBatch(self._compression, durable=self.durable)
            flushes.mark_dirty(self)
        elif flushes.atomic.depth:
            flushes.join_atomic_group(self)
        if target is not None:
            batch.targets.append(target)
        elif flushes.opened is not None:
            flushes.opened.add(batch)
        return batch

    def take_batch(self) -> PublishBatch | None:
        """The closed batch, if anything was published since the last call."""
        batch, self.batch = self.batch, None
        if batch is not None:
            batch.close()
        return batch

    @property
    def pending_records(self) -> int:
        """Records that wait for a flush or are being stored."""
        waiting = self.batch.open_records if self.batch is not None else 0
        return waiting + sum(batch.unstored_records for batch in self.in_flight)

    # Choosing what to deliver.

    def follow_start(self) -> None:
        """Skip messages that a user or the topic's retention has deleted before they were settled."""
        start = self.log.start_offset
        first = self.returned.first()
        if start <= self.low and (first is None or first[0] >= start):
            return
        self.settled.add(0, start)
        self.returned.remove(0, start)
        self.counts.forget(0, start)
        self.next = max(self.next, start)
        self.events.lost()

    def next_run(self) -> Run | None:
        """The next offsets to deliver: returned ones first, then the log in order. None if there are none, or if the
        reservation has to be saved first; events.reserved is called then."""
        self.follow_start()
        first = self.returned.first()
        if first is not None:
            return Run(first[0], first[1], MAX_OFFSET, True)
        end = self.log.stable_end
        gap = self.settled.gap(self.next, end)
        if gap is None:
            self.next = max(self.next, end)
            return None
        self.next = gap[0]
        if self.next + self._reserve_block // 2 >= self.reserved:
            self._reserve()
        end = min(gap[1], self.reserved)
        if self.next >= end:
            self._reserve_block = min(self._reserve_block * 2, RESERVE_MAX)
            return None
        return Run(self.next, end, self.redelivered_below, False)

    def next_run_unreserved(self) -> Run | None:
        """Like next_run, for messages that do not go to a consumer: basic.get, purge, expiry.

        After a crash, a message that was fetched and not settled may lack its redelivered flag.
        """
        self.follow_start()
        first = self.returned.first()
        if first is not None:
            return Run(first[0], first[1], MAX_OFFSET, True)
        gap = self.settled.gap(self.next, self.log.stable_end)
        if gap is None:
            self.next = max(self.next, self.log.stable_end)
            return None
        self.next = gap[0]
        return Run(gap[0], gap[1], self.redelivered_below, False)

    def advance(self, run: Run, to: int) -> None:
        """[run.start, to) has been delivered, or settled on the way."""
        if run.returned:
            self.returned.remove(run.start, to)
        else:
            assert to >= self.next
            self.next = to
            if self.next >= self.log.stable_end:
                self.reader.release_chunk()

    def reserve_past(self, offset: int) -> None:
        if offset >= self.reserved:
            self._reserve()

    async def reserve_next(self) -> None:
        """Wait until the reservation for one more basic.get is durable, or was refused."""
        self.follow_start()
        if self.durable and not self.returned and self.reserved <= self.next < self.log.stable_end:
            self._reserve()
            waiter = asyncio.get_running_loop().create_future()
            self._reservation_waiters.append(waiter)
            await waiter

    def release_waiters(self) -> None:
        waiters, self._reservation_waiters = self._reservation_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _reserve(self) -> None:
        wanted = self.next + self._reserve_block
        if wanted > max(self._reserving, self.reserved):
            self._reserving = wanted
            self._flushes.mark_unsaved(self)

    # Settling.

    def settle(self, start: int, end: int) -> None:
        if not self.settled.add(start, end):
            return
        if self._flushes.atomic.depth:
            self._flushes.settle_in_atomic(self, start, end)
        else:
            self.settle_for_good(start, end)

    def settle_for_good(self, start: int, end: int) -> None:
        """Settles that depend on nothing else; of a durable view they are retried until they are saved."""
        if self.durable:
            self._unsaved.add(start, end)
            self._flushes.mark_unsaved(self)
        else:
            self._forget(start, end)

    def settle_if_stored(self, start: int, end: int) -> None:
        """Settles of messages that move to a durable queue: `put_back` undoes them if the disk refuses."""
        self._moving.add(start, end)
        if not self.durable:
            self._leaving.add(start, end)
        self._flushes.mark_unsaved(self)

    def _forget(self, start: int, end: int) -> None:
        """Drop settled records of a log in memory, except those that may be put back."""
        self.counts.forget(start, end)
        assert isinstance(self.log, MemoryLog), "settled records of a stored log are reclaimed in the background"
        first = self._leaving.first()
        self.log.drop_below(min(self.low, first[0]) if first is not None else self.low)

    def count_return(self, offset: int) -> int:
        """How often the message has been returned, including now."""
        count = self.counts.add(offset)
        if self.durable:
            self._flushes.mark_unsaved(self)
        return count

    def give_back(self, start: int, end: int) -> None:
        """Deliver these again, at their old place and before new messages."""
        self.returned.add(start, end)

    # Saving.

    def take_unsaved(self, *, exact: bool = False) -> Delta:
        reserved = self.next if exact else max(self._reserving, self.reserved)
        delta = Delta(self._unsaved, self._moving, reserved, exact, self.counts.take_unsaved())
        self._unsaved, self._moving = RangeSet(), RangeSet()
        return delta

    def put_back(self, delta: Delta) -> None:
        """The delta was refused: keep its settles for the next flush, and return the messages that were to move."""
        self._reserving = self.reserved
        self.release_waiters()
        self.counts.put_back(delta.counts)
        for start, end in delta.settled:
            self._unsaved.add(start, end)
        for start, end in delta.moving:
            self.settled.remove(start, end)
            self.returned.add(start, end)
            self._leaving.remove(start, end)

    def saved(self, delta: Delta) -> None:
        """The delta is durable."""
        if not self.durable:
            for start, end in delta.moving:
                self._leaving.remove(start, end)
                self._forget(start, end)
            return
        if self.counts:
            for ranges in (delta.settled, delta.moving):
                for start, end in ranges:
                    self.counts.forget(start, end)
        may_continue = delta.reserved > self.reserved
        self.reserved = max(self.reserved, delta.reserved)
        self.release_waiters()
        if may_continue:
            self.events.reserved()


def stored_log(view: View) -> Log:
    """The log of a durable view."""
    assert isinstance(view.log, Log), "a log in memory has no segments"
    return view.log
