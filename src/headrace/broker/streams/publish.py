"""Builds batches of single messages: chooses their partitions, one batch per partition, confirmed together.

All messages of one call are stored or none is: a call that spans partitions is one journal entry, so an error is true
for every message in it. Only a call that is too large for one journal entry (half a journal file) is stored partition
by partition. Used through append.py.
"""

from collections.abc import Sequence
from typing import NamedTuple

from headrace.broker.streams.streams import Stream
from headrace.errors import BatchTooLarge, HeadraceError, InvalidInput, PartitionNotFound, PartlyStored
from headrace.log.commit.round import Ticket
from headrace.log.settings import StreamSettings
from headrace.log.shard import Shard
from headrace.record import codec
from headrace.record.layout import CODECS
from headrace.record.types import BatchInfo

Headers = Sequence[tuple[str, bytes | None]]
# key, value, headers, partition (None = choose), timestamp (-1 = now)
Outgoing = tuple[bytes | None, bytes | None, Headers, int | None, int]
Place = tuple[int, int]  # partition, offset

BATCH_OVERHEAD = 1024


class StreamShape(NamedTuple):
    """What `prepare` needs of a stream; a stream that does not exist yet has a shape, too."""

    name: str
    partitions: int
    settings: StreamSettings

    @classmethod
    def of(cls, stream: Stream) -> "StreamShape":
        return cls(stream.name, len(stream.partitions), stream.settings)


class Prepared(NamedTuple):
    """The batches for one partition, and the indexes of their messages in the request, in order."""

    partition: int
    batches: bytearray
    infos: list[BatchInfo]
    indexes: list[int]


class _Building:
    """The batches of one partition under construction; a full batch is followed by another."""

    __slots__ = ("_codec", "_done", "_writer", "indexes")

    def __init__(self, timestamp_ms: int, capacity: int, bytes_max: int, compression: str) -> None:
        self._writer = codec.BatchWriter(timestamp_ms, capacity, bytes_max=bytes_max)
        self._codec = CODECS[compression]
        self._done: list[bytearray] = []
        self.indexes: list[int] = []

    def add(self, index: int, key: bytes | None, value: bytes | None, headers: Headers, stamp: int) -> None:
        try:
            self._writer.append(key, value, headers, stamp)
        except BatchTooLarge:
            if self._writer.count == 0:
                raise  # the message alone is too large
            self._done.append(self._writer.finish(self._codec))
            self._writer.append(key, value, headers, stamp)
        self.indexes.append(index)

    def finish(self, partition: int) -> Prepared:
        last = self._writer.finish(self._codec)
        batches = bytearray().join([*self._done, last]) if self._done else last
        return Prepared(partition, batches, codec.scan(batches, verify_crc=False), self.indexes)


def prepare(shape: StreamShape, messages: Sequence[Outgoing], now_ms: int, turn: int) -> list[Prepared]:
    """Pure function, safe in any thread. `turn` is the partition for messages without a key."""
    settings = shape.settings
    count = shape.partitions
    building: dict[int, _Building] = {}
    capacity = BATCH_OVERHEAD + (128 * len(messages) if len(messages) < 500 else 64 * 1024)
    for index, (key, value, headers, partition, stamp) in enumerate(messages):
        if key is None and settings.is_compacted:
            text = f"message {index} has no key: topic {shape.name!r} is compacted, so every message needs one"
            raise InvalidInput(text)
        if partition is None:
            partition = turn if key is None else codec.partition_for(key, count)
        elif not 0 <= partition < count:
            raise PartitionNotFound(shape.name, partition, count)
        target = building.get(partition)
        if target is None:
            target = building[partition] = _Building(now_ms, capacity, settings.batch_bytes_max, settings.compression)
        target.add(index, key, value, headers, stamp)
    return [target.finish(partition) for partition, target in building.items()]


async def publish(shard: Shard, stream: Stream, prepared: Sequence[Prepared]) -> list[Place]:
    """(partition, offset) of each message in the order given; durable on return."""
    tickets = await _store(shard, stream, prepared)
    places: list[Place] = [(0, 0)] * sum(len(part.indexes) for part in prepared)
    for part, ticket in zip(prepared, tickets, strict=True):
        for step, index in enumerate(part.indexes):
            places[index] = (part.partition, ticket.base_offset + step)
    return places


async def _store(shard: Shard, stream: Stream, prepared: Sequence[Prepared]) -> list[Ticket]:
    logs = [stream.partitions[part.partition].log for part in prepared]
    if len(prepared) > 1:
        group = shard.group()
        tickets = [group.append(log, part.batches, part.infos) for log, part in zip(logs, prepared, strict=True)]
        try:
            committed = group.commit()
        except BatchTooLarge:
            pass  # too large for one journal entry, but not for the logs: store them one by one
        else:
            await committed
            return tickets
    tickets = [log.append(part.batches, part.infos) for log, part in zip(logs, prepared, strict=True)]
    errors = [ticket.error for ticket in await _all_done(tickets) if ticket.error is not None]
    if errors:
        if len(errors) == len(tickets):
            raise errors[0]
        raise PartlyStored(len(errors), len(tickets), str(errors[0])) from errors[0]
    return tickets


async def _all_done(tickets: list[Ticket]) -> list[Ticket]:
    for ticket in tickets:
        try:
            await ticket
        except HeadraceError:
            pass  # the caller looks at the errors of all tickets
    return tickets
