"""Handlers of the consumer group protocol (KIP-848): heartbeat and describe."""

from collections.abc import Iterable
from functools import partial
from typing import Any

from headrace.broker.groups.consumer.group import (
    JOIN_EPOCH,
    LEAVE_EPOCH,
    STATIC_LEAVE_EPOCH,
    ConsumerGroup,
    Heartbeat,
)
from headrace.errors import GroupNotFound, HeadraceError, InvalidInput, StreamNotFound
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.errors import code_of, group_code
from headrace.listeners.kafka.groups.common import describe_each, future_and_callback, is_share_group, not_found
from headrace.listeners.kafka.request_pipeline import Request

CLASSIC_MEMBER, CONSUMER_MEMBER = 0, 1
MEMBER_ID_FROM = 1  # clients choose their member id from this version on
NOT_GIVEN = -1


async def consumer_group_heartbeat(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    groups = context.coordination.groups
    names = fields.subscribed_topic_names
    known = request.connection.access
    beat = Heartbeat(
        member_id=fields.member_id,
        epoch=fields.member_epoch,
        instance_id=fields.instance_id,
        client_id=request.client_id,
        client_host=request.connection.client_host,
        rack_id=fields.rack_id,
        rebalance_timeout_ms=fields.rebalance_timeout,
        topics=frozenset(names) if names is not None else None,
        pattern=fields.subscribed_topic_regex,
        assignor=fields.server_assignor,
        owned=owned_partitions(context, fields.topic_partitions),
        may_read=known.reads.shows if known is not None else None,
    )
    try:
        check_heartbeat(request.version, fields)
        if is_share_group(context, fields.group_id):
            raise GroupNotFound(fields.group_id)  # as a consumer group
        answer = groups.heartbeat(fields.group_id, beat)
        future, resolve = future_and_callback(context)
        groups.when_kept(fields.group_id, resolve)
        failed = await future
        if failed is not None:
            raise failed
    except HeadraceError as error:
        return {
            "error_code": group_code(code_of(error)),
            "error_message": str(error),
        }
    values: dict[str, Any] = {
        "member_id": answer.member_id,
        "member_epoch": answer.epoch,
        "heartbeat_interval": groups.config_of(fields.group_id).consumer_heartbeat_interval_ms,
    }
    if answer.assignment is not None:
        values["assignment"] = {"topic_partitions": by_topic(context, answer.assignment)}
    return values


def check_heartbeat(version: int, fields: Any) -> None:
    """Raise if the heartbeat is invalid in every group, with Kafka's error messages."""
    epoch = fields.member_epoch
    joins = epoch == JOIN_EPOCH
    if not fields.group_id:
        raise InvalidInput("GroupId can't be empty.")
    if not fields.member_id and (version >= MEMBER_ID_FROM or epoch > 0 or epoch == LEAVE_EPOCH):
        raise InvalidInput("MemberId can't be empty.")
    if fields.instance_id == "" or fields.rack_id == "":
        raise InvalidInput("InstanceId and RackId can't be empty.")
    if joins and fields.rebalance_timeout == NOT_GIVEN:
        raise InvalidInput("RebalanceTimeoutMs must be provided in first request.")
    if joins and (fields.topic_partitions is None or fields.topic_partitions):
        raise InvalidInput("TopicPartitions must be empty when (re-)joining.")
    if epoch == STATIC_LEAVE_EPOCH and fields.instance_id is None:
        raise InvalidInput("InstanceId can't be null.")
    if epoch < STATIC_LEAVE_EPOCH:
        raise InvalidInput(f"MemberEpoch is {epoch}, but must be greater than or equal to {STATIC_LEAVE_EPOCH}.")


def owned_partitions(context: KafkaContext, topics: Any) -> frozenset[tuple[str, int]] | None:
    if topics is None:
        return None
    owned: set[tuple[str, int]] = set()
    for topic in topics:
        try:
            name = context.topics.find(topic.topic_id).name
        except StreamNotFound:
            continue  # the topic was deleted
        owned.update((name, number) for number in topic.partitions)
    return frozenset(owned)


def by_topic(
    context: KafkaContext, partitions: Iterable[tuple[str, int]], *, names: bool = False
) -> list[dict[str, Any]]:
    grouped: dict[str, list[int]] = {}
    for name, number in sorted(partitions):
        grouped.setdefault(name, []).append(number)
    topics = []
    for name, numbers in grouped.items():
        try:
            topic: dict[str, Any] = {
                "topic_id": context.topics.id_of(context.topics.find(name)),
                "partitions": numbers,
            }
        except StreamNotFound:
            continue
        if names:
            topic["topic_name"] = name
        topics.append(topic)
    return topics


async def consumer_group_describe(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    with_operations = fields.include_authorized_operations
    describing = partial(describe, context)
    return await describe_each(context, request, fields.group_ids, describing, with_operations=with_operations)


def describe(context: KafkaContext, group_id: str) -> dict[str, Any]:
    group = context.coordination.groups.find(group_id)
    if not isinstance(group, ConsumerGroup):
        return not_found(group_id, "is not a consumer group")
    return {
        "group_state": group.state,
        "group_epoch": group.epoch,
        "assignment_epoch": group.target_epoch,
        "assignor_name": group.assignor,
        "members": [
            {
                "member_id": member.member_id,
                "instance_id": member.instance_id,
                "rack_id": member.rack_id,
                "member_epoch": member.epoch,
                "client_id": member.client_id,
                "client_host": member.client_host,
                "subscribed_topic_names": sorted(member.topics),
                "subscribed_topic_regex": member.pattern or None,
                "assignment": {"topic_partitions": by_topic(context, member.assigned, names=True)},
                "target_assignment": {
                    "topic_partitions": by_topic(context, group.target.get(member.member_id, ()), names=True)
                },
                "member_type": CONSUMER_MEMBER if member.classic is None else CLASSIC_MEMBER,
            }
            for member in group.members.values()
        ],
    }
