"""Transaction coordinator: records in several logs and group offsets become visible together, or never.

One node and one journal keep this simple: ending a transaction is one journal entry with the markers of all its logs,
the offsets it commits and its own new state. A crash can leave no intermediate state, so there is no prepare phase and
nothing to finish after a restart, except time-outs.

Clients of transactions version 2 (KIP-890) do not announce a partition before its first batch. The journal entry of
that batch also adds the partition to the transaction, so that no stored batch can miss its marker. Each of their
transactions has its own epoch: the end of a transaction increments it, in the markers as well, so that a late batch is
rejected as too old. The response to the end carries the next epoch, and a retry of the request gets it again.

A damaged log accepts no marker. The other partitions of the transaction get theirs; the damaged log's marker is owed,
stored with the transactional id, and written at the first start that finds the log intact. Until then read_committed
consumers of that log stop before the transaction; an operator restores the log or deletes the topic.
"""

import logging
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import msgspec

from headrace.broker.groups.coordinator import Groups
from headrace.broker.groups.offsets import Committed
from headrace.broker.groups.timers import Timer, Timers
from headrace.broker.transactions.markers import control_batch, is_due, say_owed
from headrace.broker.transactions.producers import Producers
from headrace.broker.transactions.transaction import (
    ABORTED,
    COMMITTED,
    EMPTY,
    NOBODY,
    ONGOING,
    Instance,
    Joined,
    OwedMarker,
    Transaction,
    Where,
)
from headrace.clock import Clock
from headrace.errors import (
    ConcurrentTransactions,
    HeadraceError,
    InvalidInput,
    InvalidProducerEpoch,
    InvalidTransactionState,
    InvalidTransactionTimeout,
    NotInTransaction,
    ProducerFenced,
    TransactionAbortable,
    TransactionNotFound,
    UnknownProducer,
)
from headrace.log.commit.atomic_group import AtomicGroup
from headrace.log.commit.round import Ticket
from headrace.log.log import Log
from headrace.log.shard import Shard
from headrace.record.types import BatchInfo

TRANSACTIONS = "transactions"
JOINED = "transactions.joined"
TIMEOUT_MS_MAX = 15 * 60 * 1000
EPOCH_MAX = 32766  # the highest a producer gets: 32767 is reserved for fencing
RETRY_S = 1.0

ID_EXPIRATION_MS = 7 * 24 * 3600 * 1000  # transactional.id.expiration.ms: without use and without a transaction
SWEEP_S = 3600.0
EXPIRED_AT_ONCE = 100  # ids per journal entry

logger = logging.getLogger("headrace.broker")


class Transactions:
    """The coordinator. Owned by the broker; every method runs on the event-loop thread."""

    def __init__(self, shard: Shard, clock: Clock, timers: Timers, producers: Producers, groups: Groups) -> None:
        self._shard = shard
        self._clock = clock
        self._timers = timers
        self._producers = producers
        self._groups = groups
        self._by_id: dict[str, Transaction] = {}
        self._by_producer: dict[int, Transaction] = {}
        self._spawn: Callable[[Any], object] | None = None
        self._sweep: Timer | None = None

    def load(self, spawn: Callable[[Any], object]) -> None:
        """Restores the state. `spawn` starts a coroutine; time-outs use it to abort transactions."""
        self._spawn = spawn
        for key, value in self._shard.state.items(TRANSACTIONS):
            one = Transaction.restored(key.decode(), value)
            self._by_id[one.transactional_id] = one
            self._by_producer[one.producer_id] = one
        for key, value in self._shard.state.items(JOINED):
            self._restore_joined(int.from_bytes(key[:8], "big"), key[8:].decode(), value)
        for one in self._by_id.values():
            if one.state == ONGOING:
                self._start_timer(one)
            if one.owed:
                self._pay(one)
        self._sweep = self._timers.call_later(SWEEP_S, self._sweep_now)

    def _restore_joined(self, log_id: int, transactional_id: str, value: bytes) -> None:
        joined = msgspec.msgpack.decode(value, type=Joined)
        one, where = self._by_id.get(transactional_id), (joined.topic, joined.partition)
        if one is None or one.instance != (joined.producer_id, joined.epoch):
            return
        one.state, one.started_ms = ONGOING, joined.started_ms
        one.joined[log_id] = where
        if log_id in self._shard.logs:  # skip a deleted log: a recreated one of its name may be included
            one.partitions[where] = log_id

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
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
        check_transactional_id(transactional_id)
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
        # The producer may name its previous instance: its transaction timed out, or our last response was lost.
        said = Instance(producer_id, epoch) if producer_id >= 0 else NOBODY
        if said != NOBODY and said not in (one.instance, one.last):
            raise ProducerFenced(f"{transactional_id!r} is producer {one.producer_id} at epoch {one.epoch}")
        if said != NOBODY and said == one.last and one.state == EMPTY and one.is_saved and not one.busy:
            return one.producer_id, one.epoch  # a retry: our response was lost, and no other producer has this epoch
        with self._busy(one):
            if one.state == ONGOING:
                await self._end(one, commit=False, fenced=said)
            await self._bump(one)
            one.last = said
            one.timeout_ms = timeout_ms
            one.state = EMPTY
            await self._put(one)
        return one.producer_id, one.epoch

    async def _bump(self, one: Transaction) -> None:
        if one.epoch < EPOCH_MAX:
            one.epoch += 1
            return
        self._rename(one, await self._producers.new_id(), 0)

    def _rename(self, one: Transaction, producer_id: int, epoch: int) -> None:
        self._by_producer.pop(one.producer_id, None)
        one.producer_id, one.epoch = producer_id, epoch
        self._by_producer[producer_id] = one

    def name_of(self, producer_id: int) -> str | None:
        """The transactional id of a producer."""
        one = self._by_producer.get(producer_id)
        return one.transactional_id if one is not None else None

    def check_append(self, producer_id: int, epoch: int, where: Where) -> None:
        """Raises unless a transactional batch of this producer belongs to its open transaction."""
        one = self._producing(producer_id, epoch)
        # A topic recreated under the same name is not in the transaction: its log would get no marker.
        if one.state != ONGOING or one.partitions.get(where) not in self._shard.logs or where in one.joining:
            raise NotInTransaction(f"{where[0]}-{where[1]} is not in the transaction")

    def append(self, log: Log, data: bytearray | memoryview, infos: list[BatchInfo], where: Where) -> Ticket:
        """Appends a transactional batch. The first batch of a partition adds the partition to the transaction, and
        opens the transaction if needed. Each transaction has its own epoch, so its first batch for a log has sequence
        0; any other sequence means that the batch overtook the first one."""
        one = self._producing(infos[0].producer_id, infos[0].producer_epoch)
        saved = where not in one.joining if log.id in one.joined else one.is_saved
        if one.state == ONGOING and one.partitions.get(where) == log.id and saved:
            return self._producers.append(log, data, infos, from_zero=True)
        if (one.busy and one.state != ONGOING) or any(marker.log_id == log.id for marker in one.owed):
            if infos[0].base_sequence == 0:  # a later batch is rejected as out of order when it is retried
                self._producers.put_off(log, infos[0])
            raise ConcurrentTransactions(one.transactional_id)
        join = partial(self._join, one, where, log.id)
        ticket = self._producers.append(log, data, infos, join, from_zero=True)
        ticket.add_callback(partial(self._joined, one, where))
        return ticket

    def _join(self, one: Transaction, where: Where, log_id: int, entry: AtomicGroup) -> None:
        self._open(one)
        one.partitions[where] = log_id
        one.joined[log_id] = where
        one.joining.add(where)
        joined = Joined(*one.instance, one.started_ms, *where)
        entry.put(JOINED, joined_key(one, log_id), msgspec.msgpack.encode(joined))

    @staticmethod
    def _joined(one: Transaction, where: Where, ticket: Ticket) -> None:
        if ticket.error is None:
            one.joining.discard(where)

    def _producing(self, producer_id: int, epoch: int) -> Transaction:
        one = self._by_producer.get(producer_id)
        if one is None:
            raise UnknownProducer(f"producer {producer_id} has no transactional id")
        if epoch != one.epoch:  # perhaps timed out: unlike a fence, this lets a Java producer start over
            raise InvalidProducerEpoch(f"producer {producer_id} is at epoch {one.epoch}, not {epoch}")
        return one

    def _check(self, transactional_id: str, producer_id: int, epoch: int) -> Transaction:
        check_transactional_id(transactional_id)
        one = self._by_id.get(transactional_id)
        if one is None or one.producer_id != producer_id:
            raise UnknownProducer(f"producer {producer_id} is not {transactional_id!r}")
        if epoch != one.epoch:
            raise ProducerFenced(f"{transactional_id!r} is at epoch {one.epoch}, not {epoch}")
        if one.busy:
            raise ConcurrentTransactions(transactional_id)
        return one

    # The contents of a transaction.

    async def add_partitions(
        self, transactional_id: str, producer_id: int, epoch: int, partitions: dict[Where, int]
    ) -> None:
        one = self._check(transactional_id, producer_id, epoch)
        if any(marker.log_id in partitions.values() for marker in one.owed):
            raise ConcurrentTransactions(transactional_id)  # the log must get its owed marker before further records
        # Compare log ids, not only names: the topic may have been recreated.
        saved = one.is_saved and not one.joining
        if one.state == ONGOING and saved and partitions.items() <= one.partitions.items():
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
        self, transactional_id: str, producer_id: int, epoch: int, entries: "list[Committed]", *, joins: bool = False
    ) -> None:
        """Adds offsets that the group commits when the transaction commits. With `joins`, adds the group to the
        transaction as well."""
        if joins:
            self._check_time(transactional_id, Instance(producer_id, epoch))
        one = self._check(transactional_id, producer_id, epoch)
        if joins and not entries:
            return
        if not joins and (one.state != ONGOING or any(entry.group not in one.groups for entry in entries)):
            raise NotInTransaction(f"the group is not in the transaction of {transactional_id!r}")
        with self._busy(one):
            self._open(one)
            one.groups.update(entry.group for entry in entries)
            one.offsets.update({(entry.group, entry.topic, entry.partition): entry for entry in entries})
            await self._put(one)

    def pending_offsets(self, group: str) -> set[Where]:
        """Partitions whose offset of the group depends on a transaction that is open or not durably ended."""
        return {
            (entry.topic, entry.partition)
            for one in self._by_id.values()
            for entry in (one.offsets.values() if one.state == ONGOING else one.ending)
            if entry.group == group
        }

    async def end(self, transactional_id: str, producer_id: int, epoch: int, *, commit: bool) -> None:
        known = self._by_id.get(transactional_id)
        if known is not None and not commit and known.state == ABORTED and known.last == (producer_id, epoch):
            if known.busy:
                raise ConcurrentTransactions(transactional_id)  # the abort may still fail and leave it open
            return  # already aborted by its time-out, as requested: the producer can start over
        one = self._check(transactional_id, producer_id, epoch)
        if one.state == (COMMITTED if commit else ABORTED):
            return  # a retry: our response was lost
        if one.state != ONGOING:
            raise InvalidTransactionState(f"{transactional_id!r} has no open transaction")
        with self._busy(one):
            await self._end(one, commit=commit)

    async def end_with_epoch(self, transactional_id: str, producer_id: int, epoch: int, *, commit: bool) -> Instance:
        """Ends the transaction and returns the producer's instance for its next transaction. Aborting without an open
        transaction increments the epoch as well: a producer whose batches were not acknowledged cannot know whether
        one of them was stored and opened a transaction."""
        check_transactional_id(transactional_id)
        said = Instance(producer_id, epoch)
        one = self._by_id.get(transactional_id)
        if one is None or producer_id < 0 or producer_id not in (one.producer_id, one.last.producer_id):
            raise UnknownProducer(f"producer {producer_id} is not {transactional_id!r}")
        if said not in (one.instance, one.last):
            raise ProducerFenced(f"{transactional_id!r} is at epoch {one.epoch}, not {epoch}")
        if one.busy:
            raise ConcurrentTransactions(transactional_id)
        if said != one.instance:
            return await self._told_again(one, said, commit=commit)
        if commit and one.state != ONGOING:
            raise InvalidTransactionState(f"{transactional_id!r} has no open transaction")
        with self._busy(one):
            fresh = await self._producers.new_id() if one.epoch >= EPOCH_MAX else None
            await self._end(one, commit=commit, fenced=said, next_id=fresh)
        return one.instance

    async def _told_again(self, one: Transaction, said: Instance, *, commit: bool) -> Instance:
        """Answers an instance whose transaction has already ended: our response was lost, or it timed out."""
        if commit:
            self._check_time(one.transactional_id, said)
        if one.state not in (COMMITTED, ABORTED):
            raise ProducerFenced(f"{one.transactional_id!r} is at epoch {one.epoch}, not {said.epoch}")
        if one.state != (COMMITTED if commit else ABORTED):
            raise InvalidTransactionState(f"the transaction of {one.transactional_id!r} was committed")
        if one.epoch > EPOCH_MAX or not one.is_saved:  # timed out; no producer may have that epoch
            with self._busy(one):
                if one.epoch > EPOCH_MAX:
                    await self._bump(one)
                await self._put(one)
        return one.instance

    def _check_time(self, transactional_id: str, said: Instance) -> None:
        """Raises if the transaction timed out and was aborted. A producer that then aborts it gets the next epoch."""
        one = self._by_id.get(transactional_id)
        if one is not None and one.state == ABORTED and said == one.last and said != NOBODY:
            raise TransactionAbortable(f"the transaction of {transactional_id!r} was aborted")

    # The work.

    def _open(self, one: Transaction) -> None:
        if one.state != ONGOING:
            one.clear()
            one.state = ONGOING
            one.started_ms = self._clock.now_ms()
            self._start_timer(one)

    def _start_timer(self, one: Transaction) -> None:
        left_ms = one.started_ms + one.timeout_ms - self._clock.now_ms()
        one.timer = self._timers.call_later(min(max(left_ms, 0), one.timeout_ms) / 1000, lambda: self._timed_out(one))

    def _timed_out(self, one: Transaction) -> None:
        one.timer = None
        if one.busy:  # also while it ends: that may fail and leave the transaction open
            one.timer = self._timers.call_later(RETRY_S, lambda: self._timed_out(one))
        elif one.state == ONGOING and self._spawn is not None:
            self._spawn(self._abort_late(one))

    async def _abort_late(self, one: Transaction) -> None:
        """Aborts a transaction whose producer is gone or stuck, and increments the epoch, so that the producer cannot
        continue in the middle."""
        if one.busy:  # it became busy after the time-out
            self._timed_out(one)
            return
        if one.state != ONGOING:
            return
        with self._busy(one):
            try:
                await self._end(one, commit=False, fenced=one.instance)
            except HeadraceError:
                one.timer = self._timers.call_later(RETRY_S, lambda: self._timed_out(one))

    async def _end(
        self, one: Transaction, *, commit: bool, fenced: Instance | None = None, next_id: int | None = None
    ) -> None:
        """Writes one journal entry: markers in every log, offsets, and the state of the transaction. With `fenced` the
        epoch is incremented, and that instance may still start over. A producer whose epochs are used up gets
        `next_id`."""
        before = one.saved()
        producer_id = one.producer_id
        if fenced is not None:
            one.epoch, one.last = min(one.epoch, EPOCH_MAX) + 1, fenced
        epoch = one.epoch
        if next_id is not None:
            self._rename(one, next_id, 0)
        there = {where: self._shard.logs[log] for where, log in one.partitions.items() if log in self._shard.logs}
        logs = [log for log in there.values() if log.damage is None]
        owed = [
            OwedMarker(*where, log.id, producer_id, epoch, commit)
            for where, log in there.items()
            if log.damage is not None
        ]
        offsets = [*one.offsets.values()] if commit else []
        partitions, groups, kept, joined = one.partitions, one.groups, one.offsets, one.joined
        one.ending = [*kept.values()]
        one.clear()
        one.owed = [*one.owed, *owed]
        one.state = COMMITTED if commit else ABORTED
        one.changed_ms = self._clock.now_ms()
        try:
            entry = self._shard.group()
            marker = control_batch(producer_id, epoch, commit=commit, now_ms=one.changed_ms)
            tickets = [(log, entry.append(log, marker)) for log in logs]
            self._groups.offsets.stage(entry, offsets)
            for log_id in joined:
                entry.delete(JOINED, joined_key(one, log_id))
            entry.put(TRANSACTIONS, one.transactional_id.encode(), one.saved())
            ticket = entry.commit()
            # Before readers are woken: they must find the transaction ended.
            ticket.add_callback(lambda done: self._ended(tickets, producer_id, epoch, commit, offsets, done))
            await ticket
        except HeadraceError:
            restored = Transaction.restored(one.transactional_id, before)
            self._rename(one, restored.producer_id, restored.epoch)
            one.state, one.started_ms = restored.state, restored.started_ms
            one.last, one.owed = restored.last, restored.owed
            one.partitions, one.groups, one.offsets = partitions, groups, kept
            one.joined, one.joining = joined, set(joined.values())  # none is known to be durable
            raise
        finally:
            one.ending = []
        one.is_saved = True
        say_owed(one, owed)
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

    # Markers that damaged logs are owed.

    def logs_deleted(self, log_ids: Container[int]) -> None:
        """Drops the markers owed to deleted logs. Needs no journal entry: the next start finds the logs gone."""
        for one in self._by_id.values():
            if one.owed:
                one.owed = [marker for marker in one.owed if marker.log_id not in log_ids]

    def _pay(self, one: Transaction) -> None:
        there = [marker for marker in one.owed if marker.log_id in self._shard.logs]
        damaged = [marker for marker in there if not is_due(self._shard, marker)]
        say_owed(one, damaged)
        if len(damaged) < len(one.owed) and self._spawn is not None:
            self._spawn(self._pay_due(one))

    async def _pay_due(self, one: Transaction) -> None:
        """Writes owed markers to logs that accept them again, and drops those of deleted logs."""
        try:
            with self._busy(one):
                await self._write_due(one)
        except HeadraceError:
            self._timers.call_later(RETRY_S, lambda: self._pay(one))

    async def _write_due(self, one: Transaction) -> None:
        due, owed = [marker for marker in one.owed if is_due(self._shard, marker)], one.owed
        one.owed = [marker for marker in owed if marker.log_id in self._shard.logs and marker not in due]
        try:
            entry = self._shard.group()
            written = [(marker, self._shard.logs[marker.log_id]) for marker in due]
            now_ms = self._clock.now_ms()
            tickets = [
                (log, entry.append(log, control_batch(m.producer_id, m.epoch, commit=m.commit, now_ms=now_ms)))
                for m, log in written
            ]
            entry.put(TRANSACTIONS, one.transactional_id.encode(), one.saved())
            ticket = entry.commit()
            for (log, part), marker in zip(tickets, due, strict=True):
                ended = partial(self._ended, [(log, part)], marker.producer_id, marker.epoch, marker.commit, [])
                ticket.add_callback(ended)
            await ticket
        except HeadraceError:
            one.owed = owed
            raise

    # Expiry of unused transactional ids.

    def _sweep_now(self) -> None:
        self._sweep = self._timers.call_later(SWEEP_S, self._sweep_now)
        if self._spawn is not None:
            self._spawn(self.expire())

    async def expire(self) -> None:
        """Removes ids that were unused for as long as Kafka keeps them. An id with an open transaction stays."""
        horizon_ms = self._clock.now_ms() - ID_EXPIRATION_MS
        old = [one for one in self._by_id.values() if one.may_expire and one.changed_ms < horizon_ms]
        for at in range(0, len(old), EXPIRED_AT_ONCE):
            now = [one for one in old[at : at + EXPIRED_AT_ONCE] if one.may_expire and one.changed_ms < horizon_ms]
            try:
                await self._forget(now)
            except HeadraceError as error:
                logger.warning("transactional ids that are not used any more are kept: %s", error)
                return

    async def _forget(self, gone: list[Transaction]) -> None:
        with ExitStack() as busy:  # a producer that returns meanwhile retries, and gets a new producer id
            entry = self._shard.group()
            for one in gone:
                busy.enter_context(self._busy(one))
                entry.delete(TRANSACTIONS, one.transactional_id.encode())
            await entry.commit()
            for one in gone:
                del self._by_id[one.transactional_id]
                self._by_producer.pop(one.producer_id, None)

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


def check_transactional_id(transactional_id: str) -> None:
    if not transactional_id:
        raise InvalidInput("a transactional id is not empty")


def joined_key(one: Transaction, log_id: int) -> bytes:
    return log_id.to_bytes(8, "big") + one.transactional_id.encode()
