"""Topics as Metadata responses encode them, kept so that a response is a join of ready pieces."""

from headrace.broker.streams.streams import Stream
from headrace.listeners.kafka.admin.topic_index import TopicIndex
from headrace.wire.kafka import metadata
from headrace.wire.kafka.metadata import Topic

CACHED_MAX = 100_000


class MetadataCache:
    """Encoded topics by stream and shape. A stream that gains partitions is encoded again; leader epochs change only
    when the broker restarts."""

    def __init__(self, topics: TopicIndex, node_id: int) -> None:
        self._topics = topics
        self._node_id = node_id
        self._encoded: dict[tuple[int, int], tuple[int, bytes]] = {}

    def get(self, stream: Stream, version: int) -> bytes:
        key = (stream.document.logs[0], metadata.shape_of(version))
        known = self._encoded.get(key)
        if known is not None and known[0] == len(stream.partitions):
            return known[1]
        if len(self._encoded) >= CACHED_MAX:
            self._encoded.clear()
        epochs = tuple(partition.epoch for partition in stream.partitions)
        topic = Topic(stream.name, self._topics.id_of(stream), epochs)
        encoded = metadata.encode_topic(topic, version, self._node_id)
        self._encoded[key] = len(stream.partitions), encoded
        return encoded
