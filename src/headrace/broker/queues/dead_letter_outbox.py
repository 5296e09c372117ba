"""Messages on their way out of a queue, to where its dead letters go: what clients reject, what expires, what is one
too many. A few at a time and in their order, and none is lost that cannot go."""

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.broker.queues.dead_lettering import NoPlace
from headrace.broker.queues.view import Run, View
from headrace.broker.types.message import Message
from headrace.broker.types.range_set import RangeSet
from headrace.errors import LogClosed

if TYPE_CHECKING:
    from headrace.broker.queues.backlog import QueueContents

logger = logging.getLogger("headrace.broker")

AT_ONCE = 40  # a few milliseconds: others get their turn
RETRY_S = 60.0


@dataclass(slots=True)
class Rejected:
    view: View
    start: int
    end: int
    reason: str


class DeadLetterOutbox:
    def __init__(self, queue: "QueueContents") -> None:
        self._queue = queue
        self._rejected: deque[Rejected] = deque()  # out of the queue, and not yet anywhere else
        self._kept: deque[Rejected] = deque()  # as these, but there is no place for them yet
        self._left = AT_ONCE  # of the rejected, in this turn of the loop
        self._waiters: list[asyncio.Future[None]] = []
        self._unmoved: dict[View, RangeSet] = {}  # could not be dead-lettered: out until they are tried again
        self._failures: set[type[Exception]] = set()  # why, as far as the log says it

    def move(self, view: View, offset: int, message: Message, reason: str) -> None:
        """One that cannot be moved keeps nobody else from it: it is out, and comes back."""
        queue = self._queue
        try:
            queue.vhost.dead_letters.move(queue, view, offset, message, reason)
        except NoPlace:
            self._keep(view, offset, reason)
        except Exception as error:  # noqa: BLE001 - said, and tried again
            text = "message %d of queue %r cannot be dead-lettered and is tried again every %d s: %s"
            self._say(error, text, offset, queue.name, RETRY_S, error)
            if not self._unmoved:
                queue.vhost.loop.call_later(RETRY_S, self._move_again)
            self._unmoved.setdefault(view, RangeSet()).add(offset, offset + 1)

    def _move_again(self) -> None:
        unmoved, self._unmoved = self._unmoved, {}
        for view, ranges in unmoved.items():
            for start, end in ranges:
                view.give_back(start, end)
        self._queue.moves_failed()

    def reject(self, view: View, offset: int, reason: str) -> None:
        queue = self._queue
        if queue.vhost.flushes.in_atomic:  # a transaction: all of it happens now
            self._dead_letter(view, offset, reason)
            return
        queue.go_on(self._move_rejected)  # the next turn has its own share
        is_next = not self._rejected and self._left > 0
        if is_next and queue.is_loaded(view, Run(offset, offset + 1, 0, True), self._move_rejected):
            self._left -= 1
            self._dead_letter(view, offset, reason)
            return
        _add(self._rejected, view, offset, reason)

    def _dead_letter(self, view: View, offset: int, reason: str) -> None:
        queue = self._queue
        message = queue.read(view, Run(offset, offset + 1, 0, True))
        if message is None:
            return
        try:
            queue.vhost.dead_letters.move(queue, view, offset, message, reason)
        except NoPlace:
            self._keep(view, offset, reason)

    def _keep(self, view: View, offset: int, reason: str) -> None:
        """Out, and with no consumer, until there is a place for it among the dead letters."""
        queue = self._queue
        if NoPlace not in self._failures:
            self._failures.add(NoPlace)
            text = "dead letters of queue %r have nowhere to go and are kept; tried again every %d s"
            logger.warning(text, queue.name, RETRY_S)
        if not self._kept:
            queue.vhost.loop.call_later(RETRY_S, self._try_kept)
        _add(self._kept, view, offset, reason)

    def _try_kept(self) -> None:
        self._rejected += self._kept
        self._kept.clear()
        self._move_rejected()

    def _move_rejected(self) -> None:
        """What a client rejects may be long gone from memory, and a million: others get their turn meanwhile."""
        queue = self._queue
        self._left = AT_ONCE
        while self._rejected and not queue.is_deleted:
            if self._left <= 0:
                queue.go_on(self._move_rejected)
                return
            first = self._rejected[0]
            view, offset = first.view, first.start
            try:
                if offset >= view.log.start_offset:
                    if not queue.is_loaded(view, Run(offset, offset + 1, 0, True), self._move_rejected):
                        return
                    self._left -= 1
                    self._dead_letter(view, offset, first.reason)
            except LogClosed:
                break  # the broker stops: with the next start they are here again
            except Exception as error:  # noqa: BLE001 - it stays, the others have their turn
                self._say(error, "message %d of queue %r was rejected and stays: %s", offset, queue.name, error)
                view.give_back(offset, offset + 1)
                queue.came_back()
            first.start += 1
            if first.start >= first.end:
                self._rejected.popleft()
        self.end()

    def _say(self, error: Exception, text: str, *arguments: object) -> None:
        """Not for each message, and not each time."""
        if type(error) not in self._failures:
            self._failures.add(type(error))
            logger.error(text, *arguments, exc_info=error)

    async def done(self) -> None:
        """Returns when all that was rejected so far has gone, or the queue is deleted."""
        if self._rejected:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            await waiter

    def end(self) -> None:
        """Nobody waits any longer."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


def _add(runs: deque[Rejected], view: View, offset: int, reason: str) -> None:
    last = runs[-1] if runs else None
    if last is not None and last.view is view and last.end == offset and last.reason == reason:
        last.end += 1
    else:
        runs.append(Rejected(view, offset, offset + 1, reason))
