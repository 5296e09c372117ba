"""A stream seen over AMQP: each consumer reads from its own offset, nothing is removed by reading."""

import asyncio
from collections import deque
from collections.abc import Iterable
from typing import Any

from headrace.broker.queues.consumers import Consumer
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.queue_arguments import QueueArguments, max_age_ms
from headrace.broker.queues.view import View
from headrace.broker.streams.partition import ReadWaits
from headrace.broker.types.message import Message, from_record
from headrace.errors import ArgumentMismatch, NotSupported
from headrace.record import codec
from headrace.record.amqp.properties import Timestamp
from headrace.record.types import Record

READ_BYTES = 128 * 1024
AHEAD_BYTES = 256 * 1024
RECORD_BYTES = 256  # what one takes besides its key and value, and so does a header
TURN_MESSAGES = 500


class Reader:
    """Where one consumer of a stream is. Stands where a view stands for a queue: nothing settles in it."""

    level = 0

    def __init__(self, log: Any, offset: int) -> None:
        self.log = log
        self.next = offset
        self.waiter: Any = None
        self.is_loading = False
        self.ahead_max = 1
        self._ahead: deque[Record] = deque()  # was read, and there is no credit for it yet

    def taken_ahead(self, most: int) -> list[Record]:
        while self._ahead and self._ahead[0].offset < self.next:  # retention was faster
            self._ahead.popleft()
        return [self._ahead.popleft() for _ in range(min(most, len(self._ahead)))]

    def keep_ahead(self, records: Iterable[Record]) -> None:
        """To find them again takes a walk through their batch, and unfolding it where it is compressed: for a consumer
        that acks them one by one, each time. Twice as many the next time, as far as they are small."""
        room = AHEAD_BYTES
        for record in records:
            room -= _bytes_of(record)
            if room < 0:
                break
            self._ahead.append(record)
        self.ahead_max = min(TURN_MESSAGES, 2 * max(1, len(self._ahead)))


def _bytes_of(record: Record) -> int:
    headers = sum(RECORD_BYTES + len(name) + len(value or b"") for name, value in record.headers)
    return RECORD_BYTES + len(record.key or b"") + len(record.value or b"") + headers


class StreamQueue(Queue):
    is_topic = False  # a topic that nobody declared as a queue: it is here because it was asked for

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._readers: dict[int, Reader] = {}

    @property
    def ready(self) -> int:
        return int(self.view.log.stable_end - self.view.log.start_offset)

    @property
    def unacked(self) -> int:
        return 0

    def apply_policy(self, policy: QueueArguments) -> None:
        """A stream's bounds are its retention: the tighter of its own settings and the policy's."""
        self.policy = policy
        stream = self.vhost.store.streams.find(self.name, self.vhost.name)
        if stream is not None:
            stream.bound(policy.max_age_ms, policy.bytes_max)

    def start_offset(self, wanted: Any, now_ms: int) -> int:
        """What x-stream-offset asks for: first, last, next, a number, a time, or how long ago ("1h"). ReadWaits where
        that is to be looked up in something that is not in memory; it is asked again with the same now_ms, or what was
        loaded would not be what it needs then."""
        log = self.view.log
        if wanted is None or wanted == "next":
            return int(log.stable_end)
        if wanted == "first":
            return int(log.start_offset)
        if wanted == "last":
            # RabbitMQ: the last chunk. Here: the last batch.
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

    def attach(self, consumer: Consumer, offset: int) -> None:
        """Where it begins; called with add_consumer, in one turn of the loop."""
        self._readers[id(consumer)] = Reader(self.view.log, offset)

    def reader(self, consumer: Consumer) -> Any:
        return self._readers[id(consumer)]

    def remove_consumer(self, consumer: Consumer) -> asyncio.Task[None] | None:
        reader = self._readers.pop(id(consumer), None)
        if reader is not None and reader.waiter is not None:
            reader.waiter.cancel()
        return super().remove_consumer(consumer)

    def dispatch(self) -> None:
        self._scheduled = False
        if self.is_deleted:
            return
        again = False
        for consumer in self.consumers:
            again = self._feed(consumer, self._readers[id(consumer)]) or again
        if again:
            self.wake()

    def _feed(self, consumer: Consumer, reader: Reader) -> bool:
        """True when there is more to do in another turn."""
        left = min(consumer.credit(), TURN_MESSAGES)
        if left <= 0:
            return False
        log = reader.log
        reader.next = max(reader.next, log.start_offset)
        if reader.next >= log.stable_end:
            if reader.waiter is None:
                reader.waiter = log.wait(reader.next, lambda: self._arrived(reader))
            return False
        records, after = reader.taken_ahead(left), reader.next
        if not records:
            try:
                chunk = self.view.committed(log.read_now(reader.next, READ_BYTES))
            except ReadWaits as cold:
                if not reader.is_loading:
                    reader.is_loading = True
                    cold.then(lambda: self._loaded_for(reader))
                return False
            limit = left + reader.ahead_max
            found = codec.records(chunk.data, from_offset=reader.next, to_offset=chunk.next_offset, limit=limit)
            records, after = found[:left], chunk.next_offset
            reader.keep_ahead(found[left:])
        for record in records:
            message = from_record(record).with_headers(**{"x-stream-offset": record.offset})
            reader.next = record.offset + 1
            self.delivered += 1
            consumer.deliver_message(reader, record.offset, message, False)  # type: ignore[arg-type]
        if len(records) < left:
            reader.next = max(reader.next, after)
        return True

    def _loaded_for(self, reader: Reader) -> None:
        reader.is_loading = False
        self.wake()

    def _arrived(self, reader: Reader) -> None:
        reader.waiter = None
        self.wake()

    async def prepare_get(self) -> None:
        """Nothing is handed out: see get."""

    def get(self) -> tuple[View, int, Message, bool] | None:
        raise NotSupported(f"basic.get is not supported by stream queues (queue '{self.name}')")

    def settle(self, view: View, start: int, end: int) -> None:
        """Only credit comes back."""

    def give_back(self, view: View, offset: int, *, counts: bool = True) -> None:
        """A stream is read again by attaching at an offset, not by returning messages."""

    def give_back_run(self, view: View, start: int, end: int) -> None: ...

    def reject(self, view: View, offset: int, reason: str = "rejected") -> None: ...

    async def purge(self) -> int:
        raise NotSupported(f"queue.purge is not supported by stream queues (queue '{self.name}')")

    def drop_expired(self) -> None: ...

    def drop_overflow(self) -> None: ...
