"""Members of a consumer group, including hosted members that speak the classic protocol."""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from headrace.broker.groups.assign import TopicPartition
from headrace.broker.groups.classic.members import Protocols
from headrace.broker.groups.timers import Timer


class MemberState(Enum):
    STABLE = "stable"
    REVOKING = "revoking"  # must revoke partitions first
    WAITING = "waiting"  # waits for partitions that other members still hold


@dataclass(slots=True)
class ClassicSide:
    """Additional state of a member that speaks the classic protocol."""

    session_timeout_ms: int
    protocols: Protocols
    due: float | None = None  # monotonic deadline to rejoin or to sync


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
    away: bool = False  # a static member that has left and intends to return
    may_read: Callable[[str], bool] | None = None
    is_outdated: bool = False  # its assignment names a deleted topic
    is_restored: bool = False  # from before a restart, without a heartbeat since
    classic: ClassicSide | None = None  # None: the member speaks the consumer protocol
    kept_bytes: int = 0  # see member_budget.py

    @property
    def holds(self) -> set[TopicPartition]:
        return self.assigned | self.revoking
