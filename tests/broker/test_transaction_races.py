"""Transactions with races while they wait for the disk: full disks, recreated topics, timeouts."""

import asyncio
import errno
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.broker import Broker
from headrace.broker.groups.offsets import CommittedOffset
from headrace.broker.streams.partition import Partition
from headrace.broker.transactions.producer_state import BATCHES_KEPT
from headrace.broker.transactions.transaction import ABORTED, ONGOING
from headrace.config import Config
from headrace.errors import (
    ConcurrentTransactions,
    DiskFull,
    InvalidTransactionState,
    OutOfOrderSequence,
    Overloaded,
    ProducerFenced,
)
from headrace.log.disk.disk import RealDisk
from headrace.record import codec


class Full(RealDisk):
    """No room for the journal while `full`, which is not known before `says_so`."""

    full = False

    def __init__(self) -> None:
        super().__init__()
        self.says_so = threading.Event()
        self.says_so.set()

    def pwrite(self, file: Any, buffers: Any, position: int) -> int:
        if self.full and any(any(one) for one in buffers):  # what was refused can still be wiped out
            assert self.says_so.wait(60)
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().pwrite(file, buffers, position)


@asynccontextmanager
async def opened(folder: Path, disk: RealDisk | None = None) -> AsyncIterator[Broker]:
    config = Config(data_dir=str(folder), http=None, amqp=None, kafka=None)
    broker = await Broker.open(config, disk=disk)
    try:
        yield broker
    finally:
        await broker.close()


def log_of(broker: Broker) -> Any:
    return broker.streams.get("t").partitions[0].log


async def write(broker: Broker, pid: int, epoch: int, sequence: int = 0) -> None:
    """A record of the transaction, as the listener has it: checked, then appended."""
    broker.coordination.transactions.batches.check_append(pid, epoch, ("t", 0))
    data = codec.build(
        [(None, b"x", (), 1)],
        timestamp_ms=1,
        producer_id=pid,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=True,
    )
    await broker.coordination.producers.append(Partition(0, log_of(broker)), data, codec.validate(data))


async def begin(broker: Broker) -> tuple[int, int]:
    """A transaction with a record in a new topic; its producer's id and epoch."""
    await broker.streams.create("t")
    transactions = broker.coordination.transactions
    pid, epoch = await transactions.begin_producer("x", 60_000)
    await transactions.add_partitions("x", pid, epoch, {("t", 0): log_of(broker).id})
    await write(broker, pid, epoch)
    return pid, epoch


async def test_a_partition_that_could_not_be_stored_is_added_again_at_the_next_attempt(
    tmp_path: Path,
) -> None:
    """After a kill, the open transaction was unknown, and its records blocked readers forever."""
    disk = Full()
    async with opened(tmp_path, disk) as broker:
        await broker.streams.create("t")
        transactions = broker.coordination.transactions
        pid, epoch = await transactions.begin_producer("x", 60_000)
        where = {("t", 0): log_of(broker).id}
        disk.full = True
        with pytest.raises(DiskFull):
            await transactions.add_partitions("x", pid, epoch, where)
        with pytest.raises(DiskFull):
            await transactions.add_partitions("x", pid, epoch, where)
        disk.full = False
        broker.shard.tick_writes()  # sees that there is room again
        await transactions.add_partitions("x", pid, epoch, where)
        await write(broker, pid, epoch)
    async with opened(tmp_path) as broker:
        assert broker.coordination.transactions.get("x").state == ONGOING
        await broker.coordination.transactions.end("x", pid, epoch, commit=True)
        assert log_of(broker).stable_end == 2


async def test_a_group_that_could_not_be_stored_is_not_in_the_transaction_at_the_next_attempt(
    tmp_path: Path,
) -> None:
    disk = Full()
    async with opened(tmp_path, disk) as broker:
        transactions = broker.coordination.transactions
        pid, epoch = await transactions.begin_producer("x", 60_000)
        disk.full = True
        for _ in range(2):
            with pytest.raises(DiskFull):
                await transactions.add_group("x", pid, epoch, "g")
        disk.full = False
        await transactions.add_group("x", pid, epoch, "g")


async def test_a_recreated_topic_gets_the_marker_of_its_own_records(tmp_path: Path) -> None:
    """The transaction had the log of the topic that was: nothing ended what was written to the new one."""
    async with opened(tmp_path) as broker:
        transactions = broker.coordination.transactions
        pid, epoch = await begin(broker)
        await broker.streams.delete("t")
        await broker.streams.create("t")
        with pytest.raises(InvalidTransactionState):
            await write(broker, pid, epoch)
        await transactions.add_partitions("x", pid, epoch, {("t", 0): log_of(broker).id})
        await write(broker, pid, epoch)
        await transactions.end("x", pid, epoch, commit=True)
        assert log_of(broker).stable_end == log_of(broker).visible_end == 2


async def test_a_transaction_that_times_out_while_its_end_cannot_be_stored_is_aborted(
    tmp_path: Path,
) -> None:
    disk = Full()
    async with opened(tmp_path, disk) as broker:
        transactions = broker.coordination.transactions
        pid, epoch = await begin(broker)
        one = transactions.get("x")
        disk.full = True
        ending = asyncio.ensure_future(transactions.end("x", pid, epoch, commit=True))
        await asyncio.sleep(0)
        assert one.busy
        assert one.timer is not None
        one.timer.cancel()
        transactions._timed_out(one)  # its timer fires now
        with pytest.raises(DiskFull):
            await ending
        disk.full = False
        assert one.state == ONGOING
        assert one.timer is not None, "the transaction would never be aborted"


async def test_an_abort_during_the_timeout_is_answered_when_it_is_durable(tmp_path: Path) -> None:
    """Told before, and without room for it, it would go on in a transaction that it thinks is over."""
    disk = Full()
    async with opened(tmp_path, disk) as broker:
        transactions = broker.coordination.transactions
        pid, epoch = await begin(broker)
        disk.full = True
        late = asyncio.ensure_future(transactions._abort_late(transactions.get("x")))
        await asyncio.sleep(0)
        with pytest.raises(ConcurrentTransactions):
            await transactions.end("x", pid, epoch, commit=False)
        await late
        disk.full = False
        assert transactions.get("x").state == ONGOING


async def test_a_concurrent_change_does_not_cancel_the_timeout_of_a_transaction(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        transactions = broker.coordination.transactions
        pid, epoch = await transactions.begin_producer("x", 60_000)
        await transactions.add_group("x", pid, epoch, "g")
        one = transactions.get("x")
        assert one.timer is not None
        one.timer.cancel()
        changing = asyncio.ensure_future(transactions.add_group("x", pid, epoch, "h"))
        transactions._timed_out(one)  # its timer fires; the change is a step ahead of the abort
        await changing
        assert one.state == ONGOING
        assert one.timer is not None, "the transaction would never be aborted"


async def test_the_last_epoch_of_a_producer_is_fenced_as_well_when_its_time_is_up(tmp_path: Path) -> None:
    """It came back into the middle: what it wrote before was aborted, what it wrote after was committed."""
    async with opened(tmp_path) as broker:
        await broker.streams.create("t")
        transactions = broker.coordination.transactions
        pid, _ = await transactions.begin_producer("x", 60_000)
        one = transactions.get("x")
        one.epoch = epoch = 32766
        where = {("t", 0): log_of(broker).id}
        await transactions.add_partitions("x", pid, epoch, where)
        await write(broker, pid, epoch)
        await transactions._abort_late(one)
        assert one.state == ABORTED
        with pytest.raises(ProducerFenced):
            await transactions.add_partitions("x", pid, epoch, where)
        fresh, first = await transactions.begin_producer("x", 60_000, pid, epoch)
        assert fresh != pid
        assert first == 0


@pytest.mark.parametrize("commit", [True, False])
async def test_offsets_of_a_transaction_are_pending_until_its_end_is_durable(tmp_path: Path, commit: bool) -> None:
    """A consumer that asked for stable offsets got the old ones meanwhile, and read again what was done."""
    async with opened(tmp_path) as broker:
        transactions, groups = broker.coordination.transactions, broker.coordination.groups
        pid, epoch = await transactions.begin_producer("x", 60_000)
        await transactions.add_group("x", pid, epoch, "g")
        await transactions.commit_offsets("x", pid, epoch, [CommittedOffset("g", "t", 0, 1, 7, 0, "", 1)])
        ending = asyncio.ensure_future(transactions.end("x", pid, epoch, commit=commit))
        await asyncio.sleep(0)
        assert not ending.done()
        assert groups.offsets.get("g", "t", 0) is None
        assert transactions.pending_offsets("g") == {("t", 0)}
        await ending
        assert (groups.offsets.get("g", "t", 0) is not None) == commit
        assert transactions.pending_offsets("g") == set()


async def test_batches_after_one_that_could_not_be_stored_are_refused_with_it(tmp_path: Path) -> None:
    """The second was stored without the first, which then came too late for its number."""
    disk = Full()
    async with opened(tmp_path, disk) as broker:
        await broker.streams.create("t")

        def send(sequence: int) -> Any:
            data = codec.build(
                [(None, b"x", (), 1)], timestamp_ms=1, producer_id=5, producer_epoch=0, base_sequence=sequence
            )
            return broker.coordination.producers.append(Partition(0, log_of(broker)), data, codec.validate(data))

        await send(0)
        disk.full = True
        disk.says_so.clear()
        first = send(1)
        first.add_callback(lambda _: setattr(disk, "full", False))  # there is room for the next round
        while broker.shard.staging.in_flight is None:
            await asyncio.sleep(0)
        second = send(2)
        disk.says_so.set()
        for ticket in (first, second):
            with pytest.raises(DiskFull):
                await ticket
        broker.shard.tick_writes()
        assert [(await send(sequence)).base_offset for sequence in (1, 2)] == [1, 2]


async def test_after_a_refusal_before_validation_a_producer_must_start_with_its_first_batch(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as broker:
        await broker.streams.create("t")

        def send(sequence: int) -> Any:
            data = codec.build(
                [(None, b"x", (), 1)], timestamp_ms=1, producer_id=5, producer_epoch=0, base_sequence=sequence
            )
            return broker.coordination.producers.append(Partition(0, log_of(broker)), data, codec.validate(data))

        broker.shard.is_full = True
        with pytest.raises(DiskFull):
            send(0)
        broker.shard.tick_writes()  # there is room again, and the next one was on its way already
        with pytest.raises(OutOfOrderSequence):
            send(1)
        assert [(await send(sequence)).base_offset for sequence in (0, 1)] == [0, 1]


@pytest.mark.parametrize("before", [0, 1], ids=["the first", "others"])
async def test_after_many_refused_batches_a_producer_must_continue_with_the_first_of_them(
    tmp_path: Path, before: int
) -> None:
    """All that was known of the producer had made room for them: the second was stored, and the first never again."""
    disk = Full()
    async with opened(tmp_path, disk) as broker:
        await broker.streams.create("t")

        def send(sequence: int) -> Any:
            data = codec.build(
                [(None, b"x", (), 1)], timestamp_ms=1, producer_id=5, producer_epoch=0, base_sequence=sequence
            )
            return broker.coordination.producers.append(Partition(0, log_of(broker)), data, codec.validate(data))

        for sequence in range(before):
            await send(sequence)
        disk.full = True
        sent = range(before, before + BATCHES_KEPT)
        for ticket in [send(sequence) for sequence in sent]:
            with pytest.raises(DiskFull):
                await ticket
        with pytest.raises(DiskFull):
            send(before)  # it asks again, with the next one behind it
        disk.full = False
        broker.shard.tick_writes()  # sees that there is room again, between them
        with pytest.raises(OutOfOrderSequence):
            send(before + 1)
        assert [(await send(sequence)).base_offset for sequence in sent] == [*sent]


def numbered(pid: int, epoch: int, sequence: int, *, transactional: bool = False) -> bytearray:
    return codec.build(
        [(None, b"x", (), 1)],
        timestamp_ms=1,
        producer_id=pid,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=transactional,
    )


async def test_a_throttled_first_batch_of_a_transaction_stays_first(tmp_path: Path) -> None:
    """The broker was writing an earlier one's marker to another log. The second batch was stored then, and opened the
    transaction: the first, which came again, was out of order."""
    async with opened(tmp_path) as broker:
        await broker.streams.create("t")
        transactions = broker.coordination.transactions
        pid, epoch = await transactions.begin_producer("x", 60_000)

        def send(sequence: int) -> Any:
            data = numbered(pid, epoch, sequence, transactional=True)
            return transactions.batches.append(Partition(0, log_of(broker)), data, codec.validate(data), ("t", 0))

        with transactions._table.busy(transactions.get("x")), pytest.raises(ConcurrentTransactions):
            send(0)
        with pytest.raises(OutOfOrderSequence):
            send(1)
        assert [(await send(sequence)).base_offset for sequence in (0, 1)] == [0, 1]


async def test_a_throttled_later_batch_of_a_transaction_does_not_become_its_first(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        await broker.streams.create("t")
        transactions = broker.coordination.transactions
        pid, epoch = await transactions.begin_producer("x", 60_000)
        data = numbered(pid, epoch, 1, transactional=True)
        log, infos = log_of(broker), codec.validate(data)
        with transactions._table.busy(transactions.get("x")), pytest.raises(ConcurrentTransactions):
            transactions.batches.append(Partition(0, log), data, infos, ("t", 0))
        with pytest.raises(OutOfOrderSequence):
            transactions.batches.append(Partition(0, log), data, infos, ("t", 0))


async def test_a_producer_starts_with_its_first_batch_although_the_log_was_being_truncated(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        await broker.streams.create("t")
        log, producers = log_of(broker), broker.coordination.producers

        def send(sequence: int) -> Any:
            data = numbered(5, 0, sequence)
            return producers.append(Partition(0, log), data, codec.validate(data))

        log.is_frozen = True
        with pytest.raises(Overloaded):
            send(0)
        log.is_frozen = False
        with pytest.raises(OutOfOrderSequence):
            send(1)
        assert [(await send(sequence)).base_offset for sequence in (0, 1)] == [0, 1]


async def test_a_producer_known_only_by_a_marker_starts_with_its_first_batch(
    tmp_path: Path,
) -> None:
    """It had brought a partition into a transaction, and written nothing there."""
    disk = Full()
    async with opened(tmp_path, disk) as broker:
        await broker.streams.create("t")
        transactions, log = broker.coordination.transactions, log_of(broker)
        other = numbered(99, 0, 0)
        await broker.coordination.producers.append(Partition(0, log), other, codec.validate(other))
        pid, epoch = await transactions.begin_producer("x", 60_000)
        await transactions.add_partitions("x", pid, epoch, {("t", 0): log.id})
        await transactions.end("x", pid, epoch, commit=False)
        await transactions.add_partitions("x", pid, epoch, {("t", 0): log.id})

        def send(sequence: int) -> Any:
            data = numbered(pid, epoch, sequence, transactional=True)
            return broker.coordination.producers.append(Partition(0, log), data, codec.validate(data))

        broker.shard.is_full = True
        with pytest.raises(DiskFull):
            send(0)
        broker.shard.is_full = False
        with pytest.raises(OutOfOrderSequence):
            send(1)
        assert [(await send(sequence)).base_offset for sequence in (0, 1)] == [2, 3]
