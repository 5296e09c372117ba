"""A memory budget for the members of all groups together.

Single requests and single groups are bounded, but a client can create any number of groups, and members stay while
they send heartbeats.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Protocol

from headrace.broker.groups.classic.members import Protocols
from headrace.errors import MembersFull

logger = logging.getLogger("headrace.broker")

MEMBER_BYTES = 2000  # a member without subscriptions: the object, its timer, its client's names
NAME_BYTES = 100  # per subscribed or assigned topic, plus the characters of its name
ASSIGNED_TOPIC_BYTES = 600  # per topic in a consumer group's assignment, plus the characters of its name
ASSIGNED_BYTES = 250  # per assigned partition: in the target, at the member, and in the saved state
COPIES = 2  # in the member and in the state store


class MemberMemory(Protocol):
    kept_bytes: int


class MemberBudget:
    """One per broker. The memory manager counts it (see pressure.Reclaimable) but cannot shrink it: evicted members
    would only join again. A full budget refuses new members instead."""

    name = "group_members"
    patience_s = 0.0

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self._held_bytes = 0
        self._is_full = False

    def held_bytes(self) -> int:
        return self._held_bytes

    def shed(self, wanted_bytes: int) -> int:
        return 0

    def check(self, more_bytes: int) -> None:
        """Raise MembersFull if `more_bytes` exceed the budget. Shrinking is always allowed."""
        if more_bytes <= 0 or self._held_bytes + more_bytes <= self.bytes_max:
            return
        if not self._is_full:
            self._is_full = True
            logger.warning("group members use %d bytes: new members are refused", self._held_bytes)
        raise MembersFull(f"group members use {self._held_bytes:,} bytes; the limit is {self.bytes_max:,}")

    def keep(self, one: MemberMemory, size: int) -> None:
        """Account `size` bytes to `one`. check() came first, except when a restart restores members."""
        self.take(size - one.kept_bytes)
        one.kept_bytes = size

    def take(self, more_bytes: int) -> None:
        self._held_bytes += more_bytes
        if self._held_bytes < self.bytes_max // 2:
            self._is_full = False


def classic_bytes(member_id: str, protocols: Protocols, assignment: bytes = b"") -> int:
    said = sum(len(name) + len(data) for name, data in protocols)
    return MEMBER_BYTES + COPIES * (len(member_id) + said + len(assignment))


def topics_bytes(topics: Iterable[str]) -> int:
    return sum(NAME_BYTES + COPIES * len(name) for name in topics)


def assigned_bytes(partitions: Mapping[str, int]) -> int:
    """Memory of a consumer group's assignment, from its topics and their numbers of partitions."""
    return sum(ASSIGNED_TOPIC_BYTES + COPIES * len(name) + ASSIGNED_BYTES * count for name, count in partitions.items())
