"""Transactions: records in several logs and offsets of groups that become visible together, or never.

With one node and one journal this is simple: ending a transaction is one journal entry with the markers of all its
logs, the offsets it commits and its new state. A crash leaves no state in between, so there is no prepare phase and
nothing to finish after a restart, except timeouts.

Clients of transaction version 2 (KIP-890) do not announce a partition before its first batch: the journal entry of that
batch also adds the partition to the transaction, so every stored batch will get a marker. Each of their transactions
has an epoch of its own: the end increases it, in the markers, too, so that a late batch is fenced. The answer to the
end has the next epoch, and a repeated request gets it again.

A damaged log accepts no marker. The other partitions of the transaction get theirs; the missing one is stored with the
transactional id as owed, and written by the start that finds the log intact again. Until then readers of committed
messages stop before the transaction in that log; an operator restores the log or deletes the topic.
"""

import logging
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import msgspec

from headrace.broker.groups.coordinator import Groups
from headrace.broker.groups.offsets import CommittedOffset
from headrace.broker.groups.timers import Timer, Timers
from headrace.broker.streams.partition import Partition
from headrace.broker.transactions.markers import control_batch, is_due, log_owed
from headrace.broker.transactions.producers import Producers
from headrace.broker.transactions.transaction import (
    ABORTED,
    COMMITTED,
    EMPTY,
    NO_INSTANCE,
    ONGOING,
    AddedPartition,
    Instance,
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
EPOCH_MAX = 32766  # the highest epoch of a producer; the last int16 is reserved for fencing
RETRY_S = 1.0

ID_EXPIRATION_MS = 7 * 24 * 3600 * 1000  # transactional.id.expiration.ms
SWEEP_S = 3600.0
EXPIRED_AT_ONCE = 100  # per journal entry

logger = logging.getLogger("headrace.broker")


class Transactions:
    """The coordinator. Owned by the broker; every method runs on the loop's thread."""

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
        """`spawn` runs a coroutine: timeouts abort transactions with it."""
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
                self._write_owed(one)
        self._sweep = self._timers.call_later(SWEEP_S, self._sweep_now)

    def _restore_joined(self, log_id: int, transactional_id: str, value: bytes) -> None:
        joined = msgspec.msgpack.decode(value, type=AddedPartition)
        one, where = self._by_id.get(transactional_id), (joined.topic, joined.partition)
        if one is None or one.instance != (joined.producer_id, joined.epoch):
            return
        one.state, one.started_ms = ONGOING, joined.started_ms
        one.joined[log_id] = where
        if log_id in self._shard.logs:  # else deleted; a new topic of that name may be in the transaction, too
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
        """(producer id, epoch) for a producer that starts or restarts; others with that id are fenced."""
        check_transactional_id(transactional_id)
        if not 0 < timeout_ms <= TIMEOUT_MS_MAX:
            raise InvalidTransactionTimeout(
                f"the transaction timeout must be 1 to {TIMEOUT_MS_MAX} ms, not {timeout_ms}"
            )
        one = self._by_id.get(transactional_id)
        if one is None:
            one = Transaction(transactional_id, await self._producers.new_id(), timeout_ms)
            if transactional_id in self._by_id:
                raise ConcurrentTransactions(transactional_id)
            self._by_id[transactional_id] = self._by_producer[one.producer_id] = one
            with self._busy(one):
                await self._put(one)
            return one.producer_id, one.epoch
        # It may name its previous instance: its transaction timed out, or our last answer was lost.
        previous = Instance(producer_id, epoch) if producer_id >= 0 else NO_INSTANCE
        if previous != NO_INSTANCE and previous not in (one.instance, one.last):
            raise ProducerFenced(f"{transactional_id!r} is producer {one.producer_id} at epoch {one.epoch}")
        if previous != NO_INSTANCE and previous == one.last and one.state == EMPTY and one.is_saved and not one.busy:
            return one.producer_id, one.epoch  # a retry: our answer was lost, and no other instance has this epoch
        with self._busy(one):
            if one.state == ONGOING:
                await self._end(one, commit=False, fenced=previous)
            await self._bump(one)
            one.last = previous
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
        # A topic that was recreated under the name is not in it: its log would get no marker.
        if one.state != ONGOING or one.partitions.get(where) not in self._shard.logs or where in one.joining:
            raise NotInTransaction(f"{where[0]}-{where[1]} is not in the transaction")

    def append(
        self, partition: Partition, data: bytearray | memoryview, infos: list[BatchInfo], where: Where
    ) -> Ticket:
        """Append a transactional batch, which adds its partition to the transaction and opens it if it is the first.

        Each transaction has an epoch of its own, so its first batch in a log has sequence number 0; another number
        means that the batch has overtaken the first one."""
        one = self._producing(infos[0].producer_id, infos[0].producer_epoch)
        log_id = partition.log_id
        saved = where not in one.joining if log_id in one.joined else one.is_saved
        if one.state == ONGOING and one.partitions.get(where) == log_id and saved:
            return self._producers.append(partition, data, infos, from_zero=True)
        if (one.busy and one.state != ONGOING) or any(marker.log_id == log_id for marker in one.owed):
            if infos[0].base_sequence == 0:  # a later batch is out of order when it is retried
                self._producers.put_off(partition, infos[0])
            raise ConcurrentTransactions(one.transactional_id)
        join = partial(self._join, one, where, log_id)
        ticket = self._producers.append(partition, data, infos, join, from_zero=True)
        ticket.add_callback(partial(self._joined, one, where))
        return ticket

    def _join(self, one: Transaction, where: Where, log_id: int, entry: AtomicGroup) -> None:
        self._open(one)
        one.partitions[where] = log_id
        one.joined[log_id] = where
        one.joining.add(where)
        joined = AddedPartition(*one.instance, one.started_ms, *where)
        entry.put(JOINED, joined_key(one, log_id), msgspec.msgpack.encode(joined))

    @staticmethod
    def _joined(one: Transaction, where: Where, ticket: Ticket) -> None:
        if ticket.error is None:
            one.joining.discard(where)

    def _producing(self, producer_id: int, epoch: int) -> Transaction:
        one = self._by_producer.get(producer_id)
        if one is None:
            raise UnknownProducer(f"producer {producer_id} has no transactional id")
        if epoch != one.epoch:  # perhaps it timed out: Java restarts after this error, but not after a fence
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
            raise ConcurrentTransactions(transactional_id)  # the log must get the owed marker first
        # By log, not by name: a topic may have been recreated.
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
        self,
        transactional_id: str,
        producer_id: int,
        epoch: int,
        entries: "list[CommittedOffset]",
        *,
        joins: bool = False,
    ) -> None:
        """Add offsets that the group commits when the transaction is committed. With `joins` they add the group to the
        transaction."""
        if joins:
            self._check_not_timed_out(transactional_id, Instance(producer_id, epoch))
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
        """Partitions with an offset of the group in a transaction that is open or not durably ended."""
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
                raise ConcurrentTransactions(transactional_id)  # the abort may still fail, which leaves it open
            return  # it timed out and was aborted already
        one = self._check(transactional_id, producer_id, epoch)
        if one.state == (COMMITTED if commit else ABORTED):
            return  # a retry: our answer was lost
        if one.state != ONGOING:
            raise InvalidTransactionState(f"{transactional_id!r} has no open transaction")
        with self._busy(one):
            await self._end(one, commit=commit)

    async def end_with_epoch(self, transactional_id: str, producer_id: int, epoch: int, *, commit: bool) -> Instance:
        """End the transaction; returns the producer's next instance.

        Aborting without an open transaction increases the epoch as well: a client that got no answer to its batches
        does not know whether there is a transaction."""
        check_transactional_id(transactional_id)
        instance = Instance(producer_id, epoch)
        one = self._by_id.get(transactional_id)
        if one is None or producer_id < 0 or producer_id not in (one.producer_id, one.last.producer_id):
            raise UnknownProducer(f"producer {producer_id} is not {transactional_id!r}")
        if instance not in (one.instance, one.last):
            raise ProducerFenced(f"{transactional_id!r} is at epoch {one.epoch}, not {epoch}")
        if one.busy:
            raise ConcurrentTransactions(transactional_id)
        if instance != one.instance:
            return await self._answer_again(one, instance, commit=commit)
        if commit and one.state != ONGOING:
            raise InvalidTransactionState(f"{transactional_id!r} has no open transaction")
        with self._busy(one):
            fresh = await self._producers.new_id() if one.epoch >= EPOCH_MAX else None
            await self._end(one, commit=commit, fenced=instance, next_id=fresh)
        return one.instance

    async def _answer_again(self, one: Transaction, previous: Instance, *, commit: bool) -> Instance:
        """Answer the instance whose transaction has ended already: our answer was lost, or it timed out."""
        if commit:
            self._check_not_timed_out(one.transactional_id, previous)
        if one.state not in (COMMITTED, ABORTED):
            raise ProducerFenced(f"{one.transactional_id!r} is at epoch {one.epoch}, not {previous.epoch}")
        if one.state != (COMMITTED if commit else ABORTED):
            raise InvalidTransactionState(f"the transaction of {one.transactional_id!r} was committed")
        if one.epoch > EPOCH_MAX or not one.is_saved:  # it timed out, and no producer may have that epoch
            with self._busy(one):
                if one.epoch > EPOCH_MAX:
                    await self._bump(one)
                await self._put(one)
        return one.instance

    def _check_not_timed_out(self, transactional_id: str, instance: Instance) -> None:
        """Raises if the transaction timed out and was aborted; a request to abort it returns the next epoch."""
        one = self._by_id.get(transactional_id)
        if one is not None and one.state == ABORTED and instance == one.last and instance != NO_INSTANCE:
            raise TransactionAbortable(f"the transaction of {transactional_id!r} was aborted")

    # Opening, ending, timeouts.

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
        if one.busy:  # even while it ends: that may fail and leave it open
            one.timer = self._timers.call_later(RETRY_S, lambda: self._timed_out(one))
        elif one.state == ONGOING and self._spawn is not None:
            self._spawn(self._abort_late(one))

    async def _abort_late(self, one: Transaction) -> None:
        """Abort a timed-out transaction and increase the epoch, so that a stuck producer cannot continue it."""
        if one.busy:  # another request was faster
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
        """Store the markers of every log, the offsets and the new state in one journal entry.

        With `fenced` the epoch increases, and that instance may still restart. With `next_id` the producer gets a new
        id, because its epochs are used up."""
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
            # Registered before readers are notified: they must find the transaction ended.
            ticket.add_callback(lambda done: self._ended(tickets, producer_id, epoch, commit, offsets, done))
            await ticket
        except HeadraceError:
            restored = Transaction.restored(one.transactional_id, before)
            self._rename(one, restored.producer_id, restored.epoch)
            one.state, one.started_ms = restored.state, restored.started_ms
            one.last, one.owed = restored.last, restored.owed
            one.partitions, one.groups, one.offsets = partitions, groups, kept
            one.joined, one.joining = joined, set(joined.values())  # none of them is known to be durable now
            raise
        finally:
            one.ending = []
        one.is_saved = True
        log_owed(one, owed)
        if one.timer is not None:
            one.timer.cancel()
            one.timer = None

    def _ended(
        self,
        tickets: "list[tuple[Log, Any]]",
        producer_id: int,
        epoch: int,
        commit: bool,
        offsets: "list[CommittedOffset]",
        done: Any,
    ) -> None:
        if done.error is not None:
            return
        self._groups.offsets.apply(offsets)
        for log, ticket in tickets:
            self._producers.ended(log, producer_id, epoch, ticket.base_offset, commit=commit)

    # Markers owed to damaged logs.

    def logs_deleted(self, log_ids: Container[int]) -> None:
        """Forget the markers owed to deleted logs. Not stored: the next start notices that the logs are gone."""
        for one in self._by_id.values():
            if one.owed:
                one.owed = [marker for marker in one.owed if marker.log_id not in log_ids]

    def _write_owed(self, one: Transaction) -> None:
        there = [marker for marker in one.owed if marker.log_id in self._shard.logs]
        damaged = [marker for marker in there if not is_due(self._shard, marker)]
        log_owed(one, damaged)
        if len(damaged) < len(one.owed) and self._spawn is not None:
            self._spawn(self._write_owed_safely(one))

    async def _write_owed_safely(self, one: Transaction) -> None:
        """Write the markers of logs that are intact again, and forget those of deleted logs."""
        try:
            with self._busy(one):
                await self._write_due(one)
        except HeadraceError:
            self._timers.call_later(RETRY_S, lambda: self._write_owed(one))

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
        """Forget transactional ids that were unused for as long as Kafka keeps them, unless a transaction is open."""
        horizon_ms = self._clock.now_ms() - ID_EXPIRATION_MS
        old = [one for one in self._by_id.values() if one.may_expire and one.changed_ms < horizon_ms]
        for at in range(0, len(old), EXPIRED_AT_ONCE):
            now = [one for one in old[at : at + EXPIRED_AT_ONCE] if one.may_expire and one.changed_ms < horizon_ms]
            try:
                await self._forget(now)
            except HeadraceError as error:
                logger.warning("unused transactional ids could not be expired: %s", error)
                return

    async def _forget(self, gone: list[Transaction]) -> None:
        with ExitStack() as busy:  # a producer that returns meanwhile retries, and gets a new id
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
        raise InvalidInput("a transactional id must not be empty")


def joined_key(one: Transaction, log_id: int) -> bytes:
    return log_id.to_bytes(8, "big") + one.transactional_id.encode()
