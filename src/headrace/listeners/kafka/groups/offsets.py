"""OffsetCommit, OffsetFetch and OffsetDelete: the offsets that groups have committed."""

from collections.abc import Callable, Iterable
from typing import Any

from headrace.broker.cooperative import YieldEvery
from headrace.broker.groups.classic.consumer_protocol import CONSUMER, decode_subscription
from headrace.broker.groups.classic.group import ClassicGroup
from headrace.broker.groups.consumer.group import ConsumerGroup
from headrace.broker.groups.coordinator import check_group_id
from headrace.broker.groups.offsets import CommittedOffset
from headrace.broker.streams.streams import Stream
from headrace.errors import (
    AccessRefused,
    GroupNotFound,
    HeadraceError,
    IllegalGeneration,
    InconsistentProtocol,
    OffsetMetadataTooLarge,
    PartitionNotFound,
    StaleMemberEpoch,
    StreamNotFound,
    UnknownMember,
)
from headrace.listeners.kafka.admin.topic_index import Topics
from headrace.listeners.kafka.auth.access import AnyUser
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.errors import Code, code_of, group_code
from headrace.listeners.kafka.groups.common import future_and_callback, is_share_group
from headrace.listeners.kafka.request_pipeline import Request

BY_ID_FROM = 10  # OffsetCommit and OffsetFetch name topics by id from this version on
EPOCHS_FROM = 9  # members of consumer groups (KIP-848) use this version or a later one
GROUPS_FROM = 8  # OffsetFetch names several groups from this version on
NO_OFFSET = -1


def topic_of(fields: Any, version: int) -> str | bytes:
    topic: str | bytes = fields.topic_id if version >= BY_ID_FROM else fields.name
    return topic


def collect(
    context: KafkaContext,
    readable: Topics,
    group_id: str,
    topics: Any,
    version: int,
    *,
    by_id_from: int = BY_ID_FROM,
) -> tuple[list[CommittedOffset], list[dict[str, Any]]]:
    """(entries that can be committed, the response's topics with an error for each other partition)."""
    entries: list[CommittedOffset] = []
    answers = []
    now_ms = context.broker.clock.now_ms()
    limit = context.coordination.groups.settings.offset_metadata_bytes_max
    for topic in topics:
        key = topic.topic_id if version >= by_id_from else topic.name
        parts: list[dict[str, Any]] = []
        try:
            stream = readable.find(key)
        except HeadraceError as error:
            refused = {"error_code": code_of(error)}
            parts = [{"partition_index": one.partition_index, **refused} for one in topic.partitions]
            answers.append({"topic_id" if version >= by_id_from else "name": key, "partitions": parts})
            continue
        for one in topic.partitions:
            answer: dict[str, Any] = {"partition_index": one.partition_index, "error_code": Code.NONE}
            try:
                if not 0 <= one.partition_index < len(stream.partitions):
                    raise PartitionNotFound(stream.name, one.partition_index, len(stream.partitions))
                metadata = one.committed_metadata or ""
                if len(metadata) > limit:
                    raise OffsetMetadataTooLarge(f"offset metadata of {len(metadata)} characters")
                entries.append(
                    CommittedOffset(
                        group_id,
                        stream.name,
                        one.partition_index,
                        stream.partitions[one.partition_index].log_id,
                        one.committed_offset,
                        one.committed_leader_epoch,
                        metadata,
                        now_ms,
                    )
                )
            except HeadraceError as error:
                answer["error_code"] = code_of(error)
            parts.append(answer)
        answers.append({"topic_id" if version >= by_id_from else "name": key, "partitions": parts})
    return entries, answers


def fail_all(answers: list[dict[str, Any]], code: Code) -> None:
    for topic in answers:
        for part in topic["partitions"]:
            if part["error_code"] == Code.NONE:
                part["error_code"] = code


async def offset_commit(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    groups = context.coordination.groups
    allowed = context.access_of(request)
    entries, answers = collect(context, allowed.reads, fields.group_id, fields.topics, request.version)
    try:
        allowed.group(fields.group_id)
        if is_share_group(context, fields.group_id):
            raise GroupNotFound(fields.group_id)  # share groups commit no offsets
        groups.check_commit(
            fields.group_id, fields.member_id, fields.group_instance_id, fields.generation_id_or_member_epoch
        )
        if entries:
            future, resolve = future_and_callback(context)
            groups.commit(entries, resolve)
            error = await future
            if error is not None:
                raise error
    except StaleMemberEpoch:
        # Older versions have no code for it. ILLEGAL_GENERATION makes the client rejoin, as it should.
        fail_all(answers, Code.STALE_MEMBER_EPOCH if request.version >= EPOCHS_FROM else Code.ILLEGAL_GENERATION)
    except IllegalGeneration:
        # The group may have been deleted. UNKNOWN_MEMBER_ID is the only code for which Java's KIP-848 members rejoin.
        forgotten = request.version >= EPOCHS_FROM and groups.find(fields.group_id) is None
        fail_all(answers, Code.UNKNOWN_MEMBER_ID if forgotten else Code.ILLEGAL_GENERATION)
    except HeadraceError as error:
        fail_all(answers, group_code(code_of(error)))
    return {"topics": answers}


async def offset_fetch(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    allowed = context.access_of(request)
    if request.version < GROUPS_FROM:
        try:
            allowed.group(fields.group_id)
        except AccessRefused as error:
            return fetch_refused(fields.topics, code_of(error))
        await wait_for_commits(context, fields.group_id)
        topics = await fetch_group(
            context, allowed, fields.group_id, fields.topics, fields.require_stable, request.version
        )
        return {"topics": topics}
    groups = []
    whole: set[str] = set()  # groups of which all offsets were requested: answered once each
    async for group in YieldEvery().each(fields.groups):
        if group.topics is None and group.group_id in whole:
            continue
        if group.topics is None:
            whole.add(group.group_id)
        answer: dict[str, Any] = {"group_id": group.group_id}
        try:
            allowed.group(group.group_id)
            check_member(context, group)
            await wait_for_commits(context, group.group_id)
            answer["topics"] = await fetch_group(
                context, allowed, group.group_id, group.topics, fields.require_stable, request.version
            )
        except HeadraceError as error:
            answer["error_code"] = code_of(error)
        groups.append(answer)
    return {"groups": groups}


async def wait_for_commits(context: KafkaContext, group_id: str) -> None:
    """Wait until earlier commits are visible: Kafka handles the requests of a connection in order, so clients expect
    to fetch what they have committed before."""
    future, resolve = future_and_callback(context)
    context.coordination.groups.offsets.when_seen(group_id, lambda: resolve(None))
    await future


def fetch_refused(topics: Any, code: Code) -> dict[str, Any]:
    """The error for the whole response and for each partition: version 1 has only the latter."""
    parts: dict[str, Any] = {"committed_offset": NO_OFFSET, "metadata": "", "error_code": code}
    return {
        "error_code": code,
        "topics": [
            {
                "name": topic.name,
                "partitions": [{"partition_index": number, **parts} for number in topic.partition_indexes],
            }
            for topic in topics or ()
        ],
    }


def check_member(context: KafkaContext, group: Any) -> None:
    """Raise if a member of a consumer group gives an epoch that is not its own (from version 9 on)."""
    known = context.coordination.groups.find(group.group_id)
    epoch = getattr(group, "member_epoch", -1)
    if not isinstance(known, ConsumerGroup) or epoch < 0 or not group.member_id:
        return
    member = known.members.get(group.member_id)
    if member is None:
        raise UnknownMember(f"unknown member {group.member_id!r}")
    if member.epoch != epoch:
        raise StaleMemberEpoch(f"epoch {epoch}") if member.classic is None else IllegalGeneration(f"generation {epoch}")


async def fetch_group(
    context: KafkaContext, allowed: AnyUser, group_id: str, topics: Any, require_stable: bool, version: int
) -> list[dict[str, Any]]:
    pending = context.coordination.transactions.pending_offsets(group_id) if require_stable else set()
    answers = []
    work = YieldEvery()
    async for key, stream, numbers, code in work.each(wanted_topics(context, allowed, group_id, topics, version)):
        name = stream.name if stream is not None else str(key)
        parts = []
        async for number in work.each(numbers):
            answer: dict[str, Any] = {
                "partition_index": number,
                "committed_offset": NO_OFFSET,
                "committed_leader_epoch": NO_OFFSET,
                "metadata": "",
                "error_code": code,
            }
            if not code and (name, number) in pending:
                answer["error_code"] = Code.UNSTABLE_OFFSET_COMMIT
            elif (known := find_committed(context, group_id, stream, name, number)) is not None:
                answer["committed_offset"] = known.offset
                answer["committed_leader_epoch"] = known.leader_epoch
                answer["metadata"] = known.metadata
            parts.append(answer)
        answers.append({"topic_id" if version >= BY_ID_FROM else "name": key, "partitions": parts})
    return answers


def find_committed(
    context: KafkaContext, group_id: str, stream: Stream | None, name: str, number: int
) -> CommittedOffset | None:
    """The committed offset; None also if it belongs to an earlier topic of the same name."""
    known = context.coordination.groups.offsets.get(group_id, name, number)
    if known is None or stream is None or not 0 <= number < len(stream.partitions):
        return None
    return known if known.log_id == stream.partitions[number].log_id else None


def wanted_topics(
    context: KafkaContext, allowed: AnyUser, group_id: str, topics: Any, version: int
) -> Iterable[tuple[str | bytes, Stream | None, list[int], Code]]:
    if topics is not None:
        for topic in topics:
            key, stream, code = topic_of(topic, version), None, Code.NONE
            try:
                stream = allowed.reads.find(key)
            except AccessRefused as error:
                code = code_of(error)
            except StreamNotFound:
                code = Code.UNKNOWN_TOPIC_ID if version >= BY_ID_FROM else Code.NONE
            yield key, stream, topic.partition_indexes, code
        return
    committed: dict[str, list[int]] = {}
    for name, number in context.coordination.groups.offsets.of(group_id):
        committed.setdefault(name, []).append(number)
    for name, numbers in committed.items():
        if not allowed.reads.shows(name):
            continue
        try:
            stream = context.topics.find(name)
        except StreamNotFound:
            continue
        key = context.topics.id_of(stream) if version >= BY_ID_FROM else name
        yield key, stream, sorted(numbers), Code.NONE


async def offset_delete(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    groups = context.coordination.groups
    try:
        check_group_id(fields.group_id)
        if not groups.exists(fields.group_id):
            raise GroupNotFound(fields.group_id)
    except HeadraceError as refused:
        return {"error_code": code_of(refused)}
    group = groups.find(fields.group_id)
    if isinstance(group, ClassicGroup) and group.members and group.protocol_type != CONSUMER:
        return {"error_code": Code.NON_EMPTY_GROUP}  # their protocol is unknown, so their topics are, too
    readable = context.access_of(request).reads
    is_subscribed = subscribed_to(group)
    answers = []
    deleted: list[tuple[str, int]] = []
    for topic in fields.topics:
        read = is_subscribed(topic.name)
        parts = []
        for one in topic.partitions:
            code = Code.GROUP_SUBSCRIBED_TO_TOPIC if read else Code.NONE
            try:
                readable.partition(topic.name, one.partition_index)
            except (AccessRefused, StreamNotFound, PartitionNotFound) as refused:
                code = code_of(refused)
            if not code:
                deleted.append((topic.name, one.partition_index))
            parts.append({"partition_index": one.partition_index, "error_code": code})
        answers.append({"name": topic.name, "partitions": parts})
    future, resolve = future_and_callback(context)
    groups.offsets.delete(fields.group_id, deleted, resolve)
    error = await future
    if error is not None:
        return {"error_code": code_of(error)}
    return {"topics": answers}


def subscribed_to(group: ClassicGroup | ConsumerGroup | None) -> Callable[[str], bool]:
    """A function that tells whether a member reads a topic; True also if its subscription cannot be decoded."""
    if group is None or not group.members:
        return lambda topic: False
    if isinstance(group, ConsumerGroup):
        return group.subscribes
    try:
        subscriptions = {data for member in group.members.values() for _, data in member.protocols}
        topics = frozenset[str]().union(*(decode_subscription(data).topics for data in subscriptions))
    except InconsistentProtocol:
        return lambda topic: True
    return topics.__contains__
