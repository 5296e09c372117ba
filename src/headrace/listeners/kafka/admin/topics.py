"""CreateTopics, DeleteTopics, CreatePartitions and DescribeTopicPartitions."""

from collections import Counter
from typing import Any

from headrace.broker.cooperative import YieldEvery
from headrace.broker.streams.streams import Stream, check_topic_name
from headrace.config import InvalidSetting
from headrace.errors import Conflict, HeadraceError, InvalidInput, StreamNotFound
from headrace.listeners.kafka.admin import topic_configs
from headrace.listeners.kafka.admin.config_types import InvalidConfig
from headrace.listeners.kafka.admin.topic_index import Topics
from headrace.listeners.kafka.auth.access import operations_on_topic
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.errors import Code, UnknownTopicId, code_of
from headrace.listeners.kafka.request_pipeline import Request
from headrace.wire.kafka.schema import NO_UUID

DEFAULT = -1
DESCRIBED_PARTITIONS_MAX = 2000


async def create_topics(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    named = Counter(topic.name for topic in fields.topics)
    allowed = context.access_of(request).configures
    answers = []
    async for topic in YieldEvery().each(fields.topics):
        answer: dict[str, Any] = {"name": topic.name}
        if named[topic.name] > 1:
            answer.update(error_code=Code.INVALID_REQUEST, error_message="Duplicate topic name.")
        else:
            try:
                await create_topic(context, allowed, topic, fields.validate_only, answer)
            except HeadraceError as error:
                answer.update(error_code=creation_code(error), error_message=str(error))
        answers.append(answer)
    return {"topics": answers}


class InvalidPartitions(InvalidInput):
    """The number of partitions is out of range."""


class InvalidReplicas(InvalidInput):
    """The replication factor is not 1: there is one broker."""


class InvalidAssignment(InvalidInput):
    """The replica assignment is impossible."""


class InvalidName(InvalidInput):
    """The name is not a valid topic name."""


def creation_code(error: HeadraceError) -> Code:
    if isinstance(error, InvalidPartitions | Conflict):
        return Code.INVALID_PARTITIONS
    if isinstance(error, InvalidReplicas):
        return Code.INVALID_REPLICATION_FACTOR
    if isinstance(error, InvalidAssignment):
        return Code.INVALID_REPLICA_ASSIGNMENT
    if isinstance(error, InvalidName):
        return Code.INVALID_TOPIC
    if isinstance(error, InvalidSetting | InvalidConfig):
        return Code.INVALID_CONFIG
    return code_of(error)


async def create_topic(
    context: KafkaContext, allowed: Topics, topic: Any, validate_only: bool, answer: dict[str, Any]
) -> None:
    try:
        check_topic_name(topic.name)
    except InvalidInput as error:
        raise InvalidName(str(error)) from None
    allowed.check(topic.name)
    context.topics.check_new(topic.name)
    partitions = count_partitions(context, topic)
    nulls = [one.name for one in topic.configs if one.value is None]
    if nulls:
        raise InvalidConfig(f"Null value not supported for topic configs: {','.join(nulls)}")
    change = topic_configs.change_of({one.name: one.value for one in topic.configs})
    settings, overrides = topic_configs.checked(context, None, change)
    if validate_only:
        found = topic_configs.shown(context, "topic", settings, overrides)
    else:
        stream = await context.topics.create(topic.name, partitions, change)
        answer["topic_id"] = context.topics.id_of(stream)
        found = topic_configs.described(context, stream)
    answer.update(
        num_partitions=partitions,
        replication_factor=1,
        configs=[{"name": one.name, "value": one.value, "config_source": one.source} for one in found],
    )


def count_partitions(context: KafkaContext, topic: Any) -> int:
    if topic.assignments:
        if topic.num_partitions != DEFAULT or topic.replication_factor != DEFAULT:
            raise InvalidInput("give either a number of partitions or replica assignments, not both")
        if any(one.broker_ids != [context.node_id] for one in topic.assignments):
            raise InvalidAssignment(f"the only broker is {context.node_id}")
        numbers = sorted(one.partition_index for one in topic.assignments)
        if numbers != list(range(len(numbers))):
            raise InvalidAssignment("partition numbers must be consecutive and start at 0")
        return len(numbers)
    if topic.replication_factor not in (DEFAULT, 1):
        raise InvalidReplicas(f"Replication factor: {topic.replication_factor} larger than available brokers: 1.")
    partitions: int = topic.num_partitions
    if partitions == DEFAULT:
        partitions = context.config.auto_create_partitions
    if not 1 <= partitions <= context.config.partitions_max:
        raise InvalidPartitions(f"a topic can have 1 to {context.config.partitions_max:,} partitions, not {partitions}")
    return partitions


async def delete_topics(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    if request.version < 6:
        wanted: list[tuple[str | None, bytes | None]] = [(name, None) for name in fields.topic_names]
    else:
        wanted = [(one.name, one.topic_id) for one in fields.topics]
    allowed = context.access_of(request).configures
    named = Counter(topic_named(allowed, *one) for one in wanted)
    answers = []
    async for name, topic_id in YieldEvery().each(wanted):
        answer: dict[str, Any] = {"name": name}
        if topic_id is not None:
            answer["topic_id"] = topic_id
        try:
            check_named(name, topic_id)
            if named[topic_named(allowed, name, topic_id)] > 1:
                raise InvalidInput("Duplicate topic name.")
            stream = allowed.find(name if name is not None else topic_id or b"")
            answer["name"] = stream.name
            if topic_id is not None:
                answer["topic_id"] = context.topics.id_of(stream)
            await delete_topic(context, stream, topic_id if name is None else None)
        except HeadraceError as error:
            answer.update(error_code=code_of(error), error_message=str(error))
        answers.append(answer)
    return {"responses": answers}


def topic_named(allowed: Topics, name: str | None, topic_id: bytes | None) -> str | bytes:
    """The name of a topic that is given by name or id, to find topics that a request names twice."""
    if name is not None or topic_id is None:
        return name or ""
    try:
        return allowed.find(topic_id).name
    except HeadraceError:
        return topic_id  # its own entry in the response reports the error


def check_named(name: str | None, topic_id: bytes | None) -> None:
    if topic_id is not None and (name is not None) == (topic_id != NO_UUID):
        raise InvalidInput("You must specify either a topic name or a topic ID, but not both, nor neither.")


async def delete_topic(context: KafkaContext, stream: Stream, topic_id: bytes | None) -> None:
    try:
        await context.broker.streams.delete(stream.name, only=stream)
    except StreamNotFound:
        if topic_id is not None:  # deleted while this waited; another topic may have its name by now
            raise UnknownTopicId(topic_id) from None
        raise


async def create_partitions(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    allowed = context.access_of(request).configures
    named = Counter(topic.name for topic in fields.topics)
    answers = []
    async for topic in YieldEvery().each(fields.topics):
        answer: dict[str, Any] = {"name": topic.name}
        try:
            if named[topic.name] > 1:
                raise InvalidInput("Duplicate topic name.")
            stream = allowed.find(topic.name)
            have = len(stream.partitions)
            if topic.count <= have:
                raise InvalidPartitions(
                    f"Topic currently has {have} partitions, which is not fewer than {topic.count}."
                )
            given = [one.broker_ids for one in topic.assignments or ()]
            if given and given != [[context.node_id]] * (topic.count - have):
                raise InvalidAssignment(
                    f"expected {topic.count - have} assignments to the only broker, {context.node_id}"
                )
            if topic.count > context.config.partitions_max:
                raise InvalidPartitions(f"a topic can have at most {context.config.partitions_max:,} partitions")
            if not fields.validate_only:
                await context.broker.streams.configure(stream.name, {}, partitions=topic.count)
        except HeadraceError as error:
            answer.update(error_code=creation_code(error), error_message=str(error))
        answers.append(answer)
    return {"results": answers}


async def describe_topic_partitions(context: KafkaContext, request: Request, fields: Any) -> dict[str, Any]:
    """Topics in the order of their names, one page per request; the cursor is the start of the next page."""
    limit = max(1, min(fields.response_partition_limit, DESCRIBED_PARTITIONS_MAX))
    allowed = context.access_of(request)
    seen = allowed.sees
    names = sorted({topic.name for topic in fields.topics}) or [stream.name for stream in seen.all()]
    first, start = "", 0
    if fields.cursor is not None:
        first, start = fields.cursor.topic_name, fields.cursor.partition_index
        if start < 0:
            refused = {"error_code": Code.INVALID_REQUEST}
            return {"topics": [{"name": topic.name, **refused} for topic in fields.topics]}
    topics: list[dict[str, Any]] = []
    async for name in YieldEvery().each(names):
        if name < first:
            continue
        if limit <= 0:
            return {"topics": topics, "next_cursor": {"topic_name": name, "partition_index": 0}}
        try:
            stream = seen.find(name)
        except HeadraceError as error:
            topics.append({"name": name, "error_code": code_of(error)})
            continue
        skip = start if name == first else 0
        shown = stream.partitions[skip : skip + limit]
        limit -= len(shown)
        topics.append(
            {
                "name": name,
                "topic_id": context.topics.id_of(stream),
                "topic_authorized_operations": operations_on_topic(allowed, name),
                "partitions": [
                    {
                        "partition_index": partition.number,
                        "leader_id": context.node_id,
                        "leader_epoch": partition.epoch,
                        "replica_nodes": [context.node_id],
                        "isr_nodes": [context.node_id],
                        "eligible_leader_replicas": [],  # the Java client does not expect null
                        "last_known_elr": [],
                    }
                    for partition in shown
                ],
            }
        )
        if skip + len(shown) < len(stream.partitions):
            cursor = {"topic_name": name, "partition_index": skip + len(shown)}
            return {"topics": topics, "next_cursor": cursor}
    return {"topics": topics}
