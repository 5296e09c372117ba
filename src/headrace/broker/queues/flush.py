"""The flush: passes everything published and settled since the last one to the log, for all connections together.

Publishes gather in the batches of their views. A flush stages the batches in the logs; a TicketGroup reports when the
log has stored or refused all of them. Publishes that arrive meanwhile form the next flush, which starts then: a queue
thus gets one batch per round, however many connections publish. Views in memory are flushed in every event-loop
iteration. Changes that must happen together (a dead letter and the settle of its original, a transaction) are made
between begin_atomic and end_atomic and become one atomic group of the log.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from headrace.broker.queues.publish_batch import PublishBatch
from headrace.broker.queues.view_state import SETTLE_TABLE, Delta
from headrace.broker.streams.append import Appender
from headrace.errors import HeadraceError, LogClosed
from headrace.log.commit.round import Ticket, TicketGroup
from headrace.log.log import Log
from headrace.log.memory.memory_log import MemoryLog
from headrace.log.shard import Shard

if TYPE_CHECKING:
    from headrace.broker.queues.view import View

logger = logging.getLogger("headrace.broker")

WAITING_BYTES_MAX = 1 << 20  # more does not wait for the running round: the log can already prepare it
RETRY_S = 1.0
Waiter = Callable[[HeadraceError | None], object]
Deltas = Sequence[tuple["View", Delta]]


class _Group(NamedTuple):
    """Batches and settles that become one atomic group, in the order they were made."""

    batches: Sequence[tuple["View", PublishBatch]]
    deltas: Deltas


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


class _Staged(NamedTuple):
    """A group that the log stores or refuses as a whole: its ticket, or the error if it was refused at once."""

    group: _Group
    ticket: Ticket | None
    error: HeadraceError | None


class _Flush:
    """What one flush has staged, and the waiters for all of it."""

    __slots__ = ("batches", "error", "groups", "is_over", "tickets", "waiters")

    def __init__(self, waiters: list[Waiter], ended: Callable[["_Flush"], None]) -> None:
        self.waiters = waiters
        self.batches: list[tuple[View, PublishBatch]] = []  # that are in no group
        self.groups: list[_Staged] = []
        self.tickets = TicketGroup(partial(ended, self))
        self.error: HeadraceError | None = None  # the first one
        self.is_over = False

    def stage_group(self, group: _Group, shard: Shard, appender: Appender, *, lazy: bool = False) -> None:
        batches = [(view, batch) for view, batch in group.batches if not view.log.is_deleted]
        saved = [(view, delta) for view, delta in group.deltas if view.durable]
        ticket: Ticket | None = None
        error: HeadraceError | None = None
        if batches or saved:  # else its queues have been deleted
            try:
                stored = shard.group()
                for view, batch in batches:
                    log = view.log
                    assert isinstance(log, Log), "only durable views have groups"
                    batch.tickets += [appender.stage_in(stored, log, data) for data in batch.buffers]
                for view, delta in saved:
                    stored.merge(SETTLE_TABLE, view.key, delta.encode())
                ticket = stored.commit(lazy=lazy)
            except HeadraceError as refusal:
                error = refusal
        self.groups.append(_Staged(group, ticket, error))
        if ticket is not None:
            self.tickets.add(ticket)

    def batches_ended(
        self, batches: Sequence[tuple["View", PublishBatch]], error: HeadraceError | None, refusing: set["View"]
    ) -> HeadraceError | None:
        """Batches that were stored, or refused with the error, as a whole. Returns the error unless their queues are
        gone."""
        if isinstance(error, LogClosed) and batches and all(view.log.is_deleted for view, _ in batches):
            # All its queues were deleted meanwhile: not an error, as if no queue had been bound.
            error = None
        for view, batch in batches:
            batch.error = error
            (refusing.discard if error is None else refusing.add)(view)
        self.error = self.error or error
        return error

    def notify(self) -> None:
        for waiter in self.waiters:
            try:
                waiter(self.error)
            except Exception as error:  # the other waiters must be notified, and the next flush started
                logger.error("a callback after a flush failed: %s", error, exc_info=error)


def _take_batches(dirty: Iterable["View"]) -> list[tuple["View", PublishBatch]]:
    """Closes the batches of the views; they are in flight until the flush ends."""
    taken = []
    for view in dirty:
        batch = view.take_batch()
        if batch is not None:
            view.in_flight.append(batch)
            taken.append((view, batch))
    return taken


def _waiting_bytes(views: Iterable["View"]) -> int:
    return sum(view.batch.size_bytes for view in views if view.batch is not None)


async def _raise_outcome(future: "asyncio.Future[HeadraceError | None]") -> None:
    error = await future
    if error is not None:
        raise error


class FlushCoordinator:
    """Owned by the broker's vhosts, used on the event-loop thread."""

    def __init__(self, shard: Shard, appender: Appender) -> None:
        self._shard = shard
        self._appender = appender
        self._loop = asyncio.get_running_loop()
        self._dirty: list[View] = []
        self._dirty_memory: list[View] = []
        self._unsaved: dict[View, None] = {}  # in the order they changed
        self.atomic = _AtomicSection()
        self._waiters: list[Waiter] = []
        self._settle_waiters: list[Waiter] = []
        self._running: deque[_Flush] = deque()  # waiters are notified in this order: a confirm covers all before it
        self._outstanding = 0  # flushes that have not ended, including those of settles alone
        self._was_refused = False  # a part of the flushes since the coordinator was last idle
        self._is_scheduled = False
        self._is_closed = False
        self.opened: set[PublishBatch] | None = None  # collects the batches that publishes go to; see `collecting`
        self.refusing: set[View] = set()  # whose log refused the last append
        self.flush_count = 0

    # Called by views.

    def mark_dirty(self, view: "View") -> None:
        """The view has begun a batch."""
        (self._dirty if view.durable else self._dirty_memory).append(view)
        if self.atomic.depth:
            self.join_atomic_group(view)
        self.schedule()

    def mark_unsaved(self, view: "View") -> None:
        """The view has a delta to save."""
        self._unsaved[view] = None
        self.schedule()

    def join_atomic_group(self, view: "View") -> None:
        """The view's batch belongs to the atomic group of the next flush."""
        if view.durable:
            self.atomic.views.add(view)
            self.atomic.stores = True

    def settle_in_atomic(self, view: "View", start: int, end: int) -> None:
        """A settle between begin_atomic and end_atomic; end_atomic decides whether it depends on a publish."""
        self.atomic.settles.append((view, start, end))

    # Atomic changes.

    def begin_atomic(self) -> None:
        """Until end_atomic, publishes and settles are stored together or not at all."""
        self.atomic.depth += 1

    def end_atomic(self) -> None:
        """Changes since begin_atomic stay together; later ones may go into another group.

        A large group is closed here: journal entries have a maximum size, and if everything that expires at the same
        time were one group, it could never be stored.
        """
        atomic = self.atomic
        atomic.depth -= 1
        if atomic.depth:
            return
        self._join_settles()
        if _waiting_bytes(atomic.views) > self._group_bytes_max:
            atomic.closed_groups.append(self._take_group_of(atomic.take_views()))

    def _join_settles(self) -> None:
        atomic = self.atomic
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
        deltas = [(view, view.take_unsaved()) for view in unsaved]
        return _Group(_take_batches(dirty), deltas)

    # Waiting.

    def after(self, waiter: Waiter) -> None:
        """Call the waiter once everything published so far is durable or was refused. Its argument is None if nothing
        was refused, otherwise one of the errors: `PublishBatch.error` tells which batches were refused."""
        self._waiters.append(waiter)
        if not self._is_scheduled:
            self.schedule()

    @contextmanager
    def collecting(self) -> Iterator[set[PublishBatch]]:
        """The batches that publishes made inside go to."""
        before, self.opened = self.opened, set()
        try:
            yield self.opened
        finally:
            self.opened = before

    async def wait_stored(self, batches: Collection[PublishBatch]) -> None:
        """Wait until the batches are durable; raises if one of them was refused."""
        await self._future_in(self._waiters)
        for batch in batches:
            if batch.error is not None:
                raise batch.error

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
        if self._dirty_memory:
            self.flush_memory()
        closed_groups = self.atomic.closed_groups
        if not (self._dirty or self._unsaved or self._waiters or closed_groups):
            return
        if self._outstanding and not closed_groups and _waiting_bytes(self._dirty) < WAITING_BYTES_MAX:
            return  # the end of the running flush starts the next one
        self._flush_disk()

    def flush_memory(self) -> None:
        views, self._dirty_memory = self._dirty_memory, []
        for view in views:
            batch, log = view.take_batch(), view.log
            assert isinstance(log, MemoryLog), "durable views are flushed to the disk"
            for data in batch.buffers if batch is not None else ():
                try:
                    self._appender.append_transient(log, data)
                except Exception as error:  # later batches and other queues must still be flushed
                    logger.error("a callback after a publish failed: %s", error, exc_info=error)

    def _flush_disk(self) -> None:
        self.flush_count += 1
        flush = _Flush(self._waiters, self._flush_ended)
        self._running.append(flush)
        self._waiters = []
        groups, self.atomic.closed_groups = self.atomic.closed_groups, []
        if self.atomic.views:
            groups.append(self._take_group_of(self.atomic.take_views()))
        dirty, self._dirty = self._dirty, []
        unsaved, self._unsaved = self._unsaved, {}
        self._outstanding += 1
        for group in groups:
            flush.stage_group(group, self._shard, self._appender)
        flush.batches = _take_batches(dirty)
        self._appender.append_published(flush.batches, flush.tickets)
        if unsaved or self._settle_waiters:
            # After the messages, which may take several rounds: a consumer publishes its results before it acks, and a
            # crash that loses the results must not keep the ack.
            self._stage_settles(unsaved)
        # At once: everything is staged, and later publishes wait for the end of this flush anyway.
        self._shard.scheduler.start_round()
        flush.tickets.close()

    def _stage_settles(self, unsaved: Iterable["View"]) -> None:
        """Settles that depend on no publish are a flush of their own, so that waiters for publishes ignore them."""
        waiters, self._settle_waiters = self._settle_waiters, []
        flush = _Flush(waiters, self._flush_ended)
        self._outstanding += 1
        deltas = [(view, view.take_unsaved()) for view in unsaved]
        # A power cut may lose acks, but never a reservation: messages that are delivered again must be flagged.
        lazy = not waiters and all(delta.reserved <= view.reserved for view, delta in deltas)
        flush.stage_group(_Group((), deltas), self._shard, self._appender, lazy=lazy)
        flush.tickets.close()

    def _flush_ended(self, flush: _Flush) -> None:
        """The log has stored or refused everything that the flush staged."""
        is_unusual = flush.tickets.has_errors or bool(self.refusing)
        for view, batch in flush.batches:
            view.in_flight.remove(batch)
            if is_unusual or batch.error is not None:
                flush.batches_ended(((view, batch),), batch.first_error(), self.refusing)
            batch.release()
        for staged in flush.groups:
            self._group_ended(flush, staged)
        flush.is_over = True
        self._outstanding -= 1
        self._was_refused |= flush.error is not None
        if flush not in self._running:  # a flush of settles alone
            flush.notify()
        while self._running and self._running[0].is_over:
            self._running.popleft().notify()
        if self._is_closed or self._outstanding:
            return
        refused, self._was_refused = self._was_refused, False
        if self._dirty or self._waiters or self.atomic.closed_groups or (self._unsaved and not refused):
            self.schedule()
        elif refused:
            self._loop.call_later(RETRY_S, self.schedule)  # retries the settles; the disk is probably full

    def _group_ended(self, flush: _Flush, staged: _Staged) -> None:
        group, ticket, error = staged
        for view, batch in group.batches:
            view.in_flight.remove(batch)
            batch.release()
        if ticket is not None:
            error = ticket.error
        error = flush.batches_ended(group.batches, error, self.refusing)
        if error is not None:
            self._put_back(group.deltas)
            return
        for view, delta in group.deltas:
            view.saved(delta)

    def _put_back(self, deltas: Deltas) -> None:
        """A group was refused: its settles wait for the next flush."""
        for view, delta in deltas:
            view.put_back(delta)
            if view.durable:
                self._unsaved[view] = None
            if delta.moving:
                self._loop.call_later(RETRY_S, view.events.moves_failed)  # later, because the disk is probably full

    # Ending.

    def forget(self, view: "View") -> None:
        """The view's queue has been deleted: write nothing more of it."""
        if view in self._dirty:
            self._dirty.remove(view)
        if view in self._dirty_memory:
            self._dirty_memory.remove(view)
        self._unsaved.pop(view, None)
        self.refusing.discard(view)
        atomic = self.atomic
        atomic.views.discard(view)
        for number, group in enumerate(atomic.closed_groups):
            for owner, batch in group.batches:
                if owner is view:
                    view.in_flight.remove(batch)
            atomic.closed_groups[number] = _Group(
                [pair for pair in group.batches if pair[0] is not view],
                [pair for pair in group.deltas if pair[0] is not view],
            )

    def close(self) -> None:
        self._is_closed = True
