"""The state of one transactional id: its producer and its open transaction. Used by the coordinator."""

from typing import NamedTuple

import msgspec

from headrace.broker.groups.offsets import Committed
from headrace.broker.groups.timers import Timer

EMPTY = "Empty"
ONGOING = "Ongoing"
COMMITTED = "CompleteCommit"
ABORTED = "CompleteAbort"
# Kafka's states of a decided transaction while some of its partitions have no marker yet.
OWING = {COMMITTED: "PrepareCommit", ABORTED: "PrepareAbort"}

Where = tuple[str, int]  # topic, partition


class Instance(NamedTuple):
    """A producer id and epoch. The next instance of the same transactional id has a higher epoch or another id."""

    producer_id: int
    epoch: int


NOBODY = Instance(-1, -1)


class OwedMarker(msgspec.Struct, frozen=True, array_like=True):
    """A marker that a log still needs, because the log was damaged when the transaction ended."""

    topic: str
    partition: int
    log_id: int
    producer_id: int
    epoch: int
    commit: bool


class Joined(msgspec.Struct, frozen=True, array_like=True):
    """A partition that its first batch added to a transaction, which that batch may have opened. Stored separately:
    writing all partitions again for each new one would be quadratic."""

    producer_id: int
    epoch: int
    started_ms: int
    topic: str
    partition: int


class Saved(msgspec.Struct, frozen=True, array_like=True):
    producer_id: int
    epoch: int
    timeout_ms: int
    state: str
    started_ms: int
    changed_ms: int
    partitions: list[tuple[str, int, int]]  # topic, partition, log id
    groups: list[str]
    offsets: list[Committed]
    last: Instance = NOBODY
    owed: list[OwedMarker] = []


class Transaction:
    """One transactional id. `partitions`, `groups` and `offsets` belong to the open transaction."""

    def __init__(self, transactional_id: str, producer_id: int, timeout_ms: int) -> None:
        self.transactional_id = transactional_id
        self.producer_id = producer_id
        self.epoch = 0
        self.timeout_ms = timeout_ms
        self.state = EMPTY
        self.started_ms = -1
        self.changed_ms = 0
        self.partitions: dict[Where, int] = {}  # to log id
        self.groups: set[str] = set()
        self.offsets: dict[tuple[str, str, int], Committed] = {}
        self.ending: list[Committed] = []  # offsets of a transaction whose end is being written
        self.busy = False  # a change is being written
        self.is_saved = True  # this state is also on disk; False while a change is not, e.g. on a full disk
        self.joined: dict[int, Where] = {}  # by log id: partitions added by a batch, each stored as Joined
        self.joining: set[Where] = set()  # partitions whose Joined is not known to be durable yet
        self.last = NOBODY  # the previous instance, still accepted after its epoch or id changed
        self.owed: list[OwedMarker] = []
        self.timer: Timer | None = None

    @property
    def instance(self) -> Instance:
        return Instance(self.producer_id, self.epoch)

    @property
    def shown_state(self) -> str:
        """The state to report, as in Kafka: complete only once all markers are in their logs."""
        return OWING.get(self.state, self.state) if self.owed or self.busy else self.state

    @property
    def shown_partitions(self) -> set[Where]:
        return {*self.partitions, *((marker.topic, marker.partition) for marker in self.owed)}

    @property
    def may_expire(self) -> bool:
        return self.state != ONGOING and not self.owed and not self.busy

    def saved(self) -> bytes:
        return msgspec.msgpack.encode(
            Saved(
                self.producer_id,
                self.epoch,
                self.timeout_ms,
                self.state,
                self.started_ms,
                self.changed_ms,
                [(*where, log_id) for where, log_id in self.partitions.items() if log_id not in self.joined],
                sorted(self.groups),
                list(self.offsets.values()),
                self.last,
                self.owed,
            )
        )

    @classmethod
    def restored(cls, transactional_id: str, value: bytes) -> "Transaction":
        saved = msgspec.msgpack.decode(value, type=Saved)
        one = cls(transactional_id, saved.producer_id, saved.timeout_ms)
        one.epoch, one.state, one.last = saved.epoch, saved.state, saved.last
        one.started_ms, one.changed_ms = saved.started_ms, saved.changed_ms
        one.partitions = {(topic, partition): log_id for topic, partition, log_id in saved.partitions}
        one.groups = set(saved.groups)
        one.offsets = {(entry.group, entry.topic, entry.partition): entry for entry in saved.offsets}
        one.owed = list(saved.owed)
        return one

    def clear(self) -> None:
        self.partitions, self.groups, self.offsets = {}, set(), {}
        self.joined, self.joining = {}, set()
        self.started_ms = -1
