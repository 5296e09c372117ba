"""The flush: passes everything published and settled since the last one to the log, for all connections together.

Publishes gather in the batches of their views. A flush appends the batches to the logs and waits for the tickets.
Publishes that arrive meanwhile form the next flush, which starts when the tickets have resolved: a queue thus gets one
batch per round, however many connections publish. Views in memory are flushed in every event-loop iteration. Changes
that must happen together (a dead letter and the settle of its original, a transaction) are made between begin_atomic
and end_atomic and become one atomic group of the log.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.broker.queues.view_state import SETTLE_TABLE, Delta
from headrace.broker.types.publish_tracker import PartialFlush, PublishTracker, Trackers
from headrace.errors import HeadraceError, LogClosed

if TYPE_CHECKING:
    from headrace.broker.queues.view import View

logger = logging.getLogger("headrace.broker")

WAITING_BYTES_MAX = 1 << 20  # more does not wait for the running round: the log can already prepare it
RETRY_S = 1.0
Waiter = Callable[[HeadraceError | None], object]
Deltas = Sequence[tuple["View", Delta]]


class _Group(NamedTuple):
    """Batches and settles that become one atomic group, in the order they were made."""

    batches: list[tuple["View", bytearray]]
    deltas: Deltas
    trackers: Trackers


def _take_group(dirty: Sequence["View"], unsaved: Iterable["View"]) -> _Group:
    deltas = [(view, view.take_unsaved()) for view in unsaved]
    trackers = Trackers().union(*(view.trackers for view in dirty))
    return _Group([(view, batch) for view in dirty for batch in view.take_batches()], deltas, trackers)


class _AtomicSection:
    """Changes made between begin_atomic and end_atomic, and those of earlier sections that wait for the flush."""

    __slots__ = ("closed_groups", "depth", "settles", "stores", "views")

    def __init__(self) -> None:
        self.depth = 0
        self.stores = False  # this section has published to a durable view
        self.settles: list[tuple[View, int, int]] = []  # of this section
        self.views: set[View] = set()  # of all sections since the last closed group
        self.closed_groups: list[_Group] = []

    def take_views(self) -> set["View"]:
        views, self.views = self.views, set()
        return views


class _Flush:
    """The parts of one flush and the waiters for all of them."""

    __slots__ = ("ended_parts", "running", "waiters")

    def __init__(self, waiters: list[Waiter]) -> None:
        self.waiters = waiters
        self.running = 1  # the coordinator holds one until all parts are staged: a ticket may resolve at once
        self.ended_parts: list[_Part] = []

    @property
    def was_refused(self) -> bool:
        return any(part.error is not None for part in self.ended_parts)

    @property
    def outcome(self) -> HeadraceError | None:
        parts = self.ended_parts
        errors = [part.error for part in parts if part.error is not None]
        if not errors or len(errors) == len(parts):
            return errors[0] if errors else None
        stored = (part.trackers for part in parts if part.error is None)
        refused = (part.trackers for part in parts if part.error is not None)
        refusing = frozenset(view for part in parts if part.error is not None for view in part.views)
        return PartialFlush(errors[0], Trackers().union(*stored), Trackers().union(*refused), refusing)


class _Part:
    """One batch or one atomic group of a flush, which the log stores or refuses as a whole.

    Is itself the callback of its ticket. Its views are updated when this part has ended, before the flush has.
    """

    __slots__ = ("_coordinator", "_deltas", "_flush", "_in_flight", "error", "trackers", "views")

    def __init__(
        self,
        coordinator: "FlushCoordinator",
        flush: _Flush,
        batches: Sequence[tuple["View", bytearray]],
        trackers: Trackers,
        deltas: Deltas = (),
    ) -> None:
        self._coordinator = coordinator
        self._flush = flush
        self._deltas = deltas
        self._in_flight = [(view, view.pending.mark_in_flight((batch,))) for view, batch in batches]
        self.views = [view for view, _ in batches]
        self.trackers = trackers
        self.error: HeadraceError | None = None

    def stage(self, stage: Callable[[], Any]) -> None:
        """`stage` passes the part to the log and returns its ticket."""
        try:
            ticket = stage()
        except HeadraceError as error:
            self.ended(error)
            return
        self._flush.running += 1
        ticket.add_callback(self)

    def __call__(self, ticket: Any) -> None:
        self.ended(ticket.error)
        self._coordinator.part_ended(self._flush)

    def ended(self, error: HeadraceError | None) -> None:
        if isinstance(error, LogClosed) and self.views and all(view.log.is_deleted for view in self.views):
            # All its queues were deleted meanwhile: not an error, as if no queue had been bound. Other parts of the
            # flush must not fail because of it.
            error = None
        self.error = error
        self._flush.ended_parts.append(self)
        for view, count in self._in_flight:
            view.pending.round_ended(count)
        if error is None:
            self._coordinator.refusing.difference_update(self.views)
            for view, delta in self._deltas:
                view.saved(delta)
        else:
            self._coordinator.refusing.update(self.views)
            self._coordinator.put_back(self._deltas)


async def _raise_outcome(future: "asyncio.Future[HeadraceError | None]") -> None:
    error = await future
    if error is not None:
        raise error


class FlushCoordinator:
    """Owned by the broker's vhosts, used on the event-loop thread."""

    def __init__(self, shard: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._shard = shard
        self._loop = loop or asyncio.get_running_loop()
        self._dirty: list[View] = []
        self._dirty_memory: list[View] = []
        self._unsaved: dict[View, None] = {}  # in the order they changed
        self._atomic = _AtomicSection()
        self._waiters: list[Waiter] = []
        self._settle_waiters: list[Waiter] = []
        self._running: deque[_Flush] = deque()  # waiters are notified in this order: a confirm covers all before it
        self._outstanding = 0  # flushes that have not ended, including those of settles alone
        self._was_refused = False  # a part of the flushes since the coordinator was last idle
        self._is_scheduled = False
        self._is_closed = False
        self.in_atomic = False
        self.tracker: PublishTracker | None = None  # of the publishes being made now
        self.refusing: set[View] = set()  # whose log refused the last append
        self.flush_count = 0

    # Called by views.

    def mark_dirty(self, view: "View") -> None:
        """The view has begun a batch."""
        (self._dirty if view.durable else self._dirty_memory).append(view)
        if self.in_atomic:
            self.join_atomic_group(view)
        self.schedule()

    def mark_unsaved(self, view: "View") -> None:
        """The view has a delta to save."""
        self._unsaved[view] = None
        self.schedule()

    def join_atomic_group(self, view: "View") -> None:
        """The view's batch belongs to the atomic group of the next flush."""
        if view.durable:
            self._atomic.views.add(view)
            self._atomic.stores = True

    def settle_in_atomic(self, view: "View", start: int, end: int) -> None:
        """A settle between begin_atomic and end_atomic; end_atomic decides whether it depends on a publish."""
        self._atomic.settles.append((view, start, end))

    # Atomic changes.

    def begin_atomic(self) -> None:
        """Until end_atomic, publishes and settles are stored together or not at all."""
        self._atomic.depth += 1
        self.in_atomic = True

    def end_atomic(self) -> None:
        """Changes since begin_atomic stay together; later ones may go into another group.

        A large group is closed here: journal entries have a maximum size, and if everything that expires at the same
        time were one group, it could never be stored.
        """
        atomic = self._atomic
        atomic.depth -= 1
        if atomic.depth:
            return
        self.in_atomic = False
        self._join_settles()
        if sum(view.pending.size_bytes for view in atomic.views) > self._group_bytes_max:
            atomic.closed_groups.append(self._take_group_of(atomic.take_views()))

    def _join_settles(self) -> None:
        atomic = self._atomic
        settles, atomic.settles = atomic.settles, []
        stores, atomic.stores = atomic.stores, False
        for view, start, end in settles:
            if stores:
                atomic.views.add(view)
                view.settle_if_stored(start, end)
            else:  # only queues in memory were published to, which cannot fail
                view.settle_for_good(start, end)

    @property
    def _group_bytes_max(self) -> int:
        return min(WAITING_BYTES_MAX, int(self._shard.journal.capacity) // 4)  # the log accepts half of the capacity

    def _take_group_of(self, views: set["View"]) -> _Group:
        dirty = [view for view in self._dirty if view in views]
        unsaved = [view for view in self._unsaved if view in views]
        self._dirty = [view for view in self._dirty if view not in views]
        self._unsaved = {view: None for view in self._unsaved if view not in views}
        return _take_group(dirty, unsaved)

    # Waiting.

    def after(self, waiter: Waiter) -> None:
        """Call the waiter once everything published so far is durable or was refused. Its argument is the error of
        the whole flush: pass it through PublishTracker.outcome."""
        self._waiters.append(waiter)
        self.schedule()

    @contextmanager
    def tracking(self, tracker: PublishTracker) -> Iterator[None]:
        """Publishes made inside belong to the tracker."""
        before, self.tracker = self.tracker, tracker
        try:
            yield
        finally:
            self.tracker = before
            tracker.detach()

    async def wait_stored(self, tracker: PublishTracker) -> None:
        """Wait until the tracker's publishes are durable; raises if one of them was refused."""
        error = tracker.outcome(await self._future_in(self._waiters))
        if error is not None:
            raise error

    async def wait_flushed(self) -> None:
        """Wait until everything published so far is durable or was refused."""
        await self._future_in(self._waiters)

    async def wait_all_durable(self) -> None:
        """Wait until everything published so far, and settled together with it, is durable; raises otherwise."""
        await _raise_outcome(self._future_in(self._waiters))

    async def wait_settles_stored(self) -> None:
        """Wait until everything settled so far is durable, even if publishes are refused. Without a waiter, settles
        are synced later than publishes."""
        published, settled = self._future_in(self._waiters), self._future_in(self._settle_waiters)
        await published
        await _raise_outcome(settled)

    def _future_in(self, waiters: list[Waiter]) -> "asyncio.Future[HeadraceError | None]":
        future = self._loop.create_future()

        def done(error: HeadraceError | None) -> None:
            if not future.done():
                future.set_result(error)

        waiters.append(done)
        self.schedule()
        return future

    # The flush.

    def schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self.flush)

    def flush(self) -> None:
        self._is_scheduled = False
        self.flush_memory()
        closed_groups = self._atomic.closed_groups
        if not (self._dirty or self._unsaved or self._waiters or closed_groups):
            return
        waiting_bytes = sum(view.pending.size_bytes for view in self._dirty)
        if self._outstanding and waiting_bytes < WAITING_BYTES_MAX and not closed_groups:
            return  # the end of the running flush starts the next one
        self._flush_disk()

    def flush_memory(self) -> None:
        if self._dirty_memory:
            views, self._dirty_memory = self._dirty_memory, []
            for view in views:
                for batch in view.take_batches():
                    try:
                        view.log.append(batch)
                    except Exception as error:  # later batches and other queues must still be flushed
                        logger.error("a callback after a publish failed: %s", error, exc_info=error)

    def _flush_disk(self) -> None:
        self.flush_count += 1
        flush = _Flush(self._waiters)
        self._running.append(flush)
        self._waiters = []
        groups, self._atomic.closed_groups = self._atomic.closed_groups, []
        atomic_views = self._atomic.take_views()
        if atomic_views:
            groups.append(self._take_group_of(atomic_views))
        dirty, self._dirty = self._dirty, []
        unsaved, self._unsaved = self._unsaved, {}
        self._outstanding += 1
        for group in groups:
            if group.batches or group.deltas:  # else its queues have been deleted
                self._stage_group(flush, group)
        for view in dirty:
            trackers = frozenset(view.trackers)
            for batch in view.take_batches():
                _Part(self, flush, ((view, batch),), trackers).stage(partial(view.log.append, batch))
        if unsaved or self._settle_waiters:
            self._stage_settles(_take_group((), unsaved))
        self._shard.begin_round()  # everything is staged; later publishes wait for the end of this flush anyway
        self.part_ended(flush)

    def _stage_settles(self, group: _Group) -> None:
        """Settles that depend on no publish are a flush of their own, so that waiters for publishes ignore them."""
        waiters, self._settle_waiters = self._settle_waiters, []
        flush = _Flush(waiters)
        self._outstanding += 1
        if group.deltas:
            self._stage_group(flush, group, is_awaited=bool(waiters))
        self.part_ended(flush)

    def _stage_group(self, flush: _Flush, group: _Group, *, is_awaited: bool = True) -> None:
        batches = [(view, batch) for view, batch in group.batches if not view.log.is_deleted]
        deltas = group.deltas
        # A power cut may lose acks, but never a reservation: messages that are delivered again must be flagged.
        lazy = not is_awaited and all(delta.reserved <= view.reserved for view, delta in deltas)
        saved = [(view, delta) for view, delta in deltas if view.durable]
        if not batches and not saved:  # the queues that its messages went to have been deleted
            for view, delta in deltas:
                view.saved(delta)
            return

        def stage() -> Any:
            stored = self._shard.group()
            for view, batch in batches:
                stored.append(view.log, batch)
            for view, delta in saved:
                stored.merge(SETTLE_TABLE, view.key, delta.encode())
            return stored.commit(lazy=lazy)

        _Part(self, flush, batches, group.trackers, deltas).stage(stage)

    def put_back(self, deltas: Deltas) -> None:
        """A group was refused: its settles wait for the next flush."""
        for view, delta in deltas:
            view.put_back(delta)
            if view.durable:
                self._unsaved[view] = None
            if delta.moving:
                self._loop.call_later(RETRY_S, view.events.moves_failed)  # later, because the disk is probably full

    def part_ended(self, flush: _Flush) -> None:
        """One part of the flush has ended; notifies the waiters after the last one."""
        flush.running -= 1
        if flush.running:
            return
        self._outstanding -= 1
        self._was_refused |= flush.was_refused
        if flush not in self._running:  # a flush of settles alone
            self._notify(flush)
        while self._running and not self._running[0].running:
            self._notify(self._running.popleft())
        if self._is_closed or self._outstanding:
            return
        refused, self._was_refused = self._was_refused, False
        if self._dirty or self._waiters or self._atomic.closed_groups or (self._unsaved and not refused):
            self.schedule()
        elif refused:
            self._loop.call_later(RETRY_S, self.schedule)  # retries the settles; the disk is probably full

    @staticmethod
    def _notify(flush: _Flush) -> None:
        outcome = flush.outcome
        for waiter in flush.waiters:
            try:
                waiter(outcome)
            except Exception as error:  # the other waiters must be notified, and the next flush started
                logger.error("a callback after a flush failed: %s", error, exc_info=error)

    # Ending.

    def forget(self, view: "View") -> None:
        """The view's queue has been deleted: write nothing more of it."""
        if view in self._dirty:
            self._dirty.remove(view)
        if view in self._dirty_memory:
            self._dirty_memory.remove(view)
        self._unsaved.pop(view, None)
        self.refusing.discard(view)
        atomic = self._atomic
        atomic.views.discard(view)
        atomic.closed_groups = [
            _Group(
                [pair for pair in group.batches if pair[0] is not view],
                [pair for pair in group.deltas if pair[0] is not view],
                group.trackers,
            )
            for group in atomic.closed_groups
        ]

    def close(self) -> None:
        self._is_closed = True
