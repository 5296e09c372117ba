"""The streams that Kafka clients see as topics, by name and by id."""

import asyncio
import uuid
from abc import ABC, abstractmethod

from headrace.broker.streams.defaults import Change
from headrace.broker.streams.partition import Partition
from headrace.broker.streams.streams import Stream, Streams, is_topic_name
from headrace.errors import PartitionNotFound, StreamExists, StreamNotFound
from headrace.listeners.kafka.errors import TopicCollides, UnknownTopicId

VHOST = "/"


class Topics(ABC):
    """Topics by name or id: all of them (TopicIndex), or those that a user may use (access.GuardedTopics)."""

    @abstractmethod
    def find(self, topic: str | bytes) -> Stream:
        """The topic with this name or id."""

    @abstractmethod
    def check(self, name: str) -> None:
        """Raise if the user has no permission on topics of this name, whether the topic exists or not."""

    @abstractmethod
    def shows(self, name: str) -> bool:
        """Like check, for lists, which omit topics without permission."""

    @abstractmethod
    def all(self) -> list[Stream]: ...

    def partition(self, topic: str | bytes, number: int) -> Partition:
        stream = self.find(topic)
        if not 0 <= number < len(stream.partitions):
            raise PartitionNotFound(stream.name, number, len(stream.partitions))
        return stream.partitions[number]


class TopicIndex(Topics):
    """All topics. A topic's id consists of the cluster's id and its first log's, which is never used again."""

    def __init__(self, streams: Streams, cluster: uuid.UUID) -> None:
        self._streams = streams
        self._prefix = cluster.bytes[:8]
        self._by_log: dict[int, Stream] = {}
        self._version = -1  # version of the streams when _by_log was built
        self._creating = asyncio.Lock()  # the second of two colliding topics must see the first

    async def create(self, name: str, partitions: int, config: Change) -> Stream:
        async with self._creating:
            self.check_new(name)
            return await self._streams.create(name, partitions, config)

    async def get_or_create(self, name: str) -> Stream:
        """For Metadata requests, which create the topics that they name."""
        async with self._creating:
            if self._streams.find(name, VHOST) is None:
                self.check_new(name)
            return await self._streams.get_or_create(name)

    def check_new(self, name: str) -> None:
        """Raise if the topic exists, or if its name collides with another as in Kafka, whose metrics replace dots in
        topic names by underscores.

        Only for topics created by Kafka clients: the broker's own metrics keep names unchanged.
        """
        if self._streams.find(name, VHOST) is not None:
            raise StreamExists(name)
        plain = name.replace(".", "_")
        if "_" not in plain:
            return
        for other in self._streams.names(VHOST):
            if len(other) == len(name) and other.replace(".", "_") == plain and is_topic_name(other):
                raise TopicCollides(name, other)

    def id_of(self, stream: Stream) -> bytes:
        return self._prefix + stream.document.logs[0].to_bytes(8, "big")

    def find(self, topic: str | bytes) -> Stream:
        if isinstance(topic, bytes):
            return self._by_id(topic)
        stream = self._streams.find(topic, VHOST)
        if stream is None or not stream.is_topic:
            raise StreamNotFound(topic)
        return stream

    def check(self, name: str) -> None:
        """All topics are allowed."""

    def shows(self, name: str) -> bool:
        return True

    def _by_id(self, topic_id: bytes) -> Stream:
        if topic_id[:8] != self._prefix:
            raise UnknownTopicId(topic_id)
        log_id = int.from_bytes(topic_id[8:], "big")
        stream = self._by_log.get(log_id)
        if stream is None and self._version != self._streams.version:
            self._version = self._streams.version
            self._by_log = {one.document.logs[0]: one for one in self.all()}
            stream = self._by_log.get(log_id)
        if stream is None or stream.is_deleted:
            raise UnknownTopicId(topic_id)
        return stream

    def all(self) -> list[Stream]:
        return [stream for stream in self._streams.list(VHOST) if stream.is_topic]
