"""What one log knows of the producers that number their batches: who may append what next, which batch
was stored already, which transactions are open and which were aborted.

The facts are in the batches themselves (producer id, epoch and sequence are in every header, markers are
control batches), so an append writes nothing extra: a snapshot plus the batches after it is the state, and
a batch and its sequence number can not be torn apart by a crash. Snapshots outlive retention.

Pure: no clock, no files. producer_registry.py feeds it.
"""

from collections import deque
from collections.abc import Collection, Iterable
from typing import Protocol

import msgspec

from headrace.broker.types.aborted_ranges import Aborted, Aborts
from headrace.broker.types.range_set import RangeSet
from headrace.errors import InvalidProducerEpoch, InvalidTransactionState, OutOfOrderSequence
from headrace.record.types import BatchInfo

BATCHES_KEPT = 5  # a client has at most this many unanswered, so a repeated one is among them
SEQUENCE_MASK = 0x7FFFFFFF
NO_SEQUENCE = -1
PRODUCERS_MAX = 10_000  # per log; the longest idle are forgotten first
IDLE_MS_MAX = 7 * 24 * 3600 * 1000


class Ticket(Protocol):
    """The part of a log's ticket that is used here."""

    done: bool
    base_offset: int


class Batch:
    """One of a producer's last batches. Its offset is known once its ticket resolves."""

    __slots__ = ("base_offset", "first", "last", "opens", "ticket")

    def __init__(self, first: int, last: int, base_offset: int, ticket: Ticket | None = None) -> None:
        self.first, self.last = first, last
        self.base_offset = base_offset
        self.ticket = ticket
        self.opens = False  # the first of a transaction in this log


def before(sequence: int) -> Batch:
    """In place of the batch before this number, of which nothing is known: none behind it is taken before it."""
    return Batch(NO_SEQUENCE, sequence - 1, -1)


BEFORE_THE_FIRST = before(0)  # of an epoch that a marker brought


class Producer:
    __slots__ = ("batches", "epoch", "open_since", "producer_id", "seen_ms", "written")

    def __init__(self, producer_id: int, epoch: int) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self.batches: deque[Batch] = deque(maxlen=BATCHES_KEPT)
        self.open_since: int | None = None  # no offset of the open transaction is below it
        self.written = RangeSet()  # by the open transaction
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
        self._open: dict[int, Producer] = {}  # those with an open transaction: few of thousands

    # Appending.

    def check(self, info: BatchInfo, *, from_zero: bool = False) -> Batch | None:
        """The batch that this one repeats, None if it is new. Raises if it may not be appended. Where the first batch
        of a producer is known to have the number 0 (`from_zero`), one with another number is not it."""
        producer = self.producers.get(info.producer_id)
        if producer is None:
            if from_zero and info.base_sequence != 0:
                raise OutOfOrderSequence(f"producer {info.producer_id} starts at sequence {info.base_sequence}")
            return None
        repeated = self._repeated(producer, info)
        if repeated is None and producer.open_since is not None and not info.is_transactional:
            # It would be read or not with the transaction, which it is no part of.
            raise InvalidTransactionState(f"producer {info.producer_id} has a transaction open")
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
                raise OutOfOrderSequence(f"a new epoch starts at sequence {info.base_sequence}")
            return None
        if not producer.batches or info.base_sequence == (producer.last_sequence + 1) & SEQUENCE_MASK:
            return None
        last = info.last_sequence
        for batch in producer.batches:
            if batch.first == info.base_sequence and batch.last == last:
                return batch
        raise OutOfOrderSequence(
            f"producer {info.producer_id}: sequence {info.base_sequence} after {producer.last_sequence}"
        )

    def staged(self, info: BatchInfo, ticket: Ticket, visible_end: int, now_ms: int) -> Batch:
        """A checked batch is on its way; what follows is judged as if it were there already."""
        producer = self._producer(info)
        producer.seen_ms = now_ms
        batch = Batch(info.base_sequence, info.last_sequence, -1, ticket)
        if info.base_sequence >= 0:
            producer.batches.append(batch)
        if info.is_transactional and producer.open_since is None:
            producer.open_since = visible_end  # its real offset is not known yet, and not lower
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
        """Nothing of it was kept: it may come again; what was staged after it does not follow any more."""
        producer = self.producers.get(info.producer_id)
        if producer is None or batch not in producer.batches:
            return
        if producer.batches[0] is batch:  # the one that it followed made room for it, or there was none
            producer.batches[0] = before(batch.first)
        else:
            producer.batches.remove(batch)

    def put_off(self, info: BatchInfo, now_ms: int) -> None:
        """It was not even staged, and is to come again. Where batches of its producer are known what is behind it does
        not follow anyway, nor does it begin a new epoch; otherwise this is the first that is known."""
        producer = self.producers.get(info.producer_id)
        if producer is None:
            is_first = len(self.producers) < PRODUCERS_MAX
        else:  # perhaps by a marker alone
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
        """A marker has closed the producer's transaction in this log. Returns what of it holds no message."""
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
    def stable_hold(self) -> int | None:
        """Where readers of committed records must stop, None if no transaction is open."""
        return min((one.open_since for one in self._open.values() if one.open_since is not None), default=None)

    def aborted_between(self, start: int, end: int) -> list[tuple[int, int]]:
        """(producer id, first offset) of aborted transactions with records in [start, end)."""
        return [(one.producer_id, one.first_offset) for one in self.aborted.between(start, end)]

    def forget_aborted(self, markers: Collection[int]) -> None:
        """Nothing of these transactions is left in the log: nobody need be told of them."""
        self.aborted = self.aborted.without(markers)

    # Recovery.

    def replay(self, info: BatchInfo, now_ms: int) -> None:
        """A batch found in the log after the snapshot; markers go to ended()."""
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
        """What is too old to matter is left out, here and in memory."""
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
