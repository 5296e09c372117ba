"""Members of a group of the new protocol: what is known of each, whichever protocol it speaks itself."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from headrace.broker.groups.assign import TopicPartition
from headrace.broker.groups.classic.members import Protocols
from headrace.broker.groups.timers import Timer


class MemberState(Enum):
    STABLE = "stable"
    REVOKING = "revoking"  # has to give up partitions first
    WAITING = "waiting"  # for partitions that others still hold


@dataclass(slots=True)
class ClassicSide:
    """What a member has besides when it speaks the classic protocol."""

    session_timeout_ms: int
    protocols: Protocols
    due: float | None = None  # monotonic: by then it has joined again, or asked for what it was assigned


@dataclass(slots=True)
class ConsumerMember:
    member_id: str
    instance_id: str | None
    client_id: str = ""
    client_host: str = ""
    rack_id: str | None = None
    rebalance_timeout_ms: int = 300_000
    topics: frozenset[str] = frozenset()
    pattern: str = ""
    assignor: str | None = None
    epoch: int = 0
    previous_epoch: int = 0
    state: MemberState = MemberState.STABLE
    assigned: set[TopicPartition] = field(default_factory=set)
    revoking: set[TopicPartition] = field(default_factory=set)
    deadline: float = 0.0
    timer: Timer | None = None
    revoke_deadline: float = 0.0
    away: bool = False  # static, left for a moment
    may_read: Callable[[str], bool] | None = None
    is_outdated: bool = False  # it was told of a topic that is gone
    is_restored: bool = False  # from before a restart, and not heard of since
    classic: ClassicSide | None = None  # None: it speaks the new protocol
    kept_bytes: int = 0  # see room.py

    @property
    def holds(self) -> set[TopicPartition]:
        return self.assigned | self.revoking
