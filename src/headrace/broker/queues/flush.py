"""One flush for all connections: what was published and settled since the last one goes to the log together.

Publishes gather in the writers of their views. A flush hands the batches to the log and waits for the
tickets; what arrives meanwhile is the next flush, started when the tickets resolve, so a queue gets
one batch per round however many connections publish. Views in memory are flushed at the end of the
turn of the loop, they wait for nobody. Whatever must happen together (a dead letter and its settle,
a transaction) is put between begin_atomic and end_atomic, and becomes one group.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import HeadraceError, LogClosed, StorageError

if TYPE_CHECKING:
    from headrace.broker.queues.backlog import QueueContents
    from headrace.broker.queues.view import Delta, View

logger = logging.getLogger("headrace.broker")

SETTLE_TABLE = "settle"
HELD_BYTES_MAX = 1 << 20  # more than this does not wait for the running round: work on it can begin
RETRY_S = 1.0
Waiter = Callable[[HeadraceError | None], object]


class Author:
    """Who published something, between two answers: what became of it is told apart from all else in the flush."""

    __slots__ = ("_targets", "stores")

    def __init__(self) -> None:
        self.stores = False  # some of it goes to the disk
        self._targets: list[Any] = []

    def wrote(self, target: Any, *, durable: bool) -> None:
        self.stores = self.stores or durable
        if target is not None:
            self._targets.append(target)

    def leave(self) -> None:
        """What is published from now on is another's: writers that were opened for this one are asked for anew."""
        for target in self._targets:
            target.reset()
        self._targets.clear()

    def outcome(self, error: HeadraceError | None) -> HeadraceError | None:
        """What the end of a flush means for this author."""
        if error is None or not self.stores:
            return None
        return error.outcome_for(self) if isinstance(error, PartialFlush) else error


Authors = frozenset[Author]


class PartialFlush(StorageError):
    """Some queues of a flush have it and some do not."""

    def __init__(self, cause: HeadraceError, stored: Authors, refused: Authors, refusing: frozenset["View"]) -> None:
        super().__init__(str(cause))
        self._cause, self._stored, self._refused = cause, stored, refused
        self._refusing = refusing

    def is_stored_in(self, queues: Iterable["QueueContents"]) -> bool:
        """Whether none of them has refused anything."""
        return self._refusing.isdisjoint(view for queue in queues for view in queue.views)

    def outcome_for(self, author: Author) -> HeadraceError | None:
        if author in self._refused:
            return self if author in self._stored else self._cause
        # Of whom nothing is known, nothing is promised.
        return None if author in self._stored else StorageError(str(self._cause))


class Flush:
    """What became of the parts of one flush, and who waits for them."""

    __slots__ = ("left", "parts", "waiters")

    def __init__(self, waiters: list[Waiter]) -> None:
        self.waiters = waiters
        self.left = 1  # held by who makes it, so that inline tickets do not finish it early
        self.parts: list[tuple[Authors, HeadraceError | None, list[View]]] = []

    @property
    def was_refused(self) -> bool:
        return any(error is not None for _, error, _ in self.parts)

    @property
    def outcome(self) -> HeadraceError | None:
        errors = [error for _, error, _ in self.parts if error is not None]
        if not errors or len(errors) == len(self.parts):
            return errors[0] if errors else None
        stored = (authors for authors, error, _ in self.parts if error is None)
        refused = (authors for authors, error, _ in self.parts if error is not None)
        refusing = frozenset(view for _, error, views in self.parts if error is not None for view in views)
        return PartialFlush(errors[0], Authors().union(*stored), Authors().union(*refused), refusing)


class _Taken(NamedTuple):
    """What a group will hold, in the order in which it was said."""

    batches: list[tuple["View", bytearray]]
    deltas: list[tuple["View", "Delta"]]
    authors: Authors


def _taken(dirty: Sequence["View"], unsaved: Iterable["View"]) -> _Taken:
    deltas = [(view, view.take_unsaved()) for view in unsaved]
    authors = Authors().union(*(view.authors for view in dirty))
    return _Taken([(view, batch) for view in dirty for batch in view.take_batches()], deltas, authors)


_Handed = list[tuple["View", int]]  # how many records of a view a group holds
_Deltas = list[tuple["View", "Delta"]]


def _landed(handed: _Handed) -> None:
    for view, count in handed:
        view.landed(count)


def _stored(handed: _Handed, deltas: _Deltas) -> None:
    _landed(handed)
    for view, delta in deltas:
        view.saved(delta)


async def _outcome(future: "asyncio.Future[HeadraceError | None]") -> None:
    error = await future
    if error is not None:
        raise error


class FlushCoordinator:
    """Owned by the broker, used on the loop's thread."""

    def __init__(self, shard: Any, loop: asyncio.AbstractEventLoop | None = None) -> None:
        self._shard = shard
        self._loop = loop or asyncio.get_running_loop()
        self._dirty: list[View] = []
        self._dirty_memory: list[View] = []
        self._unsaved: dict[View, None] = {}
        self._atomic: set[View] = set()
        self._atomic_depth = 0
        self._atomic_stores = False  # something that was published since begin_atomic goes to the disk
        self._atomic_settles: list[tuple[View, int, int]] = []
        self._closed_groups: list[_Taken] = []
        self._waiters: list[Waiter] = []
        self._settle_waiters: list[Waiter] = []
        self._outstanding = 0
        self._flushes: deque[Flush] = deque()  # not told yet: a confirm speaks for all before it, too
        self._was_refused = False  # something of the flushes that are not over
        self._scheduled = False
        self._closed = False
        self.author: Author | None = None  # of what is being published now, if anybody asks
        self.refusing: set[View] = set()  # whose log took nothing the last time
        self.flush_count = 0
        self.batches = 0
        self.records = 0

    # What views and listeners say.

    def dirty(self, view: "View") -> None:
        (self._dirty if view.durable else self._dirty_memory).append(view)
        if self._atomic_depth:
            self.must_join(view)
        self.schedule()

    def settled(self, view: "View") -> None:
        """The view has ranges to save."""
        self._unsaved[view] = None
        self.schedule()

    def must_join(self, view: "View") -> None:
        """What was published to this view belongs to the atomic part of the next flush."""
        if view.durable:
            self._atomic.add(view)
            self._atomic_stores = True

    def settled_together(self, view: "View", start: int, end: int) -> None:
        """Settled between begin_atomic and end_atomic, which knows what with."""
        self._atomic_settles.append((view, start, end))

    def begin_atomic(self) -> None:
        """Until end_atomic, what is published and settled happens together or not at all."""
        self._atomic_depth += 1

    def end_atomic(self) -> None:
        """What was said since begin_atomic stays together; what follows may be in another group.

        A large one is closed here: an entry of the journal has a largest size, and with all that expires at once in
        one group nothing would move.
        """
        self._atomic_depth -= 1
        if self._atomic_depth:
            return
        self._join_settles()
        if sum(view.pending_bytes for view in self._atomic) > self._group_bytes_max:
            atomic, self._atomic = self._atomic, set()
            self._closed_groups.append(self._take_group(atomic))

    def _join_settles(self) -> None:
        settles, self._atomic_settles = self._atomic_settles, []
        stores, self._atomic_stores = self._atomic_stores, False
        for view, start, end in settles:
            if stores:
                self._atomic.add(view)
                view.settled_if_stored(start, end)
            else:  # nothing of it can fail: a queue in memory has what was moved
                view.settled_for_good(start, end)

    @property
    def _group_bytes_max(self) -> int:
        return min(HELD_BYTES_MAX, int(self._shard.journal.capacity) // 4)  # the log takes half

    def _take_group(self, views: set["View"]) -> "_Taken":
        dirty = [view for view in self._dirty if view in views]
        unsaved = [view for view in self._unsaved if view in views]
        self._dirty = [view for view in self._dirty if view not in views]
        self._unsaved = {view: None for view in self._unsaved if view not in views}
        return _taken(dirty, unsaved)

    @property
    def in_atomic(self) -> bool:
        return self._atomic_depth > 0

    def after(self, waiter: Waiter) -> None:
        """Calls the waiter once everything said so far is on stable storage, or has failed."""
        self._waiters.append(waiter)
        self.schedule()

    @contextmanager
    def written_by(self, author: Author) -> Iterator[None]:
        """What is published in here is the author's."""
        before, self.author = self.author, author
        try:
            yield
        finally:
            self.author = before
            author.leave()

    async def stored(self, author: Author) -> None:
        """Waits until what the author published is on stable storage, whatever becomes of all else."""
        error = author.outcome(await self._waiter_for(self._waiters))
        if error is not None:
            raise error

    async def over(self) -> None:
        """Waits until it is known what became of everything published so far."""
        await self._waiter_for(self._waiters)

    async def wait_all_durable(self) -> None:
        """Waits until everything published so far, and settled together with that, is on stable storage."""
        await _outcome(self._waiter_for(self._waiters))

    async def settles_stored(self) -> None:
        """Waits until everything settled so far is on stable storage, whatever becomes of what was published. Acks
        alone are written and synced later."""
        published, settled = self._waiter_for(self._waiters), self._waiter_for(self._settle_waiters)
        await published
        await _outcome(settled)

    def _waiter_for(self, waiters: list[Waiter]) -> "asyncio.Future[HeadraceError | None]":
        future = self._loop.create_future()

        def done(error: HeadraceError | None) -> None:
            if not future.done():
                future.set_result(error)

        waiters.append(done)
        self.schedule()
        return future

    def schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self.flush)

    # The flush.

    def flush(self) -> None:
        self._scheduled = False
        self.flush_memory()
        if not (self._dirty or self._unsaved or self._waiters or self._closed_groups):
            return
        held = sum(view.pending_bytes for view in self._dirty)
        if self._outstanding and held < HELD_BYTES_MAX and not self._closed_groups:
            return  # the running round's end starts the next flush
        self._flush_disk()

    def flush_memory(self) -> None:
        if self._dirty_memory:
            views, self._dirty_memory = self._dirty_memory, []
            for view in views:
                for batch in view.take_batches():
                    try:
                        view.log.append(batch)
                    except Exception as error:  # the batches behind it, and other queues, are to have their turn
                        logger.error("what was to be done after a publish failed: %s", error, exc_info=error)

    def _flush_disk(self) -> None:
        self.flush_count += 1
        flush = Flush(self._waiters)
        self._flushes.append(flush)
        self._waiters = []
        groups, self._closed_groups = self._closed_groups, []
        atomic, self._atomic = self._atomic, set()
        if atomic:
            groups.append(self._take_group(atomic))
        dirty, self._dirty = self._dirty, []
        unsaved, self._unsaved = self._unsaved, {}
        self._outstanding += 1
        for group in groups:
            if group.batches or group.deltas:  # or the queues it was for are gone
                self._stage_group(flush, group)
        for view in dirty:
            authors = frozenset(view.authors)
            for batch in view.take_batches():
                self.batches += 1
                landed = partial(view.landed, view.handed_over((batch,)))
                self._stage(flush, [view], authors, partial(view.log.append, batch), landed, landed)
        if unsaved or self._settle_waiters:
            self._stage_settles(_taken((), unsaved))
        self._shard.begin_round()  # all of this turn is staged: what comes next waits for this flush anyway
        self._one_done(flush)

    def _stage(
        self,
        flush: Flush,
        views: list["View"],
        authors: Authors,
        stage: Callable[[], Any],
        undo: Callable[[], None],
        stored: Callable[[], None],
    ) -> None:
        """`stored` or `undo` is called for this part alone, however the others of the flush end.

        That all queues it was for were deleted meanwhile is no error: their messages have nowhere to go, as if none
        had been bound, and nobody else in this flush is to suffer for it.
        """

        def ended(error: HeadraceError | None) -> None:
            if isinstance(error, LogClosed) and views and all(view.log.is_deleted for view in views):
                error = None
            flush.parts.append((authors, error, views))
            (self.refusing.difference_update if error is None else self.refusing.update)(views)
            (undo if error is not None else stored)()

        try:
            ticket = stage()
        except HeadraceError as error:
            ended(error)
            return

        def done(ticket: Any) -> None:
            ended(ticket.error)
            self._one_done(flush)

        flush.left += 1
        ticket.add_callback(done)

    def _stage_settles(self, group: _Taken) -> None:
        """Settles alone: whoever waits for publishes does not care how they end."""
        waiters, self._settle_waiters = self._settle_waiters, []
        lone = Flush(waiters)
        self._outstanding += 1
        if group.deltas:
            self._stage_group(lone, group, is_awaited=bool(waiters))
        self._one_done(lone)

    def _stage_group(self, flush: Flush, group: _Taken, *, is_awaited: bool = True) -> None:
        batches = [(view, batch) for view, batch in group.batches if not view.log.is_deleted]
        deltas = group.deltas
        self.batches += len(batches)
        # Acks may be lost in a power cut, how far deliveries went may not: what comes again must be flagged.
        lazy = not is_awaited and all(delta.reserved <= view.reserved for view, delta in deltas)
        kept = [(view, delta) for view, delta in deltas if view.durable]  # of queues in memory the disk hears nothing

        def stage() -> Any:
            stored = self._shard.group()
            for view, batch in batches:
                stored.append(view.log, batch)
            for view, delta in kept:
                stored.merge(SETTLE_TABLE, view.key, delta.encode())
            return stored.commit(lazy=lazy)

        handed = [(view, view.handed_over((batch,))) for view, batch in batches]
        undo, saved = partial(self._put_back, handed, deltas), partial(_stored, handed, deltas)
        if batches or kept:
            self._stage(flush, [view for view, _ in batches], group.authors, stage, undo, saved)
        else:
            saved()  # the queues that its messages went to are gone

    def _put_back(self, handed: _Handed, deltas: _Deltas) -> None:
        _landed(handed)
        for view, delta in deltas:
            view.put_back(delta)
            if view.durable:
                self._unsaved[view] = None
            if delta.moving and view.on_put_back is not None:
                self._loop.call_later(RETRY_S, view.on_put_back)  # not at once: the disk is full

    def _one_done(self, flush: Flush) -> None:
        flush.left -= 1
        if flush.left:
            return
        self._outstanding -= 1
        self._was_refused |= flush.was_refused
        if flush not in self._flushes:  # of settles alone
            self._tell(flush)
        while self._flushes and not self._flushes[0].left:
            self._tell(self._flushes.popleft())
        if self._closed or self._outstanding:
            return
        refused, self._was_refused = self._was_refused, False
        if self._dirty or self._waiters or self._closed_groups or (self._unsaved and not refused):
            self.schedule()
        elif refused:
            self._loop.call_later(RETRY_S, self.schedule)  # settles are kept and tried again: the disk is full

    @staticmethod
    def _tell(flush: Flush) -> None:
        outcome = flush.outcome
        for waiter in flush.waiters:
            try:
                waiter(outcome)
            except Exception as error:  # all the others are to have their answer, and the next flush its turn
                logger.error("what was to be done after a flush failed: %s", error, exc_info=error)

    def forget(self, view: "View") -> None:
        """The view's queue is gone: nothing of it is written any more."""
        if view in self._dirty:
            self._dirty.remove(view)
        if view in self._dirty_memory:
            self._dirty_memory.remove(view)
        self._unsaved.pop(view, None)
        self._atomic.discard(view)
        self.refusing.discard(view)
        self._closed_groups = [
            _Taken(
                [pair for pair in group.batches if pair[0] is not view],
                [pair for pair in group.deltas if pair[0] is not view],
                group.authors,
            )
            for group in self._closed_groups
        ]

    def close(self) -> None:
        self._closed = True
