"""What is known of one transactional id: its producer, and the transaction that is open."""

from typing import NamedTuple

import msgspec

from headrace.broker.groups.offsets import Committed
from headrace.broker.groups.timers import Timer

EMPTY = "Empty"
ONGOING = "Ongoing"
COMMITTED = "CompleteCommit"
ABORTED = "CompleteAbort"
# As Kafka calls one that is decided while some of its partitions have no marker yet.
OWING = {COMMITTED: "PrepareCommit", ABORTED: "PrepareAbort"}

Where = tuple[str, int]  # topic, partition


class Instance(NamedTuple):
    """A producer as it names itself; the next one of the same transactional id has a higher epoch, or another id."""

    producer_id: int
    epoch: int


NOBODY = Instance(-1, -1)


class OwedMarker(msgspec.Struct, frozen=True, array_like=True):
    """The end of a transaction that a log has still to be told: it was damaged when the transaction ended."""

    topic: str
    partition: int
    log_id: int
    producer_id: int
    epoch: int
    commit: bool


class Joined(msgspec.Struct, frozen=True, array_like=True):
    """A partition that its first batch brought into a transaction, and opened that, perhaps. Kept by itself: all of
    them anew with each would be quadratic."""

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
    """One transactional id. `partitions` and the rest are those of the transaction that is open."""

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
        self.ending: list[Committed] = []  # offsets of one whose end is on its way to the disk
        self.busy = False  # a change is on its way to the disk
        self.is_saved = True  # what is here is on the disk as well: a change that found no room is not
        self.joined: dict[int, Where] = {}  # by log: those that came in with a batch, each kept as Joined
        self.joining: set[Where] = set()  # not known to be on the disk yet
        self.last = NOBODY  # who is still the rightful producer, though its epoch or id was moved on
        self.owed: list[OwedMarker] = []
        self.timer: Timer | None = None

    @property
    def instance(self) -> Instance:
        return Instance(self.producer_id, self.epoch)

    @property
    def shown_state(self) -> str:
        """As Kafka shows it: complete when whoever looks finds the markers where they belong."""
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
