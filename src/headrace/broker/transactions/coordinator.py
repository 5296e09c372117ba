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
from collections.abc import Callable, Container, Coroutine, Iterator
from typing import Any

from headrace.broker.groups.offsets import CommittedOffset, OffsetStore
from headrace.broker.groups.timers import Timer, Timers
from headrace.broker.transactions.batches import TransactionBatches
from headrace.broker.transactions.ending import RETRY_S, TransactionEnds
from headrace.broker.transactions.producers import Producers
from headrace.broker.transactions.table import TransactionTable
from headrace.broker.transactions.transaction import (
    ABORTED,
    COMMITTED,
    EMPTY,
    EPOCH_MAX,
    NO_INSTANCE,
    ONGOING,
    Instance,
    Transaction,
    Where,
)
from headrace.clock import Clock, ExpiryClock
from headrace.errors import (
    ConcurrentTransactions,
    HeadraceError,
    InvalidInput,
    InvalidTransactionState,
    InvalidTransactionTimeout,
    NotInTransaction,
    ProducerFenced,
    TransactionAbortable,
    UnknownProducer,
)
from headrace.log.shard import Shard

TIMEOUT_MS_MAX = 15 * 60 * 1000

ID_EXPIRATION_MS = 7 * 24 * 3600 * 1000  # transactional.id.expiration.ms
SWEEP_S = 3600.0
EXPIRED_AT_ONCE = 100  # per journal entry

logger = logging.getLogger("headrace.broker")


class Transactions:
    """The coordinator. Owned by the broker; every method runs on the loop's thread."""

    def __init__(
        self,
        shard: Shard,
        clock: Clock,
        timers: Timers,
        producers: Producers,
        offsets: OffsetStore,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        """`spawn` runs a coroutine: timeouts abort transactions with it."""
        self._ages = ExpiryClock(clock)
        self._timers = timers
        self._producers = producers
        self._spawn = spawn
        self._sweep: Timer | None = None
        self._table = TransactionTable(shard, clock)
        self._ends = TransactionEnds(shard, clock, timers, self._table, producers, offsets, spawn)
        self.batches = TransactionBatches(shard, self._table, producers, self._open)

    def load(self) -> None:
        self._table.load()
        for one in self._table.every():
            if one.state == ONGOING:
                self._start_timer(one)
            if one.owed:
                self._ends.write_owed(one)
        self._sweep = self._timers.call_later(SWEEP_S, self._sweep_now)

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for one in self._table.every():
            if one.timer is not None:
                one.timer.cancel()

    def every(self) -> Iterator[Transaction]:
        return self._table.every()

    def get(self, transactional_id: str) -> Transaction:
        return self._table.get(transactional_id)

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
        one = self._table.find(transactional_id)
        if one is None:
            one = Transaction(transactional_id, await self._producers.new_id(), timeout_ms)
            if self._table.find(transactional_id) is not None:
                raise ConcurrentTransactions(transactional_id)
            self._table.add(one)
            with self._table.busy(one):
                await self._table.put(one)
            return one.producer_id, one.epoch
        # It may name its previous instance: its transaction timed out, or our last answer was lost.
        previous = Instance(producer_id, epoch) if producer_id >= 0 else NO_INSTANCE
        if previous != NO_INSTANCE and previous not in (one.instance, one.last):
            raise ProducerFenced(f"{transactional_id!r} is producer {one.producer_id} at epoch {one.epoch}")
        if previous != NO_INSTANCE and previous == one.last and one.state == EMPTY and one.is_saved and not one.busy:
            return one.producer_id, one.epoch  # a retry: our answer was lost, and no other instance has this epoch
        with self._table.busy(one):
            if one.state == ONGOING:
                await self._ends.end(one, commit=False, fenced=previous)
            await self._bump(one)
            one.last = previous
            one.timeout_ms = timeout_ms
            one.state = EMPTY
            await self._table.put(one)
        return one.producer_id, one.epoch

    async def _bump(self, one: Transaction) -> None:
        if one.epoch < EPOCH_MAX:
            one.epoch += 1
            return
        self._table.set_producer(one, await self._producers.new_id(), 0)

    def _check(self, transactional_id: str, producer_id: int, epoch: int) -> Transaction:
        check_transactional_id(transactional_id)
        one = self._table.find(transactional_id)
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
        with self._table.busy(one):
            self._open(one)
            one.partitions.update(partitions)
            await self._table.put(one)

    async def add_group(self, transactional_id: str, producer_id: int, epoch: int, group: str) -> None:
        one = self._check(transactional_id, producer_id, epoch)
        if one.state == ONGOING and one.is_saved and group in one.groups:
            return
        with self._table.busy(one):
            self._open(one)
            one.groups.add(group)
            await self._table.put(one)

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
        with self._table.busy(one):
            self._open(one)
            one.groups.update(entry.group for entry in entries)
            one.offsets.update({(entry.group, entry.topic, entry.partition): entry for entry in entries})
            await self._table.put(one)

    def pending_offsets(self, group: str) -> set[Where]:
        """Partitions with an offset of the group in a transaction that is open or not durably ended."""
        return {
            (entry.topic, entry.partition)
            for one in self._table.every()
            for entry in (one.offsets.values() if one.state == ONGOING else one.ending)
            if entry.group == group
        }

    async def end(self, transactional_id: str, producer_id: int, epoch: int, *, commit: bool) -> None:
        known = self._table.find(transactional_id)
        if known is not None and not commit and known.state == ABORTED and known.last == (producer_id, epoch):
            if known.busy:
                raise ConcurrentTransactions(transactional_id)  # the abort may still fail, which leaves it open
            return  # it timed out and was aborted already
        one = self._check(transactional_id, producer_id, epoch)
        if one.state == (COMMITTED if commit else ABORTED):
            return  # a retry: our answer was lost
        if one.state != ONGOING:
            raise InvalidTransactionState(f"{transactional_id!r} has no open transaction")
        with self._table.busy(one):
            await self._ends.end(one, commit=commit)

    async def end_with_epoch(self, transactional_id: str, producer_id: int, epoch: int, *, commit: bool) -> Instance:
        """End the transaction; returns the producer's next instance.

        Aborting without an open transaction increases the epoch as well: a client that got no answer to its batches
        does not know whether there is a transaction."""
        check_transactional_id(transactional_id)
        instance = Instance(producer_id, epoch)
        one = self._table.find(transactional_id)
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
        with self._table.busy(one):
            fresh = await self._producers.new_id() if one.epoch >= EPOCH_MAX else None
            await self._ends.end(one, commit=commit, fenced=instance, next_id=fresh)
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
            with self._table.busy(one):
                if one.epoch > EPOCH_MAX:
                    await self._bump(one)
                await self._table.put(one)
        return one.instance

    def _check_not_timed_out(self, transactional_id: str, instance: Instance) -> None:
        """Raises if the transaction timed out and was aborted; a request to abort it returns the next epoch."""
        one = self._table.find(transactional_id)
        if one is not None and one.state == ABORTED and instance == one.last and instance != NO_INSTANCE:
            raise TransactionAbortable(f"the transaction of {transactional_id!r} was aborted")

    # Opening, ending, timeouts.

    def _open(self, one: Transaction) -> None:
        if one.state != ONGOING:
            one.clear()
            one.state = ONGOING
            one.started_ms = self._ages.clock.now_ms()
            self._start_timer(one)

    def _start_timer(self, one: Transaction) -> None:
        left_ms = one.started_ms + one.timeout_ms - self._ages.clock.now_ms()
        one.timer = self._timers.call_later(min(max(left_ms, 0), one.timeout_ms) / 1000, lambda: self._timed_out(one))

    def _timed_out(self, one: Transaction) -> None:
        one.timer = None
        if one.busy:  # even while it ends: that may fail and leave it open
            one.timer = self._timers.call_later(RETRY_S, lambda: self._timed_out(one))
        elif one.state == ONGOING:
            self._spawn(self._abort_late(one))

    async def _abort_late(self, one: Transaction) -> None:
        """Abort a timed-out transaction and increase the epoch, so that a stuck producer cannot continue it."""
        if one.busy:  # another request was faster
            self._timed_out(one)
            return
        if one.state != ONGOING:
            return
        with self._table.busy(one):
            try:
                await self._ends.end(one, commit=False, fenced=one.instance)
            except HeadraceError:
                one.timer = self._timers.call_later(RETRY_S, lambda: self._timed_out(one))

    def logs_deleted(self, log_ids: Container[int]) -> None:
        self._ends.logs_deleted(log_ids)

    # Expiry of unused transactional ids.

    def _sweep_now(self) -> None:
        self._sweep = self._timers.call_later(SWEEP_S, self._sweep_now)
        self._spawn(self.expire())

    async def expire(self) -> None:
        """Forget transactional ids that were unused for as long as Kafka keeps them, unless a transaction is open."""

        def is_old(one: Transaction) -> bool:
            return one.may_expire and self._ages.is_past(one.changed_ms, ID_EXPIRATION_MS)

        old = [one for one in self._table.every() if is_old(one)]
        for at in range(0, len(old), EXPIRED_AT_ONCE):
            now = [one for one in old[at : at + EXPIRED_AT_ONCE] if is_old(one)]
            try:
                await self._table.forget(now)
            except HeadraceError as error:
                logger.warning("unused transactional ids could not be expired: %s", error)
                return


def check_transactional_id(transactional_id: str) -> None:
    if not transactional_id:
        raise InvalidInput("a transactional id must not be empty")
