"""Members of a classic group, and the requests and responses that they exchange with it."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from headrace.broker.groups.timers import Timer
from headrace.errors import HeadraceError

Protocols = tuple[tuple[str, bytes], ...]  # (name, metadata) pairs, the preferred protocol first


class GroupState(Enum):
    """The values are the names that Kafka's tools print."""

    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


def names_of(protocols: Protocols) -> frozenset[str]:
    return frozenset(name for name, _ in protocols)


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """A JoinGroup request."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: Protocols
    id_required: bool = False  # the client understands MEMBER_ID_REQUIRED
    can_skip_assignment: bool = False

    @property
    def names(self) -> frozenset[str]:
        return names_of(self.protocols)


@dataclass(frozen=True, slots=True)
class JoinResult:
    generation: int
    protocol_type: str
    protocol: str
    leader: str
    member_id: str
    members: tuple[tuple[str, str | None, bytes], ...] = ()  # for the leader: (id, instance, metadata)
    skip_assignment: bool = False


@dataclass(frozen=True, slots=True)
class Synced:
    protocol_type: str
    protocol: str
    assignment: bytes


JoinAnswer = Callable[[JoinResult | HeadraceError], None]
SyncAnswer = Callable[[Synced | HeadraceError], None]


@dataclass(slots=True)
class Member:
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: Protocols
    assignment: bytes = b""  # the last one: valid until a rebalance in progress ends
    deadline: float = 0.0  # monotonic; when the session expires
    timer: Timer | None = None
    join_answer: JoinAnswer | None = None
    sync_answer: SyncAnswer | None = None
    joined: bool = False  # has joined the generation in preparation
    generation: int = 0  # the last generation of the member
    kept_bytes: int = 0  # see member_budget.py

    @property
    def names(self) -> frozenset[str]:
        return names_of(self.protocols)

    def metadata(self, protocol: str) -> bytes:
        for name, data in self.protocols:
            if name == protocol:
                return data
        return b""

    def supports(self, protocol: str) -> bool:
        return any(name == protocol for name, _ in self.protocols)

    def answer_join(self, what: JoinResult | HeadraceError) -> None:
        answer, self.join_answer = self.join_answer, None
        if answer is not None:
            answer(what)

    def answer_sync(self, what: Synced | HeadraceError) -> None:
        answer, self.sync_answer = self.sync_answer, None
        if answer is not None:
            answer(what)
