"""The entry point for appends: every batch enters a stream or a queue through `Appender`, and nowhere else.

It checks batches against the stream's rules, rewrites them where the settings demand it (compression, append time),
checks producer ids and transactions, applies back-pressure, and stages them in the log. Kafka, HTTP, Spark sinks and
the flush of the queues (AMQP publishes, dead letters, delayed messages) use it. The compiled Kafka path appends a batch
itself only if `AppendRules.is_plain` says that there is nothing to rewrite and the batch is an ordinary one; everything
unusual comes here. Only the markers that end transactions are written elsewhere: no client sends them.

Rejections are exceptions of headrace.errors; each listener maps their types to its protocol's codes.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from headrace.broker.streams import publish as publishing
from headrace.broker.streams.partition import Partition
from headrace.broker.streams.streams import Stream
from headrace.clock import Clock
from headrace.errors import (
    AppendTimeReserved,
    ControlBatchRefused,
    CorruptBatch,
    HeadraceError,
    InvalidProducerBatch,
    TransactionalIdRequired,
)
from headrace.log.commit.atomic_group import AtomicGroup
from headrace.log.commit.round import Ticket, TicketGroup
from headrace.log.log import Log
from headrace.log.memory.memory_log import MemoryLog
from headrace.log.shard import Shard
from headrace.record import codec
from headrace.record.batch.append_time import stamp_append_time
from headrace.record.batch.recompress import recompress
from headrace.record.layout import LOG_APPEND_TIME_BIT
from headrace.record.types import BatchInfo, Buffer

Batches = bytearray | memoryview


class Admission(Protocol):
    """Back-pressure, see pressure/pressure.py."""

    def admit(self, size: int) -> float:
        """Seconds that the publisher of `size` bytes must wait; raises Overloaded or DiskFull while paused."""


class ProducerSequences(Protocol):
    """Sequence numbers of producer ids, see transactions/producers.py."""

    def append(self, partition: Partition, data: Batches, infos: list[BatchInfo]) -> Ticket: ...


class TransactionAppends(Protocol):
    """See transactions/batches.py."""

    def name_of(self, producer_id: int) -> str | None: ...

    def check_append(self, producer_id: int, epoch: int, where: tuple[str, int]) -> None: ...

    def append(self, partition: Partition, data: Batches, infos: list[BatchInfo], where: tuple[str, int]) -> Ticket: ...


class Sender(NamedTuple):
    """What a request says about its sender, as far as transactional batches need it."""

    has_transactional_id: bool = False
    adds_partitions: bool = False  # a batch brings its partition into the transaction (KIP-890)
    authorize: Callable[[str], object] | None = None  # raises unless the user may write to the transactional id


NO_TRANSACTION = Sender()


class Published(Protocol):
    """A batch that a queue has built from messages, see queues/publish_batch.py."""

    buffers: list[bytearray]
    tickets: list[Ticket | None]
    error: HeadraceError | None


class HasLog(Protocol):
    """A view of a log."""

    @property
    def log(self) -> Any: ...


class Appended(NamedTuple):
    ticket: Ticket
    messages: int
    append_time_ms: int  # -1 where the records keep their own timestamps


class Appender:
    """Owned by the broker and used on its event loop."""

    def __init__(
        self,
        shard: Shard,
        clock: Clock,
        admission: Admission,
        producers: ProducerSequences,
        transactions: TransactionAppends,
        *,
        decompressed_bytes_max: int,
    ) -> None:
        self._shard = shard
        self._clock = clock
        self._admission = admission
        self._transactions = transactions
        self._decompressed_bytes_max = decompressed_bytes_max
        # For the compiled path: one batch of a producer with an id and a sequence number, in no transaction.
        self.append_sequenced = producers.append

    # Batches that a client built (Kafka).

    def append(
        self,
        stream: Stream,
        partition: Partition,
        data: Batches,
        infos: list[BatchInfo],
        sender: Sender = NO_TRANSACTION,
    ) -> Appended:
        """Stage batches whose bytes were validated; `infos` describes them.

        Raises CorruptBatch or one of its kinds for batches that a client may not send, and the errors of producer ids
        and transactions.
        """
        if not infos:
            raise CorruptBatch("the request holds no complete batch")
        for info in infos:
            if info.attributes & LOG_APPEND_TIME_BIT:  # its records carry no time that could be checked against
                raise AppendTimeReserved("only the broker may set LogAppendTime")
        append_time_ms = -1
        rules = stream.rules
        if not rules.is_plain:
            if rules.stamps_time:
                append_time_ms = self._clock.now_ms()
            data = self._rewritten(data, infos, rules.codec, append_time_ms)
            infos = codec.scan(data, verify_crc=False)
        check_producer(infos)
        messages = sum(info.count for info in infos)
        return Appended(self._stage(stream, partition, data, infos, sender), messages, append_time_ms)

    def _rewritten(self, data: Batches, infos: list[BatchInfo], wanted: int | None, append_time_ms: int) -> Batches:
        if wanted is not None and any(info.codec != wanted for info in infos):
            data = recompressed(data, infos, wanted, self._decompressed_bytes_max)
            infos = codec.scan(data, verify_crc=False)
        if append_time_ms >= 0:
            data = bytearray(data)
            for info in infos:
                stamp_append_time(memoryview(data)[info.position : info.end], append_time_ms)
        return data

    def _stage(
        self, stream: Stream, partition: Partition, data: Batches, infos: list[BatchInfo], sender: Sender
    ) -> Ticket:
        first = infos[0]
        if first.producer_id < 0:
            return partition.append(data, infos)
        if first.is_transactional:
            if not sender.has_transactional_id:
                raise TransactionalIdRequired("a transactional batch came in a request without a transactional id")
            # The id that the producer has, whatever id the request names.
            name = self._transactions.name_of(first.producer_id) if sender.authorize is not None else None
            if sender.authorize is not None and name is not None:
                sender.authorize(name)
            where = (stream.name, partition.number)
            if sender.adds_partitions:
                return self._transactions.append(partition, data, infos, where)
            self._transactions.check_append(first.producer_id, first.producer_epoch, where)
        return self.append_sequenced(partition, data, infos)

    # Messages that become batches here (HTTP, schema registry).

    async def publish_messages(self, stream: Stream, messages: Sequence[publishing.Outgoing]) -> list[publishing.Place]:
        """Like `publish`, for messages that are not prepared yet: builds their batches on the event loop."""
        shape = publishing.StreamShape.of(stream)
        return await self.publish(stream, publishing.prepare(shape, messages, self._clock.now_ms(), stream.next_turn()))

    async def publish(self, stream: Stream, prepared: Sequence[publishing.Prepared]) -> list[publishing.Place]:
        """Store prepared batches, all or none if they fit one journal entry; durable on return.

        Returns (partition, offset) of each message in the order given."""
        delay_s = self._admission.admit(sum(len(part.batches) for part in prepared))
        if delay_s:
            await asyncio.sleep(delay_s)
        return await publishing.publish(self._shard, stream, prepared)

    # Batches that queues built from messages. The listener has authorized and throttled the publishers, and the broker
    # has written the records: only the log itself can refuse them.

    @staticmethod
    def append_published(published: Iterable[tuple[HasLog, Published]], tickets: TicketGroup) -> None:
        """Stage everything that one flush has taken from the queues. A batch that is refused at once has its error."""
        for view, batch in published:
            log = view.log
            for data in batch.buffers:
                try:
                    ticket = log.append(data)
                except HeadraceError as error:
                    batch.tickets.append(None)
                    batch.error = error
                else:
                    batch.tickets.append(ticket)
                    tickets.add(ticket)

    @staticmethod
    def append_transient(log: MemoryLog, data: bytearray) -> None:
        """Append a batch of a queue in memory; its messages are readable on return."""
        log.append(data)

    # Batches that become durable together with other changes (Spark sinks, dead letters, AMQP transactions).

    @staticmethod
    def stage_in(group: AtomicGroup, log: Log, data: bytearray, infos: Sequence[BatchInfo] = ()) -> Ticket:
        """Stage batches in a group of changes; the caller commits the group. Batches that the broker has built need no
        infos."""
        check_anonymous(infos)
        return group.append(log, data, infos)

    @staticmethod
    def check(log: Log, infos: list[BatchInfo]) -> None:
        """Raises as `stage_in` would."""
        check_anonymous(infos)
        log.check_append(bytearray(), infos)


def check_producer(infos: Sequence[BatchInfo]) -> None:
    """Raises unless the batches may be in one request: a producer id needs a sequence number, and a batch alone."""
    producer_id = infos[0].producer_id
    for info in infos:
        if info.is_control:
            raise ControlBatchRefused("clients may not send control batches")
        if len(infos) > 1 and info.producer_id >= 0:
            raise InvalidProducerBatch("an idempotent producer sends one batch per partition and request")
        if info.is_transactional and producer_id < 0:
            raise InvalidProducerBatch("a transactional batch needs a producer id")
        if producer_id >= 0 and info.base_sequence < 0:
            raise InvalidProducerBatch("an idempotent producer must number its batches")


def check_anonymous(infos: Iterable[BatchInfo]) -> None:
    """Raises if a batch names a producer or belongs to a transaction: sinks have their own exactly-once ledger."""
    for info in infos:
        if info.is_control or info.is_transactional or info.producer_id >= 0:
            raise InvalidProducerBatch("staged batches must not have a producer id or a transaction", info.position)


def recompressed(data: Batches, infos: list[BatchInfo], wanted: int, decompressed_bytes_max: int) -> bytearray:
    """The batches, all of them under the codec `wanted`. Safe in any thread."""
    view = memoryview(data)
    batches: list[Buffer] = [
        recompress(view, info, wanted, only_if_smaller=False, decompressed_bytes_max=decompressed_bytes_max)
        for info in infos
    ]
    return bytearray().join(batches)
