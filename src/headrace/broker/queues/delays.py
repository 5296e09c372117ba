"""Delayed messages: kept in a log until they are due. Each x-delayed-message exchange has a log, and the retries of
the queues of a vhost (retries.py) have another.

An in-memory index of (due, offset), 16 bytes for each message, is rebuilt from the log when the broker starts. When a
message is due, its publishes and the settle of the delayed copy are one atomic group.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from headrace.broker.queues.due_index import DueIndex
from headrace.broker.queues.flush import FlushCoordinator
from headrace.broker.queues.view import View, ViewEvents
from headrace.broker.queues.view_reader import Run
from headrace.broker.routing.exchanges import Exchange
from headrace.broker.routing.router import Routed, Routing
from headrace.broker.streams.partition import ReadWaits
from headrace.broker.types.message import Message, cc_keys, from_record, to_bytes, to_text
from headrace.clock import Clock
from headrace.errors import HeadraceError
from headrace.record import codec
from headrace.record.layout import (
    AMQP_CLIENT_DEATHS_HEADER,
    AMQP_EXCHANGE_HEADER,
    AMQP_PROPERTIES_HEADER,
    AMQP_RETRIES_HEADER,
)
from headrace.record.types import Record

logger = logging.getLogger("headrace.broker")

DUE_HEADER = "amqp.due"
KEYS_HEADER = "amqp.keys"  # further routing keys: those of BCC are no longer in the message's headers
STREAM_PREFIX = "amq.delayed."
FIRE_MAX = 500  # per event-loop iteration
DELAY_MAX_MS = 2**40
READ_BYTES = 256 * 1024
TIMER_MAX_S = 60.0  # the clock may be set, or the machine suspended: messages are late by at most this
RETRY_MS = 60_000  # for messages that cannot be read
FULL_RETRY_MS = 1000  # for messages that must not be lost and whose queue is full


class Publishable(Protocol):
    """A queue, as far as messages are published to it."""

    name: str
    durable: bool

    def publish(self, message: Message, timestamp_ms: int) -> bool: ...

    def refuses(self, size: int) -> bool: ...


class QueueFull(Exception):
    """A message is due, must not be lost, and its queue refuses it."""


class DelayStore(Protocol):
    """Where the logs of delayed messages are kept."""

    flushes: FlushCoordinator

    def check_delay_stream(self, vhost: str, name: str) -> None:
        """Raises what create_delay_stream would."""

    async def create_delay_stream(self, vhost: str, name: str) -> None:
        """Create the stream unless it exists."""

    def has_delay_stream(self, vhost: str, name: str) -> bool: ...

    def open_delay_view(self, vhost: str, name: str, events: ViewEvents) -> View: ...

    def open_memory_view(self, events: ViewEvents) -> View: ...

    async def remove_delay_stream(self, vhost: str, name: str, view: View) -> None: ...


Q = TypeVar("Q", bound=Publishable)
# Publishes a message that is due: the message, its headers, the keys it was added with, and the time.
PublishDue = Callable[[Message, dict[str, Any], Sequence[str], int], None]


class DelayLog:
    """The delayed messages of one owner: an exchange, or the queues of a vhost whose messages wait for a retry."""

    def __init__(
        self,
        owner: str,
        open_view: Callable[[ViewEvents], View],
        publish: PublishDue,
        flushes: FlushCoordinator,
        clock: Clock,
    ) -> None:
        self.owner = owner  # in words
        self._publish = publish
        self._flushes = flushes
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self.view = view = open_view(ViewEvents(moves_failed=self._moves_failed))
        self._index = DueIndex()
        self._indexed = view.low
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._waited_flush = -1
        self._indexing = False
        self._due: deque[int] = deque()  # offsets to publish now, soonest first
        self._is_loading = False
        self.is_closed = False
        self.index_new()

    def __len__(self) -> int:
        return len(self._index) + len(self._due)

    def add(self, message: Message, due_ms: int, now_ms: int, keys: Sequence[str]) -> None:
        """`keys`: the message's routing key, and what else its publishing needs."""
        writer = self.view.open_batch().writer
        further = msgspec.msgpack.encode([to_bytes(key) for key in keys[1:]])
        headers = (*message.record_headers(), (DUE_HEADER, due_ms.to_bytes(8, "big")), (KEYS_HEADER, further))
        writer.append(message.key, message.body, headers, now_ms)
        if self._waited_flush != self._flushes.flush_count:  # once per flush
            self._waited_flush = self._flushes.flush_count
            self._flushes.after(self._flushed)

    def _flushed(self, error: object) -> None:
        if not self.is_closed:
            self.index_new()

    def index_new(self) -> None:
        """Add readable messages to the index, a chunk per event-loop iteration: after a restart there may be
        millions."""
        if self._indexing:
            return  # continues to the end of the log by itself
        log = self.view.log
        gap = self.view.settled.gap(max(self._indexed, log.start_offset), log.stable_end)
        if gap is not None:
            try:
                chunk = log.read_now(gap[0], READ_BYTES)
            except ReadWaits as cold:
                self._indexing = True
                cold.then(self._index_more)
                return
            except HeadraceError as error:  # must not fail the start of the broker, or other exchanges
                text = "delayed messages of %s cannot be read from offset %d on: %s"
                logger.error(text, self.owner, gap[0], error)
                self._indexing = True
                self._loop.call_later(RETRY_MS / 1000, self._index_more)
                self._arm()
                return
            for record in codec.records(chunk.data, from_offset=gap[0], to_offset=gap[1]):
                self._index.add(_due_of(record), record.offset)
            self._indexed = max(min(chunk.next_offset, gap[1]), gap[0] + 1)
            if self._indexed < log.stable_end:
                self._indexing = True
                self._loop.call_soon(self._index_more)
        self.view.next = max(self.view.next, self._indexed)
        self._arm()

    def _index_more(self) -> None:
        self._indexing = False
        if not self.is_closed:
            self.index_new()

    def _arm(self) -> None:
        due_ms = self._index.next_due()
        if due_ms is None:
            return
        loop = self._loop
        when = loop.time() + min(max(due_ms - self._clock.now_ms(), 0) / 1000, TIMER_MAX_S)
        if self._timer is not None:
            if self._timer_at <= when:
                return
            self._timer.cancel()
        self._timer_at = when
        self._timer = loop.call_at(when, self._fire)

    def _fire(self) -> None:
        self._timer = None
        if self.is_closed or self._is_loading:
            return
        now_ms = self._clock.now_ms()
        self._due.extend(self._index.take(now_ms, FIRE_MAX - len(self._due)))
        while self._due:
            offset = self._due[0]
            try:
                self._release(offset, now_ms)
            except ReadWaits as cold:  # an old message may not be in memory: do not block on the disk
                self._is_loading = True
                cold.then(self._loaded)
                return
            except HeadraceError as error:  # the other messages are due too
                text = "delayed message %d of %s is due and cannot be published: %s"
                logger.error(text, offset, self.owner, error)
                self._index.add(now_ms + RETRY_MS, offset)
            except QueueFull:
                self._index.add(now_ms + FULL_RETRY_MS, offset)
            self._due.popleft()
        self._arm()

    def _loaded(self) -> None:
        self._is_loading = False
        self._fire()

    def _moves_failed(self) -> None:
        """Messages that were due were refused by their queues: they are due again."""
        if self.is_closed:
            return
        now_ms = self._clock.now_ms()
        for start, end in list(self.view.returned):
            for offset in range(start, end):
                self._index.add(now_ms, offset)
            self.view.returned.remove(start, end)
        self._arm()

    def _release(self, offset: int, now_ms: int) -> None:
        if offset < self.view.log.start_offset:
            return  # deleted by a user
        run = Run(offset, offset + 1, 0, True)
        self.view.reader.load_chunk(run)
        chunk = self.view.reader.chunk(run)
        found = codec.records(chunk.data, from_offset=offset, to_offset=offset + 1, limit=1)
        self._flushes.begin_atomic()
        try:
            for record in found:
                message = _message_of(record)
                headers = message.headers()
                keys = [message.routing_key, *_keys_of(record, headers)]
                self._publish(message, headers, keys, now_ms)
            self.view.settle(offset, offset + 1)
        finally:
            self._flushes.end_atomic()

    def close(self) -> None:
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.view.take_batch()  # discards them
        self._flushes.forget(self.view)


class Delays(Generic[Q]):
    """The delay logs of one vhost, by the name of their exchange. The log of retries has a name that no exchange can
    have."""

    def __init__(
        self, vhost: str, store: DelayStore, routing: Routing[Q], queues: Mapping[str, Q], clock: Clock
    ) -> None:
        self._vhost = vhost
        self._store = store
        self._routing = routing
        self._queues = queues
        self._clock = clock
        self._logs: dict[str, DelayLog] = {}

    def check(self, exchange: Exchange) -> None:
        """Raises what `prepare` would: the name of the stream is longer than that of the exchange."""
        if exchange.delayed and exchange.durable:
            self._store.check_delay_stream(self._vhost, STREAM_PREFIX + exchange.name)

    async def prepare(self, exchange: Exchange) -> None:
        """Create the log of a new exchange, before messages can be published to it."""
        if exchange.name in self._logs:
            return
        owner, publish = self._owner_of(exchange)
        if exchange.durable:
            await self.create_log(exchange.name, owner, publish)
        else:
            self.open_memory_log(exchange.name, owner, publish)

    def load(self, exchange: Exchange) -> None:
        """Open the log of a durable exchange when the broker starts."""
        self.load_log(exchange.name, *self._owner_of(exchange))

    def _owner_of(self, exchange: Exchange) -> tuple[str, PublishDue]:
        return f"exchange {exchange.name!r}", partial(self._publish_to, exchange)

    def _publish_to(
        self, exchange: Exchange, message: Message, headers: dict[str, Any], keys: Sequence[str], now_ms: int
    ) -> None:
        message = _waited(message, headers)
        for queue in self.route(exchange, message, now_ms, keys).queues:
            queue.publish(message, now_ms)

    # Logs.

    def log(self, name: str) -> DelayLog | None:
        return self._logs.get(name)

    async def create_log(self, name: str, owner: str, publish: PublishDue) -> None:
        """Open a durable log, and create it if there is none."""
        await self._store.create_delay_stream(self._vhost, STREAM_PREFIX + name)
        self.load_log(name, owner, publish)

    def load_log(self, name: str, owner: str, publish: PublishDue) -> None:
        """Open a durable log if there is one."""
        stream = STREAM_PREFIX + name
        if self._store.has_delay_stream(self._vhost, stream):
            self._open(name, owner, partial(self._store.open_delay_view, self._vhost, stream), publish)

    def open_memory_log(self, name: str, owner: str, publish: PublishDue) -> DelayLog:
        return self._open(name, owner, self._store.open_memory_view, publish)

    def _open(self, name: str, owner: str, open_view: Callable[[ViewEvents], View], publish: PublishDue) -> DelayLog:
        found = self._logs[name] = DelayLog(owner, open_view, publish, self._store.flushes, self._clock)
        return found

    async def remove_log(self, name: str) -> None:
        log = self._logs.pop(name, None)
        if log is not None:
            log.close()
            if log.view.durable:
                await self._store.remove_delay_stream(self._vhost, STREAM_PREFIX + name, log.view)

    # Messages.

    def route(
        self,
        exchange: Exchange,
        message: Message,
        now_ms: int,
        keys: Sequence[str],
        headers: Mapping[str, Any] | None = None,
    ) -> Routed[Q]:
        """The queues that a message goes to now. Delaying exchanges on its way, also those reached by bindings, keep it
        until it is due. `keys`: all its routing keys, its own first."""
        headers = message.headers() if headers is None else headers
        wanted = _delay_of(headers.get("x-delay"))
        routed = self._routing.route_message(exchange, keys, message, self._queues, headers, delays=wanted is not None)
        for delaying in routed.waits_in:
            self._logs[delaying.name].add(message, now_ms + min(wanted or 0, DELAY_MAX_MS), now_ms, keys)
        return routed

    async def forget(self, exchange: Exchange) -> None:
        await self.remove_log(exchange.name)

    def owner_of(self, stream: str) -> str | None:
        """Whose delayed messages are in the stream of this name."""
        name = stream.removeprefix(STREAM_PREFIX)
        found = self._logs.get(name) if name != stream else None
        return found.owner if found is not None and found.view.durable else None

    def waiting(self, exchange: str) -> int:
        found = self._logs.get(exchange)
        return 0 if found is None else len(found)

    def views(self) -> list[View]:
        return [log.view for log in self._logs.values() if log.view.durable]

    def close(self) -> None:
        for log in self._logs.values():
            log.is_closed = True


def _due_of(record: Record) -> int:
    return next((int.from_bytes(value or b"", "big") for name, value in record.headers if name == DUE_HEADER), 0)


def _waited(message: Message, headers: dict[str, Any]) -> Message:
    """Negate x-delay, as RabbitMQ's plugin does, so that the message is not delayed again when it is dead-lettered."""
    delay = _delay_of(headers.get("x-delay"))
    return message if delay is None else message.with_headers(**{"x-delay": -delay})


def _delay_of(wanted: Any) -> int | None:
    """The delay in milliseconds from a client's x-delay header; None if it is not a delay."""
    if isinstance(wanted, str) and wanted.lstrip("-").isdecimal() and len(wanted) < 20:
        wanted = int(wanted)
    return wanted if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0 else None


def _keys_of(record: Record, headers: dict[str, Any]) -> list[str]:
    for name, value in record.headers:
        if name == KEYS_HEADER:
            return [to_text(key) for key in msgspec.msgpack.decode(value or b"", type=list[bytes])]
    return cc_keys(headers)  # stored by an earlier version


def _message_of(record: Record) -> Message:
    names = (AMQP_PROPERTIES_HEADER, AMQP_EXCHANGE_HEADER, AMQP_CLIENT_DEATHS_HEADER, AMQP_RETRIES_HEADER)
    kept = tuple(pair for pair in record.headers if pair[0] in names)
    return from_record(Record(record.offset, record.timestamp, record.key, record.value, kept))
