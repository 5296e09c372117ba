"""Transactions: records in several logs and offsets of groups that become visible together, or never.

One node and one journal make it short: ending a transaction is one journal entry with the markers of all
its logs, the offsets it commits and its own new state. There is no state in between that a crash could
leave, so there is no prepare and nothing to finish after a restart, except time-outs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec

from headrace.broker.groups.coordinator import Groups
from headrace.broker.groups.offsets import Committed
from headrace.broker.groups.timers import Timer, Timers
from headrace.broker.producer_registry import Producers
from headrace.clock import Clock
from headrace.errors import (
    ConcurrentTransactions,
    HeadraceError,
    InvalidInput,
    InvalidTransactionState,
    InvalidTransactionTimeout,
    ProducerFenced,
    TransactionNotFound,
    UnknownProducer,
)
from headrace.log.log import Log
from headrace.log.shard import Shard
from headrace.record import codec
from headrace.record.layout import CONTROL_ABORT, CONTROL_COMMIT

TRANSACTIONS = "transactions"
TIMEOUT_MS_MAX = 15 * 60 * 1000
EPOCH_MAX = 32766  # that a producer gets: an int16, of which the last one is kept for fencing
RETRY_S = 1.0

EMPTY = "Empty"
ONGOING = "Ongoing"
COMMITTED = "CompleteCommit"
ABORTED = "CompleteAbort"

Where = tuple[str, int]  # topic, partition


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
        self.last_epoch = -1  # of the producer that is still the rightful one, though its epoch was moved on
        self.timer: Timer | None = None

    def saved(self) -> bytes:
        return msgspec.msgpack.encode(
            Saved(
                self.producer_id,
                self.epoch,
                self.timeout_ms,
                self.state,
                self.started_ms,
                self.changed_ms,
                [(topic, partition, log_id) for (topic, partition), log_id in self.partitions.items()],
                sorted(self.groups),
                list(self.offsets.values()),
            )
        )

    @classmethod
    def restored(cls, transactional_id: str, value: bytes) -> "Transaction":
        saved = msgspec.msgpack.decode(value, type=Saved)
        one = cls(transactional_id, saved.producer_id, saved.timeout_ms)
        one.epoch, one.state = saved.epoch, saved.state
        one.started_ms, one.changed_ms = saved.started_ms, saved.changed_ms
        one.partitions = {(topic, partition): log_id for topic, partition, log_id in saved.partitions}
        one.groups = set(saved.groups)
        one.offsets = {(entry.group, entry.topic, entry.partition): entry for entry in saved.offsets}
        return one

    def clear(self) -> None:
        self.partitions, self.groups, self.offsets = {}, set(), {}
        self.started_ms = -1


class Transactions:
    """The coordinator. Owned by the broker; every method runs on the loop's thread."""

    def __init__(
        self, shard: Shard, clock: Clock, timers: Timers, producers: Producers, groups: Groups
    ) -> None:
        self._shard = shard
        self._clock = clock
        self._timers = timers
        self._producers = producers
        self._groups = groups
        self._by_id: dict[str, Transaction] = {}
        self._by_producer: dict[int, Transaction] = {}
        self._spawn: Callable[[Any], object] | None = None

    def load(self, spawn: Callable[[Any], object]) -> None:
        """spawn runs a coroutine: how time-outs abort."""
        self._spawn = spawn
        for key, value in self._shard.state.items(TRANSACTIONS):
            one = Transaction.restored(key.decode(), value)
            self._by_id[one.transactional_id] = one
            self._by_producer[one.producer_id] = one
            if one.state == ONGOING:
                self._start_timer(one)

    def close(self) -> None:
        for one in self._by_id.values():
            if one.timer is not None:
                one.timer.cancel()

    def every(self) -> Iterator[Transaction]:
        return iter(self._by_id.values())

    def get(self, transactional_id: str) -> Transaction:
        try:
            return self._by_id[transactional_id]
        except KeyError:
            raise TransactionNotFound(transactional_id) from None

    # Producers.

    async def begin_producer(
        self, transactional_id: str, timeout_ms: int, producer_id: int = -1, epoch: int = -1
    ) -> tuple[int, int]:
        """(producer id, epoch) for a producer that starts, or starts over; others of that name are fenced."""
        if not transactional_id:
            raise InvalidInput("a transactional id is not empty")
        if not 0 < timeout_ms <= TIMEOUT_MS_MAX:
            raise InvalidTransactionTimeout(f"{timeout_ms} ms; the most is {TIMEOUT_MS_MAX}")
        one = self._by_id.get(transactional_id)
        if one is None:
            one = Transaction(transactional_id, await self._producers.new_id(), timeout_ms)
            if transactional_id in self._by_id:
                raise ConcurrentTransactions(transactional_id)
            self._by_id[transactional_id] = self._by_producer[one.producer_id] = one
            with self._busy(one):
                await self._put(one)
            return one.producer_id, one.epoch
        # It may say the epoch before: its transaction timed out, or our last answer to this was lost.
        rightful = producer_id == one.producer_id and epoch in (one.epoch, one.last_epoch)
        if producer_id >= 0 and not rightful:
            raise ProducerFenced(f"{transactional_id!r} is producer {one.producer_id} at epoch {one.epoch}")
        with self._busy(one):
            if one.state == ONGOING:
                await self._end(one, commit=False, bump=True)
            await self._bump(one)
            one.last_epoch = epoch if producer_id >= 0 else -1
            one.timeout_ms = timeout_ms
            one.state = EMPTY
            await self._put(one)
        return one.producer_id, one.epoch

    async def _bump(self, one: Transaction) -> None:
        if one.epoch < EPOCH_MAX:
            one.epoch += 1
            return
        fresh = await self._producers.new_id()
        self._by_producer.pop(one.producer_id, None)
        one.producer_id, one.epoch = fresh, 0
        self._by_producer[fresh] = one

    def name_of(self, producer_id: int) -> str | None:
        """The transactional id of a producer."""
        one = self._by_producer.get(producer_id)
        return one.transactional_id if one is not None else None

    def check_append(self, producer_id: int, epoch: int, where: Where) -> None:
        """Raises unless a transactional batch of this producer belongs to its open transaction."""
        one = self._by_producer.get(producer_id)
        if one is None:
            raise UnknownProducer(f"producer {producer_id} has no transactional id")
        if epoch != one.epoch:
            raise ProducerFenced(f"producer {producer_id} is at epoch {one.epoch}, not {epoch}")
        # A topic made anew under the name is not in it: its log would get no marker.
        if one.state != ONGOING or one.partitions.get(where) not in self._shard.logs:
            raise InvalidTransactionState(f"{where[0]}-{where[1]} is not in the transaction")

    def _check(self, transactional_id: str, producer_id: int, epoch: int) -> Transaction:
        one = self._by_id.get(transactional_id)
        if one is None or one.producer_id != producer_id:
            raise UnknownProducer(f"producer {producer_id} is not {transactional_id!r}")
        if epoch != one.epoch:
            raise ProducerFenced(f"{transactional_id!r} is at epoch {one.epoch}, not {epoch}")
        if one.busy:
            raise ConcurrentTransactions(transactional_id)
        return one

    # What belongs to a transaction.

    async def add_partitions(
        self, transactional_id: str, producer_id: int, epoch: int, partitions: dict[Where, int]
    ) -> None:
        one = self._check(transactional_id, producer_id, epoch)
        # By log, not by name: a topic may have been made anew since.
        if one.state == ONGOING and one.is_saved and partitions.items() <= one.partitions.items():
            return
        with self._busy(one):
            self._open(one)
            one.partitions.update(partitions)
            await self._put(one)

    async def add_group(self, transactional_id: str, producer_id: int, epoch: int, group: str) -> None:
        one = self._check(transactional_id, producer_id, epoch)
        if one.state == ONGOING and one.is_saved and group in one.groups:
            return
        with self._busy(one):
            self._open(one)
            one.groups.add(group)
            await self._put(one)

    async def commit_offsets(
        self, transactional_id: str, producer_id: int, epoch: int, entries: "list[Committed]"
    ) -> None:
        """Offsets that a group commits if, and when, the transaction is committed."""
        one = self._check(transactional_id, producer_id, epoch)
        if one.state != ONGOING or any(entry.group not in one.groups for entry in entries):
            raise InvalidTransactionState(f"the group is not in the transaction of {transactional_id!r}")
        with self._busy(one):
            one.offsets.update({(entry.group, entry.topic, entry.partition): entry for entry in entries})
            await self._put(one)

    def pending_offsets(self, group: str) -> set[Where]:
        """Partitions whose offset of the group hangs on a transaction that is open, or not ended durably."""
        return {
            (entry.topic, entry.partition)
            for one in self._by_id.values()
            for entry in (one.offsets.values() if one.state == ONGOING else one.ending)
            if entry.group == group
        }

    async def end(self, transactional_id: str, producer_id: int, epoch: int, *, commit: bool) -> None:
        one = self._check(transactional_id, producer_id, epoch)
        if one.state == (COMMITTED if commit else ABORTED):
            return  # the answer was lost
        if one.state != ONGOING:
            raise InvalidTransactionState(f"{transactional_id!r} has no open transaction")
        with self._busy(one):
            await self._end(one, commit=commit, bump=False)

    # The work.

    def _open(self, one: Transaction) -> None:
        if one.state != ONGOING:
            one.clear()
            one.state = ONGOING
            one.started_ms = self._clock.now_ms()
            self._start_timer(one)

    def _start_timer(self, one: Transaction) -> None:
        left_ms = one.started_ms + one.timeout_ms - self._clock.now_ms()
        one.timer = self._timers.call_later(
            min(max(left_ms, 0), one.timeout_ms) / 1000, lambda: self._timed_out(one)
        )

    def _timed_out(self, one: Transaction) -> None:
        one.timer = None
        if one.busy:  # also while it ends: that may still fail, and then it is open as before
            one.timer = self._timers.call_later(RETRY_S, lambda: self._timed_out(one))
        elif one.state == ONGOING and self._spawn is not None:
            self._spawn(self._abort_late(one))

    async def _abort_late(self, one: Transaction) -> None:
        """Its producer is gone or stuck: the epoch moves on, so that it can not come back into the middle."""
        if one.busy:  # since it was decided
            self._timed_out(one)
            return
        if one.state != ONGOING:
            return
        with self._busy(one):
            epoch = one.epoch
            try:
                await self._end(one, commit=False, bump=True)
                one.last_epoch = epoch
            except HeadraceError:
                one.timer = self._timers.call_later(RETRY_S, lambda: self._timed_out(one))

    async def _end(self, one: Transaction, *, commit: bool, bump: bool) -> None:
        """One entry: markers in every log, offsets, and the state of the transaction."""
        before = one.saved()
        producer_id = one.producer_id
        if bump and one.epoch <= EPOCH_MAX:
            one.epoch += 1
        epoch = one.epoch
        logs = [self._shard.logs[log_id] for log_id in one.partitions.values() if log_id in self._shard.logs]
        offsets = [*one.offsets.values()] if commit else []
        partitions, groups, kept = one.partitions, one.groups, one.offsets
        started_ms = one.started_ms
        one.ending = [*kept.values()]
        one.clear()
        one.state = COMMITTED if commit else ABORTED
        one.changed_ms = self._clock.now_ms()
        try:
            entry = self._shard.group()
            marker = control_batch(producer_id, epoch, commit=commit, now_ms=one.changed_ms)
            tickets = [(log, entry.append(log, marker)) for log in logs]
            self._groups.offsets.stage(entry, offsets)
            entry.put(TRANSACTIONS, one.transactional_id.encode(), one.saved())
            ticket = entry.commit()
            # Before readers are woken: they must find the transaction ended.
            ticket.add_callback(lambda done: self._ended(tickets, producer_id, epoch, commit, offsets, done))
            await ticket
        except HeadraceError:
            restored = Transaction.restored(one.transactional_id, before)
            one.epoch, one.state, one.started_ms = restored.epoch, ONGOING, started_ms
            one.partitions, one.groups, one.offsets = partitions, groups, kept
            raise
        finally:
            one.ending = []
        one.is_saved = True
        if one.timer is not None:
            one.timer.cancel()
            one.timer = None

    def _ended(
        self,
        tickets: "list[tuple[Log, Any]]",
        producer_id: int,
        epoch: int,
        commit: bool,
        offsets: "list[Committed]",
        done: Any,
    ) -> None:
        if done.error is not None:
            return
        self._groups.offsets.apply(offsets)
        for log, ticket in tickets:
            self._producers.ended(log, producer_id, epoch, ticket.base_offset, commit=commit)

    async def _put(self, one: Transaction) -> None:
        one.changed_ms = self._clock.now_ms()
        one.is_saved = False
        entry = self._shard.group()
        entry.put(TRANSACTIONS, one.transactional_id.encode(), one.saved())
        await entry.commit()
        one.is_saved = True

    @contextmanager
    def _busy(self, one: Transaction) -> Iterator[None]:
        if one.busy:
            raise ConcurrentTransactions(one.transactional_id)
        one.busy = True
        try:
            yield
        finally:
            one.busy = False


def control_batch(producer_id: int, epoch: int, *, commit: bool, now_ms: int) -> bytearray:
    kind = CONTROL_COMMIT if commit else CONTROL_ABORT
    key = b"\0\0" + kind.to_bytes(2, "big")
    value = b"\0\0" + bytes(4)  # version, epoch of the coordinator: there was only ever one
    return codec.build(
        [(key, value, (), now_ms)],
        timestamp_ms=now_ms,
        producer_id=producer_id,
        producer_epoch=epoch,
        transactional=True,
        control=True,
    )
