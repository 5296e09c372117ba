"""Which streams Kafka clients see, by name and by id."""

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping

from headrace.broker.streams.partition import Partition
from headrace.broker.streams.streams import Stream, Streams, is_topic_name
from headrace.errors import PartitionNotFound, StreamExists, StreamNotFound
from headrace.listeners.kafka.errors import TopicCollides, UnknownTopicId

VHOST = "/"


class Topics(ABC):
    """What somebody finds: everything (TopicIndex), or what rights allow (access.GuardedTopics)."""

    @abstractmethod
    def find(self, topic: str | bytes) -> Stream:
        """By name or id."""

    @abstractmethod
    def check(self, name: str) -> None:
        """Raises if a topic of that name may not be found, whether it is there or not."""

    @abstractmethod
    def shows(self, name: str) -> bool:
        """As check, for lists: what may not be found is left out, and nobody hears of it."""

    @abstractmethod
    def all(self) -> list[Stream]: ...

    def partition(self, topic: str | bytes, number: int) -> Partition:
        stream = self.find(topic)
        if not 0 <= number < len(stream.partitions):
            raise PartitionNotFound(stream.name, number, len(stream.partitions))
        return stream.partitions[number]


class TopicIndex(Topics):
    """A topic's id is made of this broker's and its first log's, which no later topic will ever have."""

    def __init__(self, streams: Streams, cluster: uuid.UUID) -> None:
        self._streams = streams
        self._prefix = cluster.bytes[:8]
        self._by_log: dict[int, Stream] = {}
        self._version = -1  # of the streams, when that was made
        self._creating = asyncio.Lock()  # of two that collide and come at once, the second must see the first

    async def create(self, name: str, partitions: int, overrides: Mapping[str, object]) -> Stream:
        async with self._creating:
            self.check_new(name)
            return await self._streams.create(name, partitions, overrides)

    async def get_or_create(self, name: str) -> Stream:
        """For clients that name a topic and expect it to be there."""
        async with self._creating:
            if self._streams.find(name, VHOST) is None:
                self.check_new(name)
            return await self._streams.get_or_create(name)

    def check_new(self, name: str) -> None:
        """Refuses what Kafka refuses: the names of its metrics have underscores where those of topics have dots.

        Only here: queues are named by people who need not know of Kafka, and our metrics keep names as they are.
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
        """Everybody may."""

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
