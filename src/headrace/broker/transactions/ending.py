"""Ending transactions: markers in all their logs, committed offsets and the new state, in one journal entry.

Damaged logs accept no marker; theirs are stored as owed and written after a start that finds the log intact.
"""

from collections.abc import Callable, Container, Coroutine
from functools import partial
from typing import Any

from headrace.broker.groups.offsets import CommittedOffset, OffsetStore
from headrace.broker.groups.timers import Timers
from headrace.broker.transactions.markers import control_batch, is_due, log_owed
from headrace.broker.transactions.producers import Producers
from headrace.broker.transactions.table import JOINED, TransactionTable
from headrace.broker.transactions.transaction import (
    ABORTED,
    COMMITTED,
    EPOCH_MAX,
    Instance,
    OwedMarker,
    Transaction,
    joined_key,
)
from headrace.clock import Clock
from headrace.errors import HeadraceError
from headrace.log.commit.round import Ticket
from headrace.log.log import Log
from headrace.log.shard import Shard

RETRY_S = 1.0


class TransactionEnds:
    def __init__(
        self,
        shard: Shard,
        clock: Clock,
        timers: Timers,
        table: TransactionTable,
        producers: Producers,
        offsets: OffsetStore,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._shard = shard
        self._clock = clock
        self._timers = timers
        self._table = table
        self._producers = producers
        self._offsets = offsets
        self._spawn = spawn

    async def end(
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
            self._table.set_producer(one, next_id, 0)
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
            self._offsets.stage(entry, offsets)
            for log_id in joined:
                entry.delete(JOINED, joined_key(one, log_id))
            self._table.stage(one, entry)
            ticket = entry.commit()
            # Registered before readers are notified: they must find the transaction ended.
            ticket.add_callback(lambda done: self._ended(tickets, producer_id, epoch, commit, offsets, done))
            await ticket
        except HeadraceError:
            restored = Transaction.restored(one.transactional_id, before)
            self._table.set_producer(one, restored.producer_id, restored.epoch)
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
        tickets: list[tuple[Log, Ticket]],
        producer_id: int,
        epoch: int,
        commit: bool,
        offsets: list[CommittedOffset],
        done: Ticket,
    ) -> None:
        if done.error is not None:
            return
        self._offsets.apply(offsets)
        for log, ticket in tickets:
            self._producers.ended(log, producer_id, epoch, ticket.base_offset, commit=commit)

    # Markers owed to damaged logs.

    def logs_deleted(self, log_ids: Container[int]) -> None:
        """Forget the markers owed to deleted logs. Not stored: the next start notices that the logs are gone."""
        for one in self._table.every():
            if one.owed:
                one.owed = [marker for marker in one.owed if marker.log_id not in log_ids]

    def write_owed(self, one: Transaction) -> None:
        there = [marker for marker in one.owed if marker.log_id in self._shard.logs]
        damaged = [marker for marker in there if not is_due(self._shard, marker)]
        log_owed(one, damaged)
        if len(damaged) < len(one.owed):
            self._spawn(self._write_owed_safely(one))

    async def _write_owed_safely(self, one: Transaction) -> None:
        """Write the markers of logs that are intact again, and forget those of deleted logs."""
        try:
            with self._table.busy(one):
                await self._write_due(one)
        except HeadraceError:
            self._timers.call_later(RETRY_S, lambda: self.write_owed(one))

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
            self._table.stage(one, entry)
            ticket = entry.commit()
            for (log, part), marker in zip(tickets, due, strict=True):
                ended = partial(self._ended, [(log, part)], marker.producer_id, marker.epoch, marker.commit, [])
                ticket.add_callback(ended)
            await ticket
        except HeadraceError:
            one.owed = owed
            raise
