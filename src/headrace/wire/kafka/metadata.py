"""Hand-written codec of Metadata.

Topics are encoded one by one, so that the caller can cache them: a response for 1,000 topics with 10 partitions each is
then a join of ready pieces.
"""

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from headrace.wire.kafka.codec import decode
from headrace.wire.kafka.schema import request_struct

METADATA = 3
NO_ID = bytes(16)
FLEXIBLE_FROM = 9
OPERATIONS_FROM = 8  # authorized operations of topics; those of the cluster only up to version 10
UNKNOWN_OPERATIONS = -0x80000000


class MetadataRequest(NamedTuple):
    topics: list[tuple[str | None, bytes]] | None  # (name, id); None = all
    allow_auto_create: bool
    topic_operations: bool  # whether the response includes authorized operations
    cluster_operations: bool


class Node(NamedTuple):
    node_id: int
    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Topic:
    name: str | None
    topic_id: bytes
    leader_epochs: tuple[int, ...]  # one per partition
    error: int = 0
    internal: bool = False


def parse(body: memoryview, position: int, version: int, elements_max: int) -> MetadataRequest:
    request = decode(request_struct(METADATA, version), body, position, elements_max)
    topics = request.topics
    if version == 0 and not topics:
        topics = None  # version 0 has no null array
    if topics is not None:
        topics = [(topic.name, getattr(topic, "topic_id", NO_ID)) for topic in topics]
    return MetadataRequest(
        topics,
        request.allow_auto_topic_creation,
        request.include_topic_authorized_operations,
        getattr(request, "include_cluster_authorized_operations", False),  # up to version 10
    )


def shape_of(version: int) -> int:
    """The lowest version that encodes a topic in the same bytes as this one."""
    for first in (12, 10, 9, 8, 7, 5, 1):
        if version >= first:
            return first
    return 0


def encode_topic(topic: Topic, version: int, node_id: int) -> bytes:
    flexible = version >= FLEXIBLE_FROM
    out = bytearray(struct.pack(">h", topic.error))
    out += string(topic.name if version >= 12 else topic.name or "", flexible)
    if version >= 10:
        out += topic.topic_id
    if version >= 1:
        out.append(topic.internal)
    out += count(len(topic.leader_epochs), flexible)
    for index, epoch in enumerate(topic.leader_epochs):
        out += partition(index, epoch, version, node_id)
    if version >= OPERATIONS_FROM:
        out += struct.pack(">i", UNKNOWN_OPERATIONS)
    if flexible:
        out.append(0)
    return bytes(out)


def with_operations(encoded: bytes, version: int, operations: int) -> bytes:
    """A topic encoded by encode_topic, with its authorized operations filled in."""
    if version < OPERATIONS_FROM:
        return encoded
    tags = 1 if version >= FLEXIBLE_FROM else 0
    end = len(encoded) - tags
    return encoded[: end - 4] + struct.pack(">i", operations) + encoded[end:]


FLEXIBLE = struct.Struct(">hiiiBiBiBB")
WITH_EPOCH = struct.Struct(">hiiiiiiii")
WITH_OFFLINE = struct.Struct(">hiiiiiii")
PLAIN = struct.Struct(">hiiiiii")


def partition(index: int, epoch: int, version: int, node_id: int) -> bytes:
    """One node is the leader, the only replica and in sync."""
    if version >= FLEXIBLE_FROM:
        return FLEXIBLE.pack(0, index, node_id, epoch, 2, node_id, 2, node_id, 1, 0)
    if version >= 7:
        return WITH_EPOCH.pack(0, index, node_id, epoch, 1, node_id, 1, node_id, 0)
    if version >= 5:
        return WITH_OFFLINE.pack(0, index, node_id, 1, node_id, 1, node_id, 0)
    return PLAIN.pack(0, index, node_id, 1, node_id, 1, node_id)


def response(
    version: int,
    correlation_id: int,
    *,
    throttle_ms: int,
    node: Node,
    cluster_id: str,
    topics: Iterable[bytes],
    cluster_operations: int = UNKNOWN_OPERATIONS,
) -> list[bytes]:
    """The response as a list of buffers. topics: results of encode_topic."""
    flexible = version >= FLEXIBLE_FROM
    topics = list(topics)
    head = bytearray(struct.pack(">i", correlation_id))
    if flexible:
        head.append(0)
    if version >= 3:
        head += struct.pack(">i", throttle_ms)
    head += count(1, flexible)
    head += struct.pack(">i", node.node_id) + string(node.host, flexible) + struct.pack(">i", node.port)
    if version >= 1:
        head += string(None, flexible)
    if flexible:
        head.append(0)
    if version >= 2:
        head += string(cluster_id, flexible)
    if version >= 1:
        head += struct.pack(">i", node.node_id)
    head += count(len(topics), flexible)
    tail = b""
    if OPERATIONS_FROM <= version <= 10:
        tail = struct.pack(">i", cluster_operations)
    if version >= 13:
        tail += b"\0\0"
    if flexible:
        tail += b"\0"
    body = b"".join(topics)
    size = len(head) + len(body) + len(tail)
    return [struct.pack(">i", size) + head, body + tail]


def string(value: str | None, flexible: bool) -> bytes:
    if value is None:
        return b"\0" if flexible else b"\xff\xff"
    data = value.encode()
    return (varint(len(data) + 1) if flexible else struct.pack(">h", len(data))) + data


def count(value: int, flexible: bool) -> bytes:
    return varint(value + 1) if flexible else struct.pack(">i", value)


def varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
