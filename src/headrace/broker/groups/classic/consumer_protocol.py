"""Kafka's ConsumerProtocol: the subscription and assignment that consumers embed in the classic group protocol.

A classic group passes these bytes on unread. They are decoded here because a KIP-848 group that hosts classic members
assigns partitions to them in place of a leader. Both begin with a version; an unknown version is read as the newest
known one, as Kafka specifies.
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple

from headrace.broker.groups.assign import TopicPartition
from headrace.errors import InconsistentProtocol

CONSUMER = "consumer"  # the protocol type of groups that use this format
VERSION_MAX = 3
OWNED_FROM, GENERATION_FROM, RACK_FROM = 1, 2, 3  # versions that added a field to the subscription


class Subscription(NamedTuple):
    version: int
    topics: frozenset[str]
    owned: frozenset[TopicPartition]  # of cooperative members; others give up everything before they join
    rack_id: str | None


class Assigned(NamedTuple):
    partitions: frozenset[TopicPartition]
    user_data: bytes


def decode_subscription(data: bytes) -> Subscription:
    reader = _Reader(data)
    version = reader.version()
    topics = frozenset(reader.text() for _ in range(reader.count()))
    reader.data()
    # Some clients send version 1 but end here, as in version 0.
    owned = reader.partitions() if version >= OWNED_FROM and reader.left else frozenset()
    if version >= GENERATION_FROM:
        reader.number(">i")
    rack_id = reader.optional_text() if version >= RACK_FROM else None
    return Subscription(version, topics, owned, rack_id)


def decode_assignment(data: bytes) -> Assigned:
    """Empty bytes mean that the member has never been assigned anything."""
    if not data:
        return Assigned(frozenset(), b"")
    reader = _Reader(data)
    reader.version()
    return Assigned(reader.partitions(), reader.data() if reader.left else b"")


def encode_assignment(partitions: Iterable[TopicPartition], version: int) -> bytes:
    by_topic: dict[str, list[int]] = {}
    for topic, number in sorted(partitions):
        by_topic.setdefault(topic, []).append(number)
    out = bytearray(struct.pack(">hi", version, len(by_topic)))
    for topic, numbers in by_topic.items():
        name = topic.encode()
        out += struct.pack(">h", len(name)) + name
        out += struct.pack(f">i{len(numbers)}i", len(numbers), *numbers)
    return bytes(out + struct.pack(">i", -1))  # no user data


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._data) - self._at

    def take(self, length: int) -> bytes:
        if not 0 <= length <= self.left:
            raise InconsistentProtocol(f"a member's metadata announces {length} bytes, but only {self.left} are left")
        self._at += length
        return self._data[self._at - length : self._at]

    def number(self, form: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def version(self) -> int:
        version = self.number(">h")
        if version < 0:
            raise InconsistentProtocol(f"a member's metadata has version {version}")
        return min(version, VERSION_MAX)

    def count(self) -> int:
        count = self.number(">i")
        if not 0 <= count <= self.left:
            raise InconsistentProtocol(
                f"a member's metadata announces {count} elements, but only {self.left} bytes are left"
            )
        return count

    def text(self) -> str:
        try:
            return self.take(self.number(">h")).decode()
        except UnicodeDecodeError as error:
            raise InconsistentProtocol(f"a member's metadata is not UTF-8: {error}") from None

    def optional_text(self) -> str | None:
        if self.left and self._data[self._at : self._at + 2] == b"\xff\xff":
            self._at += 2
            return None
        return self.text()

    def data(self) -> bytes:
        length = self.number(">i")
        return b"" if length == -1 else self.take(length)

    def partitions(self) -> frozenset[TopicPartition]:
        found: set[TopicPartition] = set()
        for _ in range(self.count()):
            topic = self.text()
            found.update((topic, self.number(">i")) for _ in range(self.count()))
        return frozenset(found)
