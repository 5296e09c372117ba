"""Delayed messages: kept in a log of their exchange until they are due, found by one index of (due, offset).

The index (timers.py) takes 16 bytes for each message, and is made again from the log when the broker starts. When a
message is due, its routing and the settling of its delayed copy are one group.
"""

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headrace.broker.queues.dead_lettering import further_keys
from headrace.broker.queues.due_index import DueIndex
from headrace.broker.queues.view import Run, View
from headrace.broker.routing.exchanges import Exchange
from headrace.broker.routing.router import Routed
from headrace.broker.streams.partition import ReadWaits
from headrace.broker.types.message import Message, from_record, to_bytes, to_text
from headrace.errors import HeadraceError
from headrace.log.memory.memory_log import MemoryLog
from headrace.record import codec
from headrace.record.layout import AMQP_EXCHANGE_HEADER, AMQP_PROPERTIES_HEADER
from headrace.record.types import Record

if TYPE_CHECKING:
    from headrace.broker.vhosts.vhost import VirtualHost

logger = logging.getLogger("headrace.broker")

DUE_HEADER = "amqp.due"
KEYS_HEADER = "amqp.keys"  # the routing keys beside its own: those of BCC are in no header of the message any more
STREAM_PREFIX = "amq.delayed."
FIRE_MAX = 500  # per turn of the loop
DELAY_MAX_MS = 2**40
READ_BYTES = 256 * 1024
TIMER_MAX_S = 60.0  # the clock may be set meanwhile, or the machine sleep: what is due then is late by no more
RETRY_MS = 60_000  # of one that could not be read


class DelayLog:
    """The delayed messages of one exchange."""

    def __init__(self, vhost: "VirtualHost", exchange: Exchange, view: View) -> None:
        self._vhost = vhost
        self._exchange = exchange
        self.view = view
        self._index = DueIndex()
        self._indexed = view.low
        self._timer: Any = None
        self._timer_at = 0.0
        self._asked_at = -1
        self._indexing = False
        self._due: deque[int] = deque()  # on their way out, soonest first
        self._is_loading = False
        self.is_closed = False
        view.on_put_back = self._moves_failed
        self.index_new()

    def __len__(self) -> int:
        return len(self._index) + len(self._due)

    def add(self, message: Message, due_ms: int, now_ms: int, keys: Sequence[str]) -> None:
        writer = self.view.open_writer()
        further = msgspec.msgpack.encode([to_bytes(key) for key in keys[1:]])
        headers = (*message.record_headers(), (DUE_HEADER, due_ms.to_bytes(8, "big")), (KEYS_HEADER, further))
        writer.append(message.key, message.body, headers, now_ms)
        if self._asked_at != self._vhost.flushes.flush_count:  # once for each flush
            self._asked_at = self._vhost.flushes.flush_count
            self._vhost.flushes.after(self._flushed)

    def _flushed(self, error: object) -> None:
        if not self.is_closed:
            self.index_new()

    def index_new(self) -> None:
        """Takes what has become visible into the index, a chunk in each turn of the loop: after a restart there may
        be millions, and nobody shall wait for them."""
        if self._indexing:
            return  # it goes on, up to what is visible then
        log = self.view.log
        gap = self.view.settled.gap(max(self._indexed, log.start_offset), log.stable_end)
        if gap is not None:
            try:
                chunk = log.read_now(gap[0], READ_BYTES)
            except ReadWaits as cold:
                self._indexing = True
                cold.then(self._index_more)
                return
            except HeadraceError as error:  # here alone: the broker has other exchanges, and may just be starting
                name = self._exchange.name
                logger.error("what exchange %r delays cannot be read from %d on, and waits: %s", name, gap[0], error)
                self._indexing = True
                self._vhost.loop.call_later(RETRY_MS / 1000, self._index_more)
                self._arm()
                return
            for record in codec.records(chunk.data, from_offset=gap[0], to_offset=gap[1]):
                self._index.add(_due_of(record), record.offset)
            self._indexed = max(min(chunk.next_offset, gap[1]), gap[0] + 1)
            if self._indexed < log.stable_end:
                self._indexing = True
                self._vhost.loop.call_soon(self._index_more)
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
        loop = self._vhost.loop
        when = loop.time() + min(max(due_ms - self._vhost.clock.now_ms(), 0) / 1000, TIMER_MAX_S)
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
        now_ms = self._vhost.clock.now_ms()
        self._due.extend(self._index.take(now_ms, FIRE_MAX - len(self._due)))
        while self._due:
            offset = self._due[0]
            try:
                self._release(offset, now_ms)
            except ReadWaits as cold:  # it may have waited for a day: nobody else is to wait for the disk
                self._is_loading = True
                cold.then(self._loaded)
                return
            except HeadraceError as error:  # this one alone: the others are due, too
                name = self._exchange.name
                logger.error("message %d that exchange %r delays is due and cannot be sent: %s", offset, name, error)
                self._index.add(now_ms + RETRY_MS, offset)
            self._due.popleft()
        self._arm()

    def _loaded(self) -> None:
        self._is_loading = False
        self._fire()

    def _moves_failed(self) -> None:
        """What was due and found no room where it was to go is due again."""
        if self.is_closed:
            return
        now_ms = self._vhost.clock.now_ms()
        for start, end in list(self.view.returned):
            for offset in range(start, end):
                self._index.add(now_ms, offset)
            self.view.returned.remove(start, end)
        self._arm()

    def _release(self, offset: int, now_ms: int) -> None:
        if offset < self.view.log.start_offset:
            return  # somebody deleted it
        run = Run(offset, offset + 1, 0, True)
        self.view.load_chunk(run)
        chunk = self.view.chunk(run)
        found = codec.records(chunk.data, from_offset=offset, to_offset=offset + 1, limit=1)
        vhost = self._vhost
        vhost.flushes.begin_atomic()
        try:
            for record in found:
                message = _message_of(record)
                headers = message.headers()
                keys = [message.routing_key, *_keys_of(record, headers)]
                message = _waited(message, headers)
                for queue in vhost.delays.route(self._exchange, message, now_ms, keys).queues:
                    queue.publish(message, now_ms)
            self.view.settle(offset, offset + 1)
        finally:
            vhost.flushes.end_atomic()

    def close(self) -> None:
        self.is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.view.discard_pending()
        self._vhost.flushes.forget(self.view)


class Delays:
    """The delay logs of one vhost, by exchange."""

    def __init__(self, vhost: "VirtualHost") -> None:
        self._vhost = vhost
        self._logs: dict[str, DelayLog] = {}

    def check(self, exchange: Exchange) -> None:
        """What `prepare` refuses: the stream has a longer name."""
        if exchange.delayed and exchange.durable:
            self._vhost.store.streams.check(STREAM_PREFIX + exchange.name, kind="queue", vhost=self._vhost.name)

    async def prepare(self, exchange: Exchange) -> None:
        """Before the exchange is known to anybody: a place for what will wait."""
        if exchange.name not in self._logs:
            view = (
                await self._vhost.store.delay_view(self._vhost.name, STREAM_PREFIX + exchange.name)
                if exchange.durable
                else View(MemoryLog(self._vhost.spill), self._vhost.flushes, durable=False)
            )
            self._logs[exchange.name] = DelayLog(self._vhost, exchange, view)

    def load(self, exchange: Exchange) -> None:
        view = self._vhost.store.find_delay_view(self._vhost.name, STREAM_PREFIX + exchange.name)
        if view is not None:
            self._logs[exchange.name] = DelayLog(self._vhost, exchange, view)

    def route(
        self,
        exchange: Exchange,
        message: Message,
        now_ms: int,
        keys: Sequence[str],
        headers: Mapping[str, Any] | None = None,
    ) -> Routed:
        """Where a message goes now. Whichever exchange that delays it comes to, by bindings too, keeps it until it is
        due. `keys`: all that it goes by, its own first."""
        headers = message.headers() if headers is None else headers
        wanted = _delay_of(headers.get("x-delay"))
        host = self._vhost
        routed = host.routing.route_message(exchange, keys, message, host.queues, headers, delays=wanted is not None)
        for delaying in routed.waits_in:
            self._logs[delaying.name].add(message, now_ms + min(wanted or 0, DELAY_MAX_MS), now_ms, keys)
        return routed

    async def forget(self, exchange: Exchange) -> None:
        log = self._logs.pop(exchange.name, None)
        if log is not None:
            log.close()
            if exchange.durable:
                await self._vhost.store.remove_delay_view(self._vhost.name, STREAM_PREFIX + exchange.name, log.view)

    def exchange_of(self, stream: str) -> str | None:
        """The exchange whose delayed messages are in a stream of that name."""
        name = stream.removeprefix(STREAM_PREFIX)
        found = self._logs.get(name) if name != stream else None
        return name if found is not None and found.view.durable else None

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
    """As RabbitMQ's plugin: its delay is negative from now on, so that it does not wait again where it dies."""
    delay = _delay_of(headers.get("x-delay"))
    return message if delay is None else message.with_headers(**{"x-delay": -delay})


def _delay_of(wanted: Any) -> int | None:
    """In milliseconds, of what a client has in x-delay; None when it is no delay."""
    if isinstance(wanted, str) and wanted.lstrip("-").isdecimal() and len(wanted) < 20:
        wanted = int(wanted)
    return wanted if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0 else None


def _keys_of(record: Record, headers: dict[str, Any]) -> list[str]:
    for name, value in record.headers:
        if name == KEYS_HEADER:
            return [to_text(key) for key in msgspec.msgpack.decode(value or b"", type=list[bytes])]
    return further_keys(headers)  # delayed by an earlier version


def _message_of(record: Record) -> Message:
    kept = tuple(pair for pair in record.headers if pair[0] in (AMQP_PROPERTIES_HEADER, AMQP_EXCHANGE_HEADER))
    return from_record(Record(record.offset, record.timestamp, record.key, record.value, kept))
