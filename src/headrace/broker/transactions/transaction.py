"""One transactional id: its producer, its open transaction, and their stored form."""

from typing import NamedTuple

import msgspec

from headrace.broker.groups.offsets import CommittedOffset
from headrace.broker.groups.timers import Timer

EMPTY = "Empty"
ONGOING = "Ongoing"
COMMITTED = "CompleteCommit"
ABORTED = "CompleteAbort"
# Kafka's names for a decided transaction while some partitions lack their markers.
OWING = {COMMITTED: "PrepareCommit", ABORTED: "PrepareAbort"}

Where = tuple[str, int]  # topic, partition


class Instance(NamedTuple):
    """One incarnation of a producer; the next one of a transactional id has a higher epoch or another producer id."""

    producer_id: int
    epoch: int


NO_INSTANCE = Instance(-1, -1)
EPOCH_MAX = 32766  # the highest epoch of a producer; the last int16 is reserved for fencing


class OwedMarker(msgspec.Struct, frozen=True, array_like=True):
    """A marker that could not be written because the log was damaged when the transaction ended."""

    topic: str
    partition: int
    log_id: int
    producer_id: int
    epoch: int
    commit: bool


class AddedPartition(msgspec.Struct, frozen=True, array_like=True):
    """A partition that its first batch added to a transaction (KIP-890), and perhaps opened it. Stored separately:
    storing all partitions again with each new one would be quadratic."""

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
    offsets: list[CommittedOffset]
    last: Instance = NO_INSTANCE
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
        self.offsets: dict[tuple[str, str, int], CommittedOffset] = {}
        self.ending: list[CommittedOffset] = []  # offsets of a transaction whose end is being stored
        self.busy = False  # a change is being stored
        self.is_saved = True  # False after a change that could not be stored
        self.joined: dict[int, Where] = {}  # by log id: partitions added by a batch, each stored as Joined
        self.joining: set[Where] = set()  # not durable yet
        self.last = NO_INSTANCE  # the previous instance, which may still learn of the new epoch
        self.owed: list[OwedMarker] = []
        self.timer: Timer | None = None

    @property
    def instance(self) -> Instance:
        return Instance(self.producer_id, self.epoch)

    @property
    def shown_state(self) -> str:
        """The state as Kafka shows it: complete only when all markers are written."""
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


def joined_key(one: Transaction, log_id: int) -> bytes:
    return log_id.to_bytes(8, "big") + one.transactional_id.encode()
