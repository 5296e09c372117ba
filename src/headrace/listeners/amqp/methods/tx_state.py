"""Transactions: publishes and acks are kept until tx.commit, and then happen together."""

from dataclasses import dataclass, field
from typing import NamedTuple


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
    named: set[int] = field(default_factory=set)  # the tags that `settles` cover: not to be settled twice

    def clear(self) -> None:
        self.publishes.clear()
        self.settles.clear()
        self.named.clear()
        self.size_bytes = 0
