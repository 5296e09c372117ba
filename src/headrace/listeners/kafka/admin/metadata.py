"""Metadata: who leads what, which is always us. Topics are encoded once and kept."""

from typing import TYPE_CHECKING

from headrace.broker.cooperative import YieldEvery
from headrace.broker.streams.streams import Stream, is_topic_name
from headrace.errors import AccessRefused, HeadraceError, StreamNotFound
from headrace.listeners.kafka.auth import access, operations
from headrace.listeners.kafka.auth.access import AnyUser
from headrace.listeners.kafka.errors import Code, UnknownTopicId, code_of
from headrace.listeners.kafka.request_pipeline import Request
from headrace.wire.kafka import metadata
from headrace.wire.kafka.metadata import NO_ID, MetadataRequest, Node, Topic

if TYPE_CHECKING:
    from headrace.listeners.kafka.listener import KafkaListener

CACHED_MAX = 100_000
AT_ONCE_MAX = 100  # topics that are named; of more, others have their turn in between


class MetadataCache:
    """Encoded topics by stream and shape. A stream that gains partitions is encoded anew; epochs grow only
    between one start of the broker and the next."""

    def __init__(self) -> None:
        self._encoded: dict[tuple[int, int], tuple[int, bytes]] = {}

    def get(self, listener: "KafkaListener", stream: Stream, version: int) -> bytes:
        key = (stream.document.logs[0], metadata.shape_of(version))
        known = self._encoded.get(key)
        if known is not None and known[0] == len(stream.partitions):
            return known[1]
        if len(self._encoded) >= CACHED_MAX:
            self._encoded.clear()
        epochs = tuple(partition.epoch for partition in stream.partitions)
        topic = Topic(stream.name, listener.topics.id_of(stream), epochs)
        encoded = metadata.encode_topic(topic, version, listener.node_id)
        self._encoded[key] = len(stream.partitions), encoded
        return encoded


def handle_metadata(listener: "KafkaListener", request: Request) -> None:
    wanted = metadata.parse(request.body, request.position, request.version, listener.elements_max)
    allowed = access.of(listener, request)
    if wanted.topics is None:
        every = [encoded(listener, request.version, allowed, wanted, stream) for stream in allowed.sees.all()]
        answer(listener, request, wanted, every)
        return
    creates = wanted.allow_auto_create and listener.config.auto_create_topics
    missing = [
        name
        for name, topic_id in wanted.topics
        if name and creates and topic_id == NO_ID and is_topic_name(name) and listener.broker.streams.find(name) is None
    ]
    topics = list(dict.fromkeys(wanted.topics))  # each once, or the answer could be thousands of times as large
    if missing or len(topics) > AT_ONCE_MAX:
        listener.spawn(create_and_answer(listener, request, allowed, wanted, topics, missing), request)
    else:
        answer(
            listener,
            request,
            wanted,
            [describe(listener, request.version, allowed, wanted, *topic) for topic in topics],
        )


async def create_and_answer(
    listener: "KafkaListener",
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
            await listener.topics.get_or_create(name)
        except HeadraceError as error:
            refused[name] = code_of(error)
    told = []
    async for asked, topic_id in YieldEvery().each(topics):
        if asked in refused:
            topic = Topic(asked, NO_ID, (), error=refused[asked])
            told.append(metadata.encode_topic(topic, request.version, listener.node_id))
        else:
            told.append(describe(listener, request.version, allowed, wanted, asked, topic_id))
    answer(listener, request, wanted, told)


def encoded(
    listener: "KafkaListener", version: int, allowed: AnyUser, wanted: MetadataRequest, stream: Stream
) -> bytes:
    topic = listener.metadata.get(listener, stream, version)
    if not wanted.topic_operations:
        return topic
    return metadata.with_operations(topic, version, operations.on_topic(allowed, stream.name))


def describe(
    listener: "KafkaListener",
    version: int,
    allowed: AnyUser,
    wanted: MetadataRequest,
    name: str | None,
    topic_id: bytes,
) -> bytes:
    try:
        if name is not None and not is_topic_name(name):
            return metadata.encode_topic(Topic(name, NO_ID, (), error=Code.INVALID_TOPIC), version, listener.node_id)
        return encoded(listener, version, allowed, wanted, allowed.sees.find(topic_id if name is None else name))
    except AccessRefused as error:
        return metadata.encode_topic(
            Topic(name, topic_id if name is None else NO_ID, (), error=code_of(error)), version, listener.node_id
        )
    except UnknownTopicId:
        return metadata.encode_topic(Topic(None, topic_id, (), error=Code.UNKNOWN_TOPIC_ID), version, listener.node_id)
    except StreamNotFound:
        return metadata.encode_topic(
            Topic(name, NO_ID, (), error=Code.UNKNOWN_TOPIC_OR_PARTITION), version, listener.node_id
        )


def answer(listener: "KafkaListener", request: Request, wanted: MetadataRequest, topics: list[bytes]) -> None:
    host, port = listener.address_for(request.connection)
    request.answer(
        metadata.response(
            request.version,
            request.correlation_id,
            throttle_ms=0,
            node=Node(listener.node_id, host, port),
            cluster_id=listener.cluster_id,
            topics=topics,
            cluster_operations=operations.on_cluster(access.of(listener, request), asked=wanted.cluster_operations),
        )
    )
