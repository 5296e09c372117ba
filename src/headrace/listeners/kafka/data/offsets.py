"""Where logs begin and end, by time and by epoch, and moving their beginning."""

from functools import partial
from typing import Any

from headrace.broker.cooperative.yielding import YieldEvery
from headrace.broker.streams.partition import Partition, when_loaded
from headrace.broker.upkeep.segments import delete_before
from headrace.errors import HeadraceError, OffsetOutOfRange
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.errors import Code, NotDeleted, code_of
from headrace.listeners.kafka.request_pipeline import Request

LATEST = -1
EARLIEST = -2
MAX_TIMESTAMP = -3
EARLIEST_LOCAL = -4  # everything is local
LATEST_TIERED = -5  # nothing is elsewhere
EARLIEST_PENDING_UPLOAD = -6
SINCE = {LATEST: 0, EARLIEST: 0, MAX_TIMESTAMP: 7, EARLIEST_LOCAL: 8, LATEST_TIERED: 9, EARLIEST_PENDING_UPLOAD: 11}
NEVER = 1000  # a version of ListOffsets that is far away
READ_COMMITTED = 1
NONE = -1


async def list_offsets(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    committed = fields.isolation_level == READ_COMMITTED
    found = context.access_of(request).reads
    topics = []
    turns = YieldEvery()
    for topic in fields.topics:
        parts = []
        async for wanted in turns.each(topic.partitions):
            answer: dict[str, Any] = {
                "partition_index": wanted.partition_index,
                "timestamp": NONE,
                "offset": NONE,
            }
            try:
                partition = found.partition(topic.name, wanted.partition_index)
                check = epoch_error(partition, wanted.current_leader_epoch)
                if check is not None:
                    answer["error_code"] = check
                elif wanted.timestamp < 0 and request.version < SINCE.get(wanted.timestamp, NEVER):
                    answer["error_code"] = Code.UNSUPPORTED_VERSION  # it means nothing to who sends it
                else:
                    timestamp, offset = await find_offset(partition, wanted.timestamp, committed)
                    epoch = partition.log.epoch if offset >= 0 else NONE
                    answer.update(timestamp=timestamp, offset=offset, leader_epoch=epoch)
                    answer["old_style_offsets"] = [offset] if offset >= 0 else []  # version 0 could ask for several
            except HeadraceError as error:
                answer["error_code"] = code_of(error)
            parts.append(answer)
        topics.append({"name": topic.name, "partitions": parts})
        await turns.rest()
    return {"topics": topics}


async def find_offset(partition: Partition, timestamp: int, committed: bool) -> tuple[int, int]:
    """(timestamp, offset), (-1, -1) if there is none."""
    log = partition.log
    end = log.stable_end if committed else log.visible_end
    if timestamp == LATEST:
        return NONE, end
    if timestamp in (EARLIEST, EARLIEST_LOCAL):
        return NONE, log.start_offset
    if timestamp < 0 and timestamp != MAX_TIMESTAMP:
        return NONE, NONE
    found = await (newest(partition) if timestamp == MAX_TIMESTAMP else first_at(partition, timestamp))
    if found is None or found[0] >= end:
        return NONE, NONE
    offset, at = found
    return at, offset


async def first_at(partition: Partition, timestamp: int) -> tuple[int, int] | None:
    """(offset, timestamp) of the first record at or after a time."""
    return await when_loaded(partial(partition.log.offset_for_timestamp_now, timestamp))


async def newest(partition: Partition) -> tuple[int, int] | None:
    """(offset, timestamp) of the record with the largest one. Where what says it is no record that can be read, halves
    the range of times, as the index answers 'first at or after'."""
    high = partition.log.max_timestamp
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


def epoch_error(partition: Partition, epoch: int) -> Code | None:
    """A client whose knowledge of the log is older, or newer, than the log."""
    if epoch < 0 or epoch == partition.log.epoch:
        return None
    return Code.FENCED_LEADER_EPOCH if epoch < partition.log.epoch else Code.UNKNOWN_LEADER_EPOCH


async def offset_for_leader_epoch(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    found = context.access_of(request).reads
    topics = []
    turns = YieldEvery()
    for topic in fields.topics:
        parts = []
        async for wanted in turns.each(topic.partitions):
            answer: dict[str, Any] = {"partition": wanted.partition}
            try:
                partition = found.partition(topic.topic, wanted.partition)
                check = epoch_error(partition, wanted.current_leader_epoch)
                if check is not None:
                    answer["error_code"] = check
                elif 0 <= wanted.leader_epoch <= partition.log.epoch:  # else who asks has read another log
                    epoch, end = partition.log.epoch_end(wanted.leader_epoch)
                    answer.update(leader_epoch=epoch, end_offset=end)
            except HeadraceError as error:
                answer["error_code"] = code_of(error)
            parts.append(answer)
        topics.append({"topic": topic.topic, "partitions": parts})
        await turns.rest()
    return {"topics": topics}


async def delete_records(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    found = context.access_of(request).configures
    topics = []
    turns = YieldEvery()
    for topic in fields.topics:
        parts = []
        async for wanted in turns.each(topic.partitions):
            answer: dict[str, Any] = {"partition_index": wanted.partition_index, "low_watermark": NONE}
            try:
                partition = found.partition(topic.name, wanted.partition_index)
                log = partition.log
                if log.settings.cleanup_policy == "compact":
                    raise NotDeleted(f"{topic.name} keeps the last record of every key")
                offset = log.visible_end if wanted.offset == -1 else wanted.offset
                if offset < 0 or offset > log.visible_end:
                    raise OffsetOutOfRange(offset, log.start_offset, log.visible_end)
                if offset > log.start_offset:
                    await delete_before(context.broker.shard, context.coordination.producers, partition, offset)
                answer["low_watermark"] = log.start_offset
            except HeadraceError as error:
                answer["error_code"] = code_of(error)
            parts.append(answer)
        topics.append({"name": topic.name, "partitions": parts})
        await turns.rest()
    return {"topics": topics}
