"""The idempotent producers of one log: expected sequence numbers, recent batches, open and aborted transactions.

The facts are in the batches themselves (producer id, epoch and sequence number are in every header, markers are control
batches), so an append writes nothing extra: the state is a snapshot plus the batches after it, and a crash cannot
separate a batch from its sequence number. Snapshots outlive the batches that retention deletes.

Pure: no clock, no files. producers.py feeds it.
"""

from collections import deque
from collections.abc import Collection, Iterable
from typing import Protocol

import msgspec

from headrace.broker.types.aborted_ranges import Aborted, Aborts
from headrace.broker.types.range_set import RangeSet
from headrace.errors import InvalidProducerEpoch, InvalidTransactionState, OutOfOrderSequence
from headrace.record.types import BatchInfo

BATCHES_KEPT = 5  # a client has at most this many in flight, so a repeated batch is among them
SEQUENCE_MASK = 0x7FFFFFFF
NO_SEQUENCE = -1
PRODUCERS_MAX = 10_000  # per log; the longest idle are evicted first
IDLE_MS_MAX = 7 * 24 * 3600 * 1000


class AppendTicket(Protocol):
    """The part of log.commit.round.Ticket that is used here."""

    done: bool
    base_offset: int


class Batch:
    """One of a producer's last batches. Its offset is known once its ticket resolves."""

    __slots__ = ("base_offset", "first", "last", "opens", "ticket")

    def __init__(self, first: int, last: int, base_offset: int, ticket: AppendTicket | None = None) -> None:
        self.first, self.last = first, last
        self.base_offset = base_offset
        self.ticket = ticket
        self.opens = False  # the first batch of a transaction in this log


def before(sequence: int) -> Batch:
    """A placeholder for the unknown batch before `sequence`: only the batch with that number is accepted next."""
    return Batch(NO_SEQUENCE, sequence - 1, -1)


BEFORE_THE_FIRST = before(0)  # of a new epoch that a marker announced


class Producer:
    __slots__ = ("batches", "epoch", "open_since", "producer_id", "seen_ms", "written")

    def __init__(self, producer_id: int, epoch: int) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self.batches: deque[Batch] = deque(maxlen=BATCHES_KEPT)
        self.open_since: int | None = None  # a lower bound of the open transaction's offsets
        self.written = RangeSet()  # offsets of the open transaction
        self.seen_ms = 0

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last if self.batches else NO_SEQUENCE


class SavedProducer(msgspec.Struct, frozen=True, array_like=True):
    producer_id: int
    epoch: int
    open_since: int | None
    seen_ms: int
    batches: list[tuple[int, int, int]]
    written: list[tuple[int, int]] = []


class Snapshot(msgspec.Struct, frozen=True, array_like=True):
    """The state of everything below `upto`."""

    upto: int
    producers: list[SavedProducer]
    aborted: list[tuple[int, int, int]]


class PartitionProducers:
    """The producers of one log."""

    def __init__(self) -> None:
        self.producers: dict[int, Producer] = {}
        self.aborted = Aborts()
        self._open: dict[int, Producer] = {}  # producers with an open transaction: few of thousands

    # Appending.

    def check(self, info: BatchInfo, *, from_zero: bool = False) -> Batch | None:
        """The batch that this one repeats, None if it is new. Raises if it may not be appended.

        With `from_zero` the first batch of an unknown producer must have sequence number 0."""
        producer = self.producers.get(info.producer_id)
        if producer is None:
            if from_zero and info.base_sequence != 0:
                raise OutOfOrderSequence(
                    f"producer {info.producer_id} must start at sequence 0, not {info.base_sequence}"
                )
            return None
        repeated = self._repeated(producer, info)
        if repeated is None and producer.open_since is not None and not info.is_transactional:
            # Readers would treat the batch as part of the transaction.
            raise InvalidTransactionState(
                f"producer {info.producer_id} has an open transaction: its batches must be transactional"
            )
        return repeated

    @staticmethod
    def _repeated(producer: Producer, info: BatchInfo) -> Batch | None:
        if info.producer_epoch < producer.epoch:
            raise InvalidProducerEpoch(
                f"producer {info.producer_id} is at epoch {producer.epoch}, not {info.producer_epoch}"
            )
        if info.base_sequence < 0:
            return None
        if info.producer_epoch > producer.epoch:
            if info.base_sequence != 0:
                raise OutOfOrderSequence(f"a new epoch must start at sequence 0, not {info.base_sequence}")
            return None
        if not producer.batches or info.base_sequence == (producer.last_sequence + 1) & SEQUENCE_MASK:
            return None
        last = info.last_sequence
        for batch in producer.batches:
            if batch.first == info.base_sequence and batch.last == last:
                return batch
        raise OutOfOrderSequence(
            f"producer {info.producer_id} sent sequence {info.base_sequence} after {producer.last_sequence}"
        )

    def staged(self, info: BatchInfo, ticket: AppendTicket, visible_end: int, now_ms: int) -> Batch:
        """A checked batch was staged; later batches are checked as if it were stored already."""
        producer = self._producer(info)
        producer.seen_ms = now_ms
        batch = Batch(info.base_sequence, info.last_sequence, -1, ticket)
        if info.base_sequence >= 0:
            producer.batches.append(batch)
        if info.is_transactional and producer.open_since is None:
            producer.open_since = visible_end  # a lower bound: the real offset is not known yet
            self._open[producer.producer_id] = producer
            batch.opens = True
        return batch

    def stored(self, info: BatchInfo, batch: Batch, base_offset: int) -> None:
        batch.base_offset = base_offset
        batch.ticket = None
        producer = self.producers.get(info.producer_id)
        if info.is_transactional and producer is not None and producer.open_since is not None:
            if batch.opens:
                producer.open_since = base_offset
            producer.written.add(base_offset, base_offset + info.next_offset - info.base_offset)

    def refused(self, info: BatchInfo, batch: Batch) -> None:
        """Storing the batch failed: it may be retried, and batches staged after it are out of order now."""
        producer = self.producers.get(info.producer_id)
        if producer is None or batch not in producer.batches:
            return
        if producer.batches[0] is batch:  # it evicted its predecessor, or had none
            producer.batches[0] = before(batch.first)
        else:
            producer.batches.remove(batch)

    def put_off(self, info: BatchInfo, now_ms: int) -> None:
        """The batch was refused before it was staged and will be retried: later batches must not overtake it.

        If other batches of the producer are known, later ones are out of order anyway. Otherwise a placeholder makes
        this batch the next one that is accepted."""
        producer = self.producers.get(info.producer_id)
        if producer is None:
            is_first = len(self.producers) < PRODUCERS_MAX
        else:  # it may be known from a marker only
            is_first = not producer.batches and info.producer_epoch == producer.epoch
        if info.base_sequence >= 0 and is_first:
            producer = self._producer(info)
            producer.seen_ms = now_ms
            producer.batches.append(before(info.base_sequence))

    def _producer(self, info: BatchInfo) -> Producer:
        producer = self.producers.get(info.producer_id)
        if producer is None:
            producer = self.producers[info.producer_id] = Producer(info.producer_id, info.producer_epoch)
        elif info.producer_epoch > producer.epoch:
            producer.epoch = info.producer_epoch
            producer.batches.clear()
        return producer

    def ended(self, producer_id: int, epoch: int, marker_offset: int, *, commit: bool) -> RangeSet:
        """A marker has ended the producer's transaction in this log; returns the offsets that hold no message."""
        producer = self.producers.get(producer_id)
        if producer is None:
            producer = self.producers[producer_id] = Producer(producer_id, epoch)
        if epoch > producer.epoch:
            producer.epoch = epoch
            producer.batches.clear()
            producer.batches.append(BEFORE_THE_FIRST)
        if producer.open_since is not None and not commit:
            self.aborted.add(Aborted(marker_offset, producer_id, producer.open_since))
        producer.open_since = None
        self._open.pop(producer_id, None)
        written, producer.written = producer.written, RangeSet()
        void = RangeSet() if commit else written
        void.add(marker_offset, marker_offset + 1)
        return void

    # Reading.

    @property
    def stable_limit(self) -> int | None:
        """Where readers of committed records must stop, None if no transaction is open."""
        return min((one.open_since for one in self._open.values() if one.open_since is not None), default=None)

    def aborted_between(self, start: int, end: int) -> list[tuple[int, int]]:
        """(producer id, first offset) of aborted transactions with records in [start, end)."""
        return [(one.producer_id, one.first_offset) for one in self.aborted.between(start, end)]

    def forget_aborted(self, markers: Collection[int]) -> None:
        """Forget aborted transactions whose records compaction has removed from the log."""
        self.aborted = self.aborted.without(markers)

    # Recovery.

    def replay(self, info: BatchInfo, now_ms: int) -> None:
        """Apply a batch found in the log after the snapshot; markers go to `ended`."""
        producer = self._producer(info)
        producer.seen_ms = now_ms
        if info.base_sequence >= 0:
            producer.batches.append(Batch(info.base_sequence, info.last_sequence, info.base_offset))
        if info.is_transactional:
            if producer.open_since is None:
                producer.open_since = info.base_offset
                self._open[producer.producer_id] = producer
            producer.written.add(info.base_offset, info.next_offset)

    def snapshot(self, upto: int, start_offset: int, now_ms: int) -> Snapshot:
        """Evicts producers and aborted transactions that are too old, from memory as well."""
        self._forget(start_offset, now_ms)
        return Snapshot(
            upto,
            [
                SavedProducer(
                    one.producer_id,
                    one.epoch,
                    one.open_since,
                    one.seen_ms,
                    [(b.first, b.last, b.base_offset) for b in one.batches if b.ticket is None],
                    list(one.written),
                )
                for one in self.producers.values()
            ],
            [(one.last_offset, one.producer_id, one.first_offset) for one in self.aborted],
        )

    def restore(self, snapshot: Snapshot) -> None:
        for saved in snapshot.producers:
            producer = Producer(saved.producer_id, saved.epoch)
            producer.open_since, producer.seen_ms = saved.open_since, saved.seen_ms
            producer.batches.extend(Batch(*batch) for batch in saved.batches)
            producer.written = RangeSet(saved.written)
            self.producers[saved.producer_id] = producer
            if producer.open_since is not None:
                self._open[producer.producer_id] = producer
        self.aborted = Aborts(Aborted(*one) for one in snapshot.aborted)

    def _forget(self, start_offset: int, now_ms: int) -> None:
        self.aborted.forget_before(start_offset)
        idle = [one for one in self.producers.values() if one.open_since is None]
        surplus = len(self.producers) - PRODUCERS_MAX
        for one in oldest(idle):
            if surplus <= 0 and now_ms - one.seen_ms <= IDLE_MS_MAX:
                break
            del self.producers[one.producer_id]
            surplus -= 1


def oldest(producers: Iterable[Producer]) -> list[Producer]:
    return sorted(producers, key=lambda one: one.seen_ms)
