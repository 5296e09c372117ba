"""Metadata: topics, partitions and their leader, which is always this broker. Creates missing topics if configured."""

from headrace.broker.cooperative import YieldEvery
from headrace.broker.streams.streams import Stream, is_topic_name
from headrace.errors import AccessRefused, HeadraceError, StreamNotFound
from headrace.listeners.kafka.auth.access import AnyUser, operations_on_cluster, operations_on_topic
from headrace.listeners.kafka.context import KafkaContext
from headrace.listeners.kafka.errors import Code, UnknownTopicId, code_of
from headrace.listeners.kafka.request_pipeline import Request
from headrace.wire.kafka import metadata
from headrace.wire.kafka.metadata import NO_ID, MetadataRequest, Node, Topic

IDS_FROM = 12  # requests of versions 10 and 11 have a field for ids, which must be empty
AT_ONCE_MAX = 100  # named topics; with more, the handler runs in a task that yields to the event loop


def handle_metadata(context: KafkaContext, request: Request) -> None:
    wanted = metadata.parse(request.body, request.position, request.version, context.elements_max)
    allowed = context.access_of(request)
    if wanted.topics is None:
        every = [encoded(context, request.version, allowed, wanted, stream) for stream in allowed.sees.all()]
        answer(context, request, wanted, every)
        return
    if request.version < IDS_FROM and any(name is None or topic_id != NO_ID for name, topic_id in wanted.topics):
        refused = [Topic(*topic, (), error=Code.INVALID_REQUEST) for topic in dict.fromkeys(wanted.topics)]
        answer(
            context,
            request,
            wanted,
            [metadata.encode_topic(topic, request.version, context.node_id) for topic in refused],
        )
        return
    creates = wanted.allow_auto_create and context.config.auto_create_topics
    missing = [
        name
        for name, topic_id in wanted.topics
        if name and creates and topic_id == NO_ID and is_topic_name(name) and context.broker.streams.find(name) is None
    ]
    # Each once, or the response could be thousands of times as large. With an id, the name is ignored: the Java client
    # sends an empty one.
    topics = list(dict.fromkeys((name if topic_id == NO_ID else None, topic_id) for name, topic_id in wanted.topics))
    if missing or len(topics) > AT_ONCE_MAX:
        context.spawn(create_and_answer(context, request, allowed, wanted, topics, missing), request)
    else:
        answer(
            context,
            request,
            wanted,
            [describe(context, request.version, allowed, wanted, *topic) for topic in topics],
        )


async def create_and_answer(
    context: KafkaContext,
    request: Request,
    allowed: AnyUser,
    wanted: MetadataRequest,
    topics: list[tuple[str | None, bytes]],
    missing: list[str],
) -> None:
    refused: dict[str, Code] = {}
    for name in missing:
        try:
            allowed.configures.check(name)
            await context.topics.get_or_create(name)
        except HeadraceError as error:
            refused[name] = code_of(error)
    described = []
    async for asked, topic_id in YieldEvery().each(topics):
        if asked in refused:
            topic = Topic(asked, NO_ID, (), error=refused[asked])
            described.append(metadata.encode_topic(topic, request.version, context.node_id))
        else:
            described.append(describe(context, request.version, allowed, wanted, asked, topic_id))
    answer(context, request, wanted, described)


def encoded(context: KafkaContext, version: int, allowed: AnyUser, wanted: MetadataRequest, stream: Stream) -> bytes:
    topic = context.metadata.get(stream, version)
    if not wanted.topic_operations:
        return topic
    return metadata.with_operations(topic, version, operations_on_topic(allowed, stream.name))


def describe(
    context: KafkaContext,
    version: int,
    allowed: AnyUser,
    wanted: MetadataRequest,
    name: str | None,
    topic_id: bytes,
) -> bytes:
    try:
        if name is not None and not is_topic_name(name):
            return metadata.encode_topic(Topic(name, NO_ID, (), error=Code.INVALID_TOPIC), version, context.node_id)
        return encoded(context, version, allowed, wanted, allowed.sees.find(topic_id if name is None else name))
    except AccessRefused as error:
        return metadata.encode_topic(
            Topic(name, topic_id if name is None else NO_ID, (), error=code_of(error)), version, context.node_id
        )
    except UnknownTopicId:
        return metadata.encode_topic(Topic(None, topic_id, (), error=Code.UNKNOWN_TOPIC_ID), version, context.node_id)
    except StreamNotFound:
        return metadata.encode_topic(
            Topic(name, NO_ID, (), error=Code.UNKNOWN_TOPIC_OR_PARTITION), version, context.node_id
        )


def answer(context: KafkaContext, request: Request, wanted: MetadataRequest, topics: list[bytes]) -> None:
    host, port = context.address_of(request)
    request.answer(
        metadata.response(
            request.version,
            request.correlation_id,
            throttle_ms=0,
            node=Node(context.node_id, host, port),
            cluster_id=context.cluster_id,
            topics=topics,
            cluster_operations=operations_on_cluster(context.access_of(request), asked=wanted.cluster_operations),
        )
    )
