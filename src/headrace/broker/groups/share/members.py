"""Members of a share group and their saved form, so that they continue after a restart.

A member is saved when it changes, not with every heartbeat, and without waiting: a member that a crash loses rejoins.
"""

from dataclasses import dataclass

import msgspec

from headrace.broker.groups.timers import Timer
from headrace.errors import InvalidInput

SHARE_MEMBERS = "share.members"
ID_CHARACTERS_MAX = 1000
NAMES_CHARACTERS_MAX = 1 << 20
TopicPartition = tuple[str, int]


class SavedShareMember(msgspec.Struct, frozen=True, array_like=True):
    client_id: str
    client_host: str
    rack_id: str | None
    topics: list[str]
    epoch: int
    previous_epoch: int
    counts: dict[str, int]  # topic -> number of its partitions; a member is assigned all of them
    is_outdated: bool


@dataclass(slots=True)
class ShareMember:
    member_id: str
    client_id: str = ""
    client_host: str = ""
    rack_id: str | None = None
    topics: frozenset[str] = frozenset()
    epoch: int = 0
    previous_epoch: int = 0  # still accepted: the response with the new epoch may be lost
    assigned: frozenset[TopicPartition] = frozenset()
    timer: Timer | None = None
    deadline: float = 0.0
    is_outdated: bool = False  # its assignment names a deleted topic
    saved: bytes = b""
    kept_bytes: int = 0  # see groups/member_budget.py

    def save(self) -> bytes:
        counts: dict[str, int] = {}
        for topic, _ in self.assigned:
            counts[topic] = counts.get(topic, 0) + 1
        saved = SavedShareMember(
            self.client_id,
            self.client_host,
            self.rack_id,
            sorted(self.topics),
            self.epoch,
            self.previous_epoch,
            dict(sorted(counts.items())),
            self.is_outdated,
        )
        return msgspec.msgpack.encode(saved)


def restored(member_id: str, value: bytes) -> ShareMember:
    saved = msgspec.msgpack.decode(value, type=SavedShareMember)
    return ShareMember(
        member_id,
        saved.client_id,
        saved.client_host,
        saved.rack_id,
        frozenset(saved.topics),
        saved.epoch,
        saved.previous_epoch,
        frozenset((topic, number) for topic, count in saved.counts.items() for number in range(count)),
        is_outdated=saved.is_outdated,
        saved=value,
    )


def check_sizes(member_id: str, client_id: str, rack_id: str | None, topics: frozenset[str] | None) -> None:
    """Bound what a heartbeat may make the broker store."""
    if any(len(one or "") > ID_CHARACTERS_MAX for one in (member_id, client_id, rack_id)):
        raise InvalidInput(f"an id exceeds {ID_CHARACTERS_MAX} characters")
    if sum(map(len, topics or ())) > NAMES_CHARACTERS_MAX:
        raise InvalidInput(f"the subscription exceeds {NAMES_CHARACTERS_MAX} characters")
