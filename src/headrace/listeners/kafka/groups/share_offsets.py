"""The start offsets of share groups: described, altered and deleted by admin tools."""

from typing import Any

from headrace.broker.groups.share.group import ShareGroup
from headrace.broker.streams.partition import Partition
from headrace.errors import AccessRefused, HeadraceError, InvalidInput, StreamNotFound
from headrace.listeners.kafka.admin.topic_index import Topics
from headrace.listeners.kafka.auth.access import AnyUser
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.errors import code_of
from headrace.listeners.kafka.groups.share import check_kind
from headrace.listeners.kafka.request_pipeline import Request

NONE = -1
NO_ID = bytes(16)


async def describe_share_group_offsets(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    allowed = context.access_of(request)
    return {"groups": [describe(context, allowed, one) for one in fields.groups]}


def describe(context: KafkaContext, allowed: AnyUser, asked: Any) -> dict[str, Any]:
    answer: dict[str, Any] = {"group_id": asked.group_id}
    try:
        allowed.group(asked.group_id)
        group = context.coordination.shares.known(asked.group_id)
    except HeadraceError as error:
        return {**answer, "error_code": code_of(error), "error_message": str(error)}
    if asked.topics is None:
        wanted = {name: numbers for name, numbers in read_by(context, group).items() if allowed.sees.shows(name)}
    else:
        wanted = {topic.topic_name: list(topic.partitions) for topic in asked.topics}
    answer["topics"] = [
        {
            "topic_name": name,
            "topic_id": id_of(context, allowed.sees, name),
            "partitions": [describe_partition(allowed.sees, group, name, number) for number in numbers],
        }
        for name, numbers in wanted.items()
    ]
    return answer


def read_by(context: KafkaContext, group: ShareGroup) -> dict[str, list[int]]:
    topics: dict[str, list[int]] = {}
    for log_id in group.partitions:
        place = context.broker.streams.of_log(log_id)
        if place is not None:
            topics.setdefault(place[0].name, []).append(place[1].number)
    return {name: sorted(topics[name]) for name in sorted(topics)}


def describe_partition(topics: Topics, group: ShareGroup, topic: str, number: int) -> dict[str, Any]:
    answer: dict[str, Any] = {"partition_index": number, "start_offset": NONE, "lag": NONE}
    try:
        partition = topics.partition(topic, number)
    except HeadraceError as error:
        return {**answer, "error_code": code_of(error), "error_message": str(error)}
    share = group.partitions.get(partition.log_id)
    if share is None:
        return answer
    log_start, end = partition.start_offset, partition.end_offset
    start, lag = max(share.start, log_start), share.lag(log_start, end)
    return {**answer, "start_offset": start, "leader_epoch": partition.epoch, "lag": lag}


def id_of(context: KafkaContext, topics: Topics, topic: str) -> bytes:
    try:
        return context.topics.id_of(topics.find(topic))
    except (StreamNotFound, AccessRefused):
        return NO_ID


async def alter_share_group_offsets(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    readable = context.access_of(request).reads
    starts: dict[Partition, int] = {}
    responses = []
    for topic in fields.topics:
        parts = []
        for part in topic.partitions:
            answer: dict[str, Any] = {"partition_index": part.partition_index}
            try:
                if part.start_offset < 0:
                    raise InvalidInput(f"invalid start offset {part.start_offset}")
                starts[readable.partition(topic.topic_name, part.partition_index)] = part.start_offset
            except HeadraceError as error:
                answer.update(error_code=code_of(error), error_message=str(error))
            parts.append(answer)
        topic_id = id_of(context, readable, topic.topic_name)
        responses.append({"topic_name": topic.topic_name, "topic_id": topic_id, "partitions": parts})
    try:
        check_kind(context, fields.group_id)
        await context.coordination.shares.move(fields.group_id, starts)
    except HeadraceError as error:
        return {"error_code": code_of(error), "error_message": str(error)}
    return {"responses": responses}


async def delete_share_group_offsets(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    readable = context.access_of(request).reads
    group = context.coordination.shares.find(fields.group_id)
    log_ids: list[int] = []
    responses = []
    for topic in fields.topics:
        topic_id = id_of(context, readable, topic.topic_name)
        answer: dict[str, Any] = {"topic_name": topic.topic_name, "topic_id": topic_id}
        try:
            read = [one for one in readable.find(topic.topic_name).document.logs if group and one in group.partitions]
            if not read:
                raise StreamNotFound(topic.topic_name)
            log_ids += read
        except HeadraceError as error:
            answer.update(error_code=code_of(error), error_message=str(error))
        responses.append(answer)
    try:
        await context.coordination.shares.forget(fields.group_id, log_ids)
    except HeadraceError as error:
        return {"error_code": code_of(error), "error_message": str(error)}
    return {"responses": responses}
