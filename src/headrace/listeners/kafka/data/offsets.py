"""ListOffsets, OffsetForLeaderEpoch and DeleteRecords: the offsets at which logs start and end."""

from functools import partial
from typing import Any

from headrace.broker.streams.partition import Partition, when_loaded
from headrace.errors import OffsetOutOfRange
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.errors import FencedLeaderEpoch, NotDeleted, UnknownLeaderEpoch, UnsupportedVersion
from headrace.listeners.kafka.per_partition import per_partition
from headrace.listeners.kafka.request_pipeline import Request

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL = -4  # the same as EARLIEST: everything is local
LATEST_TIERED = -5  # none: nothing is remote
EARLIEST_PENDING_UPLOAD = -6
SINCE = {LATEST: 0, EARLIEST: 0, MAX_TIMESTAMP: 7, EARLIEST_LOCAL: 8, LATEST_TIERED: 9, EARLIEST_PENDING_UPLOAD: 11}
NEVER = 1000  # a version of ListOffsets that does not exist
READ_COMMITTED = 1
NONE = -1


async def list_offsets(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    committed = fields.isolation_level == READ_COMMITTED
    readable = context.access_of(request).reads

    async def find(topic: Any, wanted: Any) -> dict[str, Any]:
        partition = readable.partition(topic.name, wanted.partition_index)
        check_epoch(partition, wanted.current_leader_epoch)
        if wanted.timestamp < 0 and request.version < SINCE.get(wanted.timestamp, NEVER):
            raise UnsupportedVersion(f"timestamp {wanted.timestamp} in version {request.version}")
        timestamp, offset = await find_offset(partition, wanted.timestamp, committed)
        epoch = partition.epoch if offset >= 0 else NONE
        old_style = [offset] if offset >= 0 else []  # version 0 could ask for several
        return {"timestamp": timestamp, "offset": offset, "leader_epoch": epoch, "old_style_offsets": old_style}

    return {"topics": await per_partition(fields.topics, find, default={"timestamp": NONE, "offset": NONE})}


async def find_offset(partition: Partition, timestamp: int, committed: bool) -> tuple[int, int]:
    """(timestamp, offset) of a timestamp or one of the constants above; (-1, -1) if there is none."""
    end = partition.stable_end if committed else partition.end_offset
    if timestamp == LATEST:
        return NONE, end
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return NONE, partition.start_offset
    if timestamp < 0 and timestamp != MAX_TIMESTAMP:
        return NONE, NONE
    found = await (newest(partition) if timestamp == MAX_TIMESTAMP else first_at(partition, timestamp))
    if found is None or found[0] >= end:
        return NONE, NONE
    offset, at = found
    return at, offset


async def first_at(partition: Partition, timestamp: int) -> tuple[int, int] | None:
    """(offset, timestamp) of the first record at or after a time."""
    return await when_loaded(partial(partition.offset_for_timestamp_now, timestamp))


async def newest(partition: Partition) -> tuple[int, int] | None:
    """(offset, timestamp) of the record with the largest timestamp.

    If the log's max_timestamp belongs to no record that can be read, a binary search over times finds the largest: the
    index only answers "the first record at or after".
    """
    high = partition.max_timestamp
    best = await first_at(partition, max(0, high))
    if best is not None:
        return best
    best = await first_at(partition, 0)
    if best is None:
        return None
    low = best[1]
    while low < high:
        middle = (low + high + 1) // 2
        found = await first_at(partition, middle)
        if found is None:
            high = middle - 1
        else:
            best, low = found, max(middle, found[1])
    return best


def check_epoch(partition: Partition, epoch: int) -> None:
    """Raise if the client knows an older or newer leader epoch than the log's. -1: the client does not check."""
    if epoch < 0 or epoch == partition.epoch:
        return
    raise FencedLeaderEpoch(epoch) if epoch < partition.epoch else UnknownLeaderEpoch(epoch)


async def offset_for_leader_epoch(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    readable = context.access_of(request).reads

    async def find(topic: Any, wanted: Any) -> dict[str, Any]:
        partition = readable.partition(topic.topic, wanted.partition)
        check_epoch(partition, wanted.current_leader_epoch)
        if 0 <= wanted.leader_epoch <= partition.epoch:
            epoch, end = partition.epoch_end(wanted.leader_epoch)
            return {"leader_epoch": epoch, "end_offset": end}
        return {}  # the client has read another log

    return {"topics": await per_partition(fields.topics, find, topic_field="topic", index_field="partition")}


async def delete_records(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    configurable = context.access_of(request).configures

    async def delete(topic: Any, wanted: Any) -> dict[str, Any]:
        partition = configurable.partition(topic.name, wanted.partition_index)
        if partition.settings.cleanup_policy == "compact":
            raise NotDeleted(f"topic {topic.name!r} is compacted: its records cannot be deleted by offset")
        offset = partition.end_offset if wanted.offset == -1 else wanted.offset
        if offset < 0 or offset > partition.end_offset:
            raise OffsetOutOfRange(offset, partition.start_offset, partition.end_offset)
        if offset > partition.start_offset:
            await context.broker.segments.delete_before(partition, offset)
        return {"low_watermark": partition.start_offset}

    return {"topics": await per_partition(fields.topics, delete, default={"low_watermark": NONE})}
