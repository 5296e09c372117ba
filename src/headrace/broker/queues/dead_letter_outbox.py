"""Messages on their way from a queue to its dead-letter exchange, or to a retry: rejected, expired, or beyond a limit.

They are moved in order, a few per event-loop iteration. A message that cannot be moved stays in flight and is retried.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from headrace.broker.queues.backlog import Backlog
from headrace.broker.queues.dead_lettering import NoPlace, Origin
from headrace.broker.queues.deferred_calls import DeferredCalls
from headrace.broker.queues.vhost_services import VhostServices
from headrace.broker.queues.view import View
from headrace.broker.queues.view_reader import Run
from headrace.broker.types.message import Message
from headrace.broker.types.range_set import RangeSet
from headrace.errors import LogClosed

logger = logging.getLogger("headrace.broker")

AT_ONCE = 40  # per event-loop iteration; takes a few milliseconds
RETRY_S = 60.0


@dataclass(slots=True)
class Rejected:
    """A range of rejected messages."""

    view: View
    start: int
    end: int
    reason: str


class DeadLetterOutbox:
    """Owned by one Queue, its `origin`. `on_returned`: messages in flight became ready again; `on_retry`: so did
    messages that could not be moved, and they should be checked again."""

    def __init__(
        self,
        origin: Origin,
        backlog: Backlog,
        vhost: VhostServices,
        *,
        on_returned: Callable[[], None],
        on_retry: Callable[[], None],
    ) -> None:
        self._origin = origin
        self._backlog = backlog
        self._vhost = vhost
        self._on_returned = on_returned
        self._on_retry = on_retry
        self._deferred = DeferredCalls(vhost.loop)
        # None until they are needed: an empty deque takes 680 bytes, and there may be many queues.
        self._rejected: deque[Rejected] | None = None  # in flight, and to be moved next
        self._kept: deque[Rejected] | None = None  # in flight until a queue accepts them (at-least-once)
        self._unmoved: dict[View, RangeSet] = {}  # in flight until the next retry, after an error
        self._left = AT_ONCE  # how many more may be moved in this iteration
        self._waiters: list[asyncio.Future[None]] = []
        self._logged: tuple[type[Exception], ...] = ()  # each kind of failure is logged once
        self.moved = 0

    def move(self, view: View, offset: int, message: Message, reason: str) -> None:
        """Dead-letter a message in flight now. If that fails it stays in flight, and others are not held up."""
        try:
            self._move(view, offset, message, reason)
        except NoPlace:
            self._keep(view, offset, reason)
        except Exception as error:  # noqa: BLE001 - logged and retried
            text = "message %d of queue %r cannot be dead-lettered, retrying every %d s: %s"
            self._log_once(error, text, offset, self._origin.name, RETRY_S, error)
            if not self._unmoved:
                self._vhost.loop.call_later(RETRY_S, self._retry_unmoved)
            self._unmoved.setdefault(view, RangeSet()).add(offset, offset + 1)

    def _move(self, view: View, offset: int, message: Message, reason: str) -> None:
        self.moved += self._vhost.dead_letters.move(self._origin, view, offset, message, reason)

    def _retry_unmoved(self) -> None:
        unmoved, self._unmoved = self._unmoved, {}
        for view, ranges in unmoved.items():
            for start, end in ranges:
                view.give_back(start, end)
        self._on_retry()

    def reject(self, view: View, offset: int, reason: str) -> None:
        """Dead-letter a rejected message now or, after too many in this iteration, later."""
        if self._vhost.flushes.atomic.depth:  # a transaction: all of it must happen now
            self._dead_letter(view, offset, reason)
            return
        self._deferred.call_soon(self._move_rejected)  # resets the number for the next iteration
        is_next = not self._rejected and self._left > 0
        if is_next and self._backlog.is_loaded(view, Run(offset, offset + 1, 0, True), self._move_rejected):
            self._left -= 1
            self._dead_letter(view, offset, reason)
            return
        self._rejected = _add(self._rejected, view, offset, reason)

    def _dead_letter(self, view: View, offset: int, reason: str) -> None:
        message = self._backlog.read(view, Run(offset, offset + 1, 0, True))
        if message is None:
            return
        try:
            self._move(view, offset, message, reason)
        except NoPlace:
            self._keep(view, offset, reason)

    def _keep(self, view: View, offset: int, reason: str) -> None:
        """Keep a message in flight, without a consumer, until a queue accepts it as a dead letter."""
        if NoPlace not in self._logged:
            self._logged += (NoPlace,)
            text = "no queue accepts the dead letters of queue %r: keeping them and retrying every %d s"
            logger.warning(text, self._origin.name, RETRY_S)
        if not self._kept:
            self._vhost.loop.call_later(RETRY_S, self._retry_kept)
        self._kept = _add(self._kept, view, offset, reason)

    def _retry_kept(self) -> None:
        kept, self._kept = self._kept, None
        self._rejected = deque((*(self._rejected or ()), *(kept or ())))
        self._move_rejected()

    def _move_rejected(self) -> None:
        """A client may reject a million messages at once, and they may have to be read from the disk."""
        backlog = self._backlog
        self._left = AT_ONCE
        while self._rejected and not backlog.is_closed:
            if self._left <= 0:
                self._deferred.call_soon(self._move_rejected)
                return
            first = self._rejected[0]
            view, offset = first.view, first.start
            try:
                if offset >= view.log.start_offset:
                    if not backlog.is_loaded(view, Run(offset, offset + 1, 0, True), self._move_rejected):
                        return
                    self._left -= 1
                    self._dead_letter(view, offset, first.reason)
            except LogClosed:
                break  # the broker is stopping: the messages are ready again after the next start
            except Exception as error:  # noqa: BLE001 - the message is returned, and the others are moved
                name = self._origin.name
                self._log_once(error, "rejected message %d of queue %r stays in the queue: %s", offset, name, error)
                view.give_back(offset, offset + 1)
                self._on_returned()
            first.start += 1
            if first.start >= first.end:
                self._rejected.popleft()
        self.release_waiters()

    def _log_once(self, error: Exception, text: str, *arguments: object) -> None:
        """Log a kind of failure once, not for each message and retry."""
        if type(error) not in self._logged:
            self._logged += (type(error),)
            logger.error(text, *arguments, exc_info=error)

    async def wait_empty(self) -> None:
        """Wait until everything rejected so far has been moved, or the queue is deleted."""
        if self._rejected:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def release_waiters(self) -> None:
        """Also called when the queue is deleted."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _add(runs: deque[Rejected] | None, view: View, offset: int, reason: str) -> deque[Rejected]:
    runs = deque() if runs is None else runs
    last = runs[-1] if runs else None
    if last is not None and last.view is view and last.end == offset and last.reason == reason:
        last.end += 1
    else:
        runs.append(Rejected(view, offset, offset + 1, reason))
    return runs
