"""The publishes and acknowledgements that a transactional channel keeps until tx.commit."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.listeners.amqp.errors import ChannelError
from headrace.wire.amqp.protocol import PRECONDITION_FAILED

TX_BYTES_MAX = 16 << 20  # a transaction is one journal entry, and an entry may fill half a journal file
TX_MESSAGE_BYTES = 256  # memory that a kept message takes besides its own bytes


class Publish(NamedTuple):
    method: bytes
    properties: bytes
    body: bytes


class Settle(NamedTuple):
    tag: int
    multiple: bool
    kind: str  # ack, requeue or reject


@dataclass(slots=True)
class Transaction:
    publishes: list[Publish] = field(default_factory=list)
    settles: list[Settle] = field(default_factory=list)
    size_bytes: int = 0
    settled_tags: set[int] = field(default_factory=set)  # covered by `settles`; a tag cannot be settled twice

    def add_publish(self, method: bytes, properties: bytes, body: bytes) -> None:
        self.publishes.append(Publish(method, properties, body))
        self.size_bytes += len(body) + len(properties) + len(method) + TX_MESSAGE_BYTES
        if self.size_bytes > TX_BYTES_MAX:
            raise ChannelError(PRECONDITION_FAILED, f"transaction is larger than the maximum of {TX_BYTES_MAX} bytes")

    def add_settle(self, tags: Iterable[int], settle: Settle) -> None:
        self.settled_tags.update(tags)
        self.settles.append(settle)

    def clear(self) -> None:
        self.publishes.clear()
        self.settles.clear()
        self.settled_tags.clear()
        self.size_bytes = 0
