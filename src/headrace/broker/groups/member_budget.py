"""Room for members: what those of all groups together may bring and have the broker keep for them.

One request is bounded, and so is one group; but groups cost nothing, and a member stays as long as it is heard of.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Protocol

from headrace.broker.groups.classic.members import Protocols
from headrace.errors import MembersFull

logger = logging.getLogger("headrace.broker")

MEMBER_BYTES = 2000  # of one that says nothing: itself, its timer, the names of its client
NAME_BYTES = 100  # of a topic that it names, or is assigned, besides the characters
ASSIGNED_TOPIC_BYTES = 600  # of a topic in the assignment of a group of the new protocol, besides the characters
ASSIGNED_BYTES = 250  # of each of its partitions: in the target, with a member, as it was saved
COPIES = 2  # the member's own, and the one in the journal's state


class MemberMemory(Protocol):
    kept_bytes: int


class MemberBudget:
    """One of a broker, also as a holder of memory (see pressure.Holder) which is full rather than asked: whoever lost
    a member would have to say all that again."""

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
        """Raises MembersFull if so much more is too much. Less is always taken."""
        if more_bytes <= 0 or self._held_bytes + more_bytes <= self.bytes_max:
            return
        if not self._is_full:
            self._is_full = True
            logger.warning("members of groups hold %d bytes: no others are taken", self._held_bytes)
        raise MembersFull(f"members of groups hold {self._held_bytes:,} bytes, of {self.bytes_max:,} at most")

    def keep(self, one: MemberMemory, size: int) -> None:
        """From now on `one` takes so much: as checked before, or as a restart found it."""
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
    """Of topics, with how many partitions each has, that a group of the new protocol reads."""
    return sum(ASSIGNED_TOPIC_BYTES + COPIES * len(name) + ASSIGNED_BYTES * count for name, count in partitions.items())
