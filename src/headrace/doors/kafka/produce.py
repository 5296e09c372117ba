"""Produce: batches are checked and stored as they came, and answered when the log says they are safe."""

from functools import partial
from typing import TYPE_CHECKING, Any

from headrace.broker import rewriting
from headrace.broker.partition import Partition
from headrace.broker.streams import Stream
from headrace.doors.kafka.access import Access
from headrace.doors.kafka.connection import Request
from headrace.doors.kafka.errors import Code, code_of
from headrace.errors import CorruptBatch, HeadraceError, InvalidInput
from headrace.record import codec
from headrace.record.layout import CODECS, CONTROL_BIT, MAGIC, MAGIC_AT, TRANSACTIONAL_BIT
from headrace.record.types import BatchInfo
from headrace.wire.kafka import hot

if TYPE_CHECKING:
    from headrace.doors.kafka.door import KafkaDoor

Result = tuple[int, int, int, int, int, str | None]
ACKS = (-1, 0, 1)
NO_BUFFER = bytearray()


class Pending:
    """The results of one request, filled in as tickets resolve."""

    __slots__ = ("acks", "door", "keeps_buffer", "left", "request", "topics")

    def __init__(self, door: "KafkaDoor", request: Request, acks: int) -> None:
        self.door = door
        self.request = request
        self.acks = acks
        self.topics: list[tuple[str | bytes, list[Result]]] = []
        self.left = 1  # held by the handler, so that tickets that are done at once do not answer early
        self.keeps_buffer = True  # to be used again

    def failed(
        self, results: list[Result], number: int, error: HeadraceError, code: Code | None = None
    ) -> None:
        results.append((number, code if code is not None else code_of(error), -1, -1, -1, str(error)))

    def stored(
        self, results: list[Result], number: int, partition: Partition, stamp_ms: int, ticket: Any
    ) -> None:
        """A ticket of the request has resolved."""
        if ticket.error is not None:
            self.failed(results, number, ticket.error)
            self.keeps_buffer = False  # after a failure a write of it may still be under way
        else:
            results.append((number, 0, ticket.base_offset, stamp_ms, partition.log.start_offset, None))
        self.one_done()

    def one_done(self) -> None:
        self.left -= 1
        if self.left:
            return
        request, door = self.request, self.door
        buffer, request.buffer = request.buffer, NO_BUFFER
        if self.keeps_buffer:
            door.pool.give(buffer)
        wait_ms = door.throttle_ms(request.size)
        if self.acks != 0:
            request.answer(
                (hot.produce_response(request.version, request.correlation_id, self.topics, wait_ms),)
            )
        elif any(result[1] for _, results in self.topics for result in results):
            request.fail(InvalidInput("a batch without acks was refused"))
        if wait_ms:
            request.connection.throttle(wait_ms)


def produce(door: "KafkaDoor", request: Request) -> None:
    _, acks, _, topics = hot.parse_produce(request.buffer, request.position, request.size, request.version)
    pending = Pending(door, request, acks)
    door.flow.published(request.connection)
    if door.broker.shard.pending_bytes > door.broker.pressure.limits.pending_bytes:
        request.connection.throttle(1000)
    view = memoryview(request.buffer)
    access = request.connection.access
    found = door.topics if access is None else access.writes
    for topic, parts in topics:
        results: list[Result] = []
        pending.topics.append((topic, results))
        for number, start, end in parts:
            try:
                if acks not in ACKS:
                    raise InvalidInput(f"acks={acks}")
                stream = found.find(topic)
                if start < 0 or start == end:
                    raise CorruptBatch("no records")
                partition = stream.partition(number)
                ticket, stamp_ms = append(door, stream, partition, view[start:end], access)
            except HeadraceError as error:
                code = Code.INVALID_REQUIRED_ACKS if acks not in ACKS else refusal(error, view[start:end])
                pending.failed(results, number, error, code)
                continue
            pending.left += 1
            ticket.add_callback(partial(pending.stored, results, number, partition, stamp_ms))
    if acks == 0:
        request.answer(())
    pending.one_done()


def append(
    door: "KafkaDoor", stream: Stream, partition: Partition, data: memoryview, access: Access | None
) -> tuple[Any, int]:
    """(the ticket, the broker's time if the records carry it, else -1)."""
    log = partition.log
    infos = codec.validate(
        data,
        batch_bytes_max=log.settings.batch_bytes_max,
        decompressed_bytes_max=door.config.decompressed_bytes_max,
        repair=True,  # sarama leaves the max timestamp empty; Kafka puts it right, too
    )
    if not infos:
        raise CorruptBatch("no whole batch")
    door.stats.messages_in += infos[0].count if len(infos) == 1 else sum([info.count for info in infos])
    door.stats.bytes_in += len(data)
    first = infos[0]
    stamp_ms = -1
    stored: bytearray | memoryview = data
    if "compression" in stream.document.config or stream.settings.timestamp_type == "append":
        stamp_ms, stored = rewritten(door, stream, data, infos)
        infos = codec.scan(stored, verify_crc=False)
    for info in infos:
        if info.attributes & CONTROL_BIT:
            raise CorruptBatch("control batches are the broker's")
    is_transactional = first.attributes & TRANSACTIONAL_BIT
    if first.producer_id < 0:
        if is_transactional:
            raise CorruptBatch("a transactional batch without a producer")
        return log.append(stored, infos), stamp_ms
    if is_transactional:
        # The id that the producer has, whichever the request names.
        name = door.coordination.transactions.name_of(first.producer_id) if access is not None else None
        if access is not None and name is not None:
            access.transaction(name)
        door.coordination.transactions.check_append(
            first.producer_id, first.producer_epoch, (stream.name, partition.number)
        )
    return door.coordination.producers.append(log, stored, infos), stamp_ms


def rewritten(
    door: "KafkaDoor", stream: Stream, data: memoryview, infos: list[BatchInfo]
) -> tuple[int, bytearray]:
    """The batches as the topic's settings want them, and the broker's time if that is what they carry."""
    wanted = CODECS[stream.settings.compression] if "compression" in stream.document.config else None
    stamp_ms = door.broker.clock.now_ms() if stream.settings.timestamp_type == "append" else -1
    result = bytearray()
    for info in infos:
        batch: bytearray | memoryview = data[info.position : info.end]
        if wanted is not None and info.codec != wanted:
            batch = rewriting.recompress(
                data[info.position : info.end], wanted, door.config.decompressed_bytes_max
            )
        if stamp_ms >= 0:
            rewriting.stamp(batch, stamp_ms)
        result += batch
    return stamp_ms, result


def refusal(error: HeadraceError, data: memoryview) -> Code | None:
    """Kafka tells three kinds of bad batch apart; ours is one error with a reason."""
    if not isinstance(error, CorruptBatch):
        return None
    if len(data) > MAGIC_AT and data[MAGIC_AT] < MAGIC:
        return Code.UNSUPPORTED_FOR_MESSAGE_FORMAT
    if "CRC" in str(error) or "checksum" in str(error):
        return Code.CORRUPT_MESSAGE
    return Code.INVALID_RECORD
