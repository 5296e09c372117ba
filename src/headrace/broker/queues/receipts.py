"""Receipts: messages that a client has received without holding a connection, and has to ack before a timeout.

For the HTTP listener. A message without an ack returns to its queue when its visibility timeout has passed, like the
messages of an AMQP consumer when its connection closes. Receipts are in memory only: a restart returns all messages.
"""

import asyncio
import heapq
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace.broker.queues.queue import Queue
from headrace.broker.queues.view import View
from headrace.broker.types.message import Message
from headrace.errors import Overloaded

RECEIPTS_MAX = 100_000
RETRY_AFTER_S = 1.0


class Received(NamedTuple):
    """A message in flight, as the queue delivered it."""

    view: View
    offset: int
    message: Message
    redelivered: bool


@dataclass(frozen=True, slots=True)
class _NeedsMessage:
    """The outcome of Consumer.deliver for a consumer that wants every message as an object."""

    next_offset: int
    count: int = 0
    body_bytes: int = 0
    needs_message: bool = True
    gaps: Sequence[tuple[int, int]] = ()


class Pull:
    """A consumer that takes up to `count_max` messages, and about `bytes_max`, and is then removed with `close`."""

    tag, priority, no_ack, exclusive = "", 0, False, False

    def __init__(self, queue: Queue, count_max: int, bytes_max: int) -> None:
        self._queue = queue
        self._count_max, self._bytes_left = count_max, bytes_max
        self.received: list[Received] = []
        self.first: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        queue.add_consumer(self, is_subscription=False)

    def credit(self) -> int:
        return self._count_max - len(self.received) if self._bytes_left > 0 else 0

    def deliver(self, _view: View, _data: Any, start: int, *_: int) -> _NeedsMessage:
        return _NeedsMessage(start)

    def deliver_message(self, view: View, offset: int, message: Message, redelivered: bool) -> None:
        self.received.append(Received(view, offset, message, redelivered))
        self._bytes_left -= len(message.body) + len(message.properties)
        self._notify()

    def cancelled(self) -> None:
        self._notify()

    def activated(self, active: bool) -> None: ...

    def _notify(self) -> None:
        if not self.first.done():
            self.first.set_result(None)

    def close(self) -> None:
        self._queue.remove_consumer(self, is_subscription=False)

    def give_back(self) -> None:
        """The messages reach no client: they were not delivered."""
        for one in self.received:
            self._queue.give_back(one.view, one.offset, counts=False)
        self.received = []


class _Lease:
    __slots__ = ("deadline", "offset", "queue", "view")

    def __init__(self, queue: Queue, received: Received, deadline: float) -> None:
        self.queue, self.view, self.offset = queue, received.view, received.offset
        self.deadline = deadline


class Outcome(NamedTuple):
    done: int
    unknown: list[str]  # expired, settled before, or of another queue


class Receipts:
    """All receipts of a listener; used on the event-loop thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._leases: dict[str, _Lease] = {}
        self._deadlines: list[tuple[float, str]] = []  # a heap; an extended lease has several entries
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._leases)

    def check_room(self, count: int) -> None:
        if len(self._leases) + count > RECEIPTS_MAX:
            text = f"{RECEIPTS_MAX:,} messages were received over HTTP and not settled yet: ack them, or receive fewer"
            raise Overloaded(text, RETRY_AFTER_S)

    def add(self, queue: Queue, received: Iterable[Received], timeout_s: float) -> list[str]:
        """A receipt for each message."""
        deadline = self._loop.time() + timeout_s
        names = []
        for one in received:
            name = secrets.token_urlsafe(16)
            self._leases[name] = _Lease(queue, one, deadline)
            heapq.heappush(self._deadlines, (deadline, name))
            names.append(name)
        self._arm()
        return names

    def ack(self, queue: Queue, names: Iterable[str]) -> Outcome:
        return self._end(queue, names, lambda lease: queue.settle(lease.view, lease.offset, lease.offset + 1))

    def requeue(self, queue: Queue, names: Iterable[str]) -> Outcome:
        return self._end(queue, names, lambda lease: queue.give_back(lease.view, lease.offset))

    def reject(self, queue: Queue, names: Iterable[str]) -> Outcome:
        return self._end(queue, names, lambda lease: queue.reject(lease.view, lease.offset))

    def extend(self, queue: Queue, names: Iterable[str], timeout_s: float) -> Outcome:
        """A new timeout from now on."""
        deadline, done, unknown = self._loop.time() + timeout_s, 0, []
        for name in names:
            lease = self._leases.get(name)
            if lease is None or lease.queue is not queue:
                unknown.append(name)
                continue
            lease.deadline = deadline
            heapq.heappush(self._deadlines, (deadline, name))
            done += 1
        if len(self._deadlines) > 2 * len(self._leases) + 1_000:  # a client that extends for ever must not fill memory
            self._deadlines = [(lease.deadline, name) for name, lease in self._leases.items()]
            heapq.heapify(self._deadlines)
        self._arm()
        return Outcome(done, unknown)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, queue: Queue, names: Iterable[str], settle: Callable[[_Lease], None]) -> Outcome:
        done, unknown = 0, []
        for name in names:
            lease = self._leases.get(name)
            if lease is None or lease.queue is not queue:
                unknown.append(name)
                continue
            del self._leases[name]
            settle(lease)
            done += 1
        return Outcome(done, unknown)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._deadlines[0][0], self._expire) if self._deadlines else None

    def _expire(self) -> None:
        self._timer = None
        now = self._loop.time()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, name = heapq.heappop(self._deadlines)
            lease = self._leases.get(name)
            if lease is not None and lease.deadline <= now:
                del self._leases[name]
                lease.queue.give_back(lease.view, lease.offset)
        self._arm()
