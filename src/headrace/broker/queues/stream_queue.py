"""A stream over AMQP: each consumer reads from its own offset, and reading removes nothing."""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from headrace.broker.queues.consumers import Consumer
from headrace.broker.queues.dispatcher import Dispatcher
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.queue_arguments import QueueArguments, max_age_ms
from headrace.broker.queues.stream_filter import StreamFilter
from headrace.broker.queues.view import View
from headrace.broker.streams.partition import ReadWaits
from headrace.broker.types.message import Message, from_record
from headrace.errors import ArgumentMismatch, NotSupported
from headrace.record import codec
from headrace.record.amqp.properties import Int64, Timestamp
from headrace.record.types import Record

READ_BYTES = 128 * 1024
AHEAD_BYTES = 256 * 1024
RECORD_BYTES = 256  # estimated memory of a record, and of a header, beside their bytes
TURN_MESSAGES = 500


class Reader:
    """The position of one consumer. Passed to the consumer where a queue passes a view: nothing is settled in it."""

    level = 0

    def __init__(self, log: Any, offset: int, wanted: StreamFilter | None = None) -> None:
        self.log = log
        self.next = offset
        self.filter = wanted
        self.waiter: Any = None
        self.is_loading = False
        self.ahead_max = 1
        self._ahead: deque[Record] = deque()  # decoded, and waiting for credit

    def taken_ahead(self, count_max: int) -> list[Record]:
        while self._ahead and self._ahead[0].offset < self.next:  # deleted by retention
            self._ahead.popleft()
        return [self._ahead.popleft() for _ in range(min(count_max, len(self._ahead)))]

    def keep_ahead(self, records: Iterable[Record]) -> None:
        """Keep decoded records for the next credit. Otherwise a consumer that acks one by one would walk, and perhaps
        decompress, their batch again for each. Doubles the number for the next time, while they are small."""
        room = AHEAD_BYTES
        for record in records:
            room -= _memory_bytes(record)
            if room < 0:
                break
            self._ahead.append(record)
        self.ahead_max = min(TURN_MESSAGES, 2 * max(1, len(self._ahead)))


def _memory_bytes(record: Record) -> int:
    headers = sum(RECORD_BYTES + len(name) + len(value or b"") for name, value in record.headers)
    return RECORD_BYTES + len(record.key or b"") + len(record.value or b"") + headers


class StreamDispatcher(Dispatcher):
    """Delivers to each consumer from its own reader."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._readers: dict[int, Reader] = {}  # by id of the consumer

    def add(self, consumer: Consumer, reader: Reader) -> None:
        self._readers[id(consumer)] = reader

    def reader(self, consumer: Consumer) -> Reader:
        return self._readers[id(consumer)]

    def remove(self, consumer: Consumer) -> None:
        reader = self._readers.pop(id(consumer), None)
        if reader is not None and reader.waiter is not None:
            reader.waiter.cancel()

    def dispatch(self) -> None:
        self._schedule.begin()
        if self._backlog.is_closed:
            return
        has_more = False
        for consumer in self._schedule.consumers:
            has_more = self._feed(consumer, self._readers[id(consumer)]) or has_more
        if has_more:
            self._schedule.wake()

    def _feed(self, consumer: Consumer, reader: Reader) -> bool:
        """Whether there may be more to deliver in the next iteration."""
        left = min(consumer.credit(), TURN_MESSAGES)
        if left <= 0:
            return False
        log = reader.log
        reader.next = max(reader.next, log.start_offset)
        if reader.next >= log.stable_end:
            if reader.waiter is None:
                reader.waiter = log.wait(reader.next, lambda: self._reader_arrived(reader))
            return False
        records, after = reader.taken_ahead(left), reader.next
        if not records:
            try:
                chunk = self._backlog.views[-1].reader.committed(log.read_now(reader.next, READ_BYTES))
            except ReadWaits as cold:
                if not reader.is_loading:
                    reader.is_loading = True
                    cold.then(lambda: self._reader_loaded(reader))
                return False
            limit = left + reader.ahead_max
            found = codec.records(chunk.data, from_offset=reader.next, to_offset=chunk.next_offset, limit=limit)
            records, after = found[:left], chunk.next_offset
            reader.keep_ahead(found[left:])
        for record in records:
            reader.next = record.offset + 1
            message = from_record(record)
            if reader.filter is not None and not reader.filter.matches(message):
                continue
            message = message.with_headers(**{"x-stream-offset": Int64(record.offset)})
            self.delivered += 1
            consumer.deliver_message(reader, record.offset, message, False)  # type: ignore[arg-type]
        if len(records) < left:
            reader.next = max(reader.next, after)
        return True

    def _reader_loaded(self, reader: Reader) -> None:
        reader.is_loading = False
        self._schedule.wake()

    def _reader_arrived(self, reader: Reader) -> None:
        reader.waiter = None
        self._schedule.wake()


class StreamQueue(Queue):
    """A queue of type stream, or a topic. `set_retention` applies a policy's max-age and max-length-bytes."""

    dispatcher: StreamDispatcher

    def __init__(
        self, *args: Any, set_retention: Callable[[int | None, int | None], None], is_topic: bool, **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self._set_retention = set_retention
        self.is_topic = is_topic  # never declared as a queue: created when a client first named it

    def _make_dispatcher(self) -> StreamDispatcher:
        return StreamDispatcher(self.policy, self.backlog, self.limits, self._schedule)

    @property
    def ready(self) -> int:
        return int(self.view.log.stable_end - self.view.log.start_offset)

    @property
    def unacked(self) -> int:
        return 0

    def apply_policy(self, policy: QueueArguments) -> None:
        """The limits of a stream are its retention: the tighter of its own settings and the policy's."""
        self.policy = self.dispatcher.policy = self.limits.policy = policy
        self.lifetime.expires_ms = policy.expires_ms
        self._set_retention(policy.max_age_ms, policy.bytes_max)

    def start_offset(self, wanted: Any, now_ms: int) -> int:
        """Resolve x-stream-offset: first, last, next, an offset, a timestamp or an age such as "1h".

        Raises ReadWaits if the disk must be read. The caller must then repeat the call with the same now_ms, or another
        part of the log would be needed.
        """
        log = self.view.log
        if wanted is None or wanted == "next":
            return int(log.stable_end)
        if wanted == "first":
            return int(log.start_offset)
        if wanted == "last":
            # RabbitMQ starts with the last chunk, we with the last batch.
            end = log.stable_end
            return int(log.read_now(end - 1).base_offset) if end > log.start_offset else int(end)
        age_ms = max_age_ms(wanted)
        if isinstance(wanted, Timestamp) or age_ms is not None:
            since = int(wanted) * 1000 if age_ms is None else max(0, now_ms - age_ms)
            found = log.offset_for_timestamp_now(since)
            return int(log.stable_end if found is None else found[0])
        if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted >= 0:
            return int(min(max(wanted, log.start_offset), log.stable_end))
        raise ArgumentMismatch(f"invalid arg 'x-stream-offset': {wanted!r}")

    def attach(self, consumer: Consumer, offset: int, wanted: StreamFilter | None = None) -> None:
        """Set where the consumer starts. Must be followed by add_consumer in the same event-loop iteration."""
        self.dispatcher.add(consumer, Reader(self.view.log, offset, wanted))

    def reader(self, consumer: Consumer) -> Reader:
        return self.dispatcher.reader(consumer)

    def remove_consumer(self, consumer: Consumer) -> asyncio.Task[None] | None:
        self.dispatcher.remove(consumer)
        return super().remove_consumer(consumer)

    async def prepare_get(self) -> None:
        """`get` is refused: nothing to prepare."""

    def get(self) -> tuple[View, int, Message, bool] | None:
        raise NotSupported(f"basic.get is not supported by stream queues (queue '{self.name}')")

    async def purge(self) -> int:
        raise NotSupported(f"queue.purge is not supported by stream queues (queue '{self.name}')")

    # Acks only give credit. To read messages again, a consumer attaches at an earlier offset.

    def settle(self, view: View, start: int, end: int) -> None: ...

    def give_back(self, view: View, offset: int, *, counts: bool = True) -> None: ...

    def give_back_run(self, view: View, start: int, end: int) -> None: ...

    def reject(self, view: View, offset: int, reason: str = "rejected") -> None: ...
