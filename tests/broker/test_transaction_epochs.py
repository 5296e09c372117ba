"""Transactions of version 2 (KIP-890): batches and offsets add their partition or group; each has its own epoch."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.broker import Broker
from headrace.broker.groups.offsets import CommittedOffset
from headrace.broker.streams.partition import Partition
from headrace.broker.transactions.producer_state import PartitionProducers
from headrace.broker.transactions.table import JOINED
from headrace.broker.transactions.transaction import ABORTED, COMMITTED, EMPTY, EPOCH_MAX, ONGOING, Instance
from headrace.config import Config
from headrace.errors import (
    ConcurrentTransactions,
    DiskFull,
    InvalidProducerEpoch,
    InvalidTransactionState,
    OutOfOrderSequence,
    ProducerFenced,
    TransactionAbortable,
    UnknownProducer,
)
from headrace.log.commit.round import Ticket
from headrace.log.disk.disk import RealDisk
from headrace.log.log import Log
from headrace.log.settings import LogSettings
from headrace.record import codec
from tests.broker.test_producers import info
from tests.broker.test_transaction_races import Full


@asynccontextmanager
async def opened(folder: Path, disk: RealDisk | None = None) -> AsyncIterator[Broker]:
    log = LogSettings(journal_file_bytes=1 << 20)  # quick to make
    config = Config(data_dir=str(folder), http=None, amqp=None, kafka=None, log=log)
    broker = await Broker.open(config, disk=disk)
    try:
        yield broker
    finally:
        await broker.close()


def log_of(broker: Broker) -> Log:
    return broker.streams.get("t").partitions[0].log


def write(broker: Broker, producer: Instance, sequence: int = 0) -> Ticket:
    """As the listener does it for Produce 12."""
    data = codec.build(
        [(None, b"x", (), 1)],
        timestamp_ms=1,
        producer_id=producer.producer_id,
        producer_epoch=producer.epoch,
        base_sequence=sequence,
        transactional=True,
    )
    return broker.coordination.transactions.batches.append(
        Partition(0, log_of(broker)), data, codec.validate(data), ("t", 0)
    )


async def begin(broker: Broker, epoch: int = 0) -> Instance:
    """A transaction that a batch has opened, in a new topic."""
    await broker.streams.create("t")
    transactions = broker.coordination.transactions
    producer = Instance(*await transactions.begin_producer("x", 60_000))
    transactions.get("x").epoch = epoch
    producer = transactions.get("x").instance
    await write(broker, producer)
    return producer


async def end(broker: Broker, who: Instance, *, commit: bool = True) -> Instance:
    return await broker.coordination.transactions.end_with_epoch("x", *who, commit=commit)


def offset(number: int) -> CommittedOffset:
    return CommittedOffset("g", "t", 0, 0, number, -1, "", 1)


def next_of(one: Instance) -> Instance:
    return Instance(one.producer_id, one.epoch + 1)


# What brings itself in.


async def test_a_batch_adds_its_partition_to_the_transaction_and_both_survive_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        producer = await begin(broker)
        await write(broker, producer, 1)
    async with opened(tmp_path) as broker:
        one = broker.coordination.transactions.get("x")
        assert (one.state, set(one.partitions), one.timer is not None) == (ONGOING, {("t", 0)}, True)
        assert (log_of(broker).stable_end, log_of(broker).visible_end) == (0, 2)
        assert (await write(broker, producer, 1)).base_offset == 1, "once more: its answer was lost"
        await end(broker, producer)
        assert log_of(broker).stable_end == log_of(broker).visible_end == 3


async def test_a_batch_retried_after_a_full_disk_adds_its_partition(tmp_path: Path) -> None:
    """Stored without it, nothing would end what it belongs to after a kill."""
    disk = Full()
    async with opened(tmp_path, disk) as broker:
        await broker.streams.create("t")
        producer = Instance(*await broker.coordination.transactions.begin_producer("x", 60_000))
        disk.full = True
        with pytest.raises(DiskFull):
            await write(broker, producer)
        disk.full = False
        broker.shard.tick_writes()  # sees that there is room again
        await write(broker, producer)
    async with opened(tmp_path) as broker:
        assert broker.coordination.transactions.get("x").partitions == {("t", 0): log_of(broker).id}
        await end(broker, producer)
        assert log_of(broker).stable_end == 2


async def test_a_recreated_topic_is_ended_after_a_restart_and_nothing_is_left(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        producer = await begin(broker)
        await broker.streams.delete("t")
        await broker.streams.create("t")
        await write(broker, producer)
        assert len([*broker.shard.state.items(JOINED)]) == 2
    async with opened(tmp_path) as broker:
        await end(broker, producer)
        assert log_of(broker).stable_end == log_of(broker).visible_end == 2
        assert [*broker.shard.state.items(JOINED)] == []


async def test_a_partition_is_not_in_the_transaction_before_it_is_durable(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        await broker.streams.create("t")
        transactions = broker.coordination.transactions
        producer = Instance(*await transactions.begin_producer("x", 60_000))
        first = write(broker, producer)
        with pytest.raises(InvalidTransactionState):
            transactions.batches.check_append(*producer, ("t", 0))
        await transactions.add_partitions("x", *producer, {("t", 0): log_of(broker).id})
        assert first.done, "the reply must come after the first one"


async def test_offsets_bring_their_group_into_the_transaction(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        transactions = broker.coordination.transactions
        producer = Instance(*await transactions.begin_producer("x", 60_000))
        await transactions.commit_offsets("x", *producer, [], joins=True)
        assert transactions.get("x").state == EMPTY, "there are none"
        with pytest.raises(InvalidTransactionState):
            await transactions.commit_offsets("x", *producer, [offset(3)])
        await transactions.commit_offsets("x", *producer, [offset(3)], joins=True)
        assert transactions.pending_offsets("g") == {("t", 0)}
    async with opened(tmp_path) as broker:
        await end(broker, producer)
        found = broker.coordination.groups.offsets.get("g", "t", 0)
        assert found is not None and found.offset == 3


async def test_a_batch_is_accepted_while_offsets_of_its_transaction_are_being_stored(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        producer = await begin(broker)
        transactions = broker.coordination.transactions
        committing = asyncio.ensure_future(transactions.commit_offsets("x", *producer, [offset(3)], joins=True))
        await asyncio.sleep(0)
        assert transactions.get("x").busy
        await asyncio.gather(write(broker, producer, 1), committing)


async def test_a_log_that_is_owed_a_marker_takes_no_batch_before_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        producer = await begin(broker)
        data = next(tmp_path.glob(f"logs/{log_of(broker).id}-*/*.log"))
    data.write_bytes(data.read_bytes()[:-5])
    async with opened(tmp_path) as broker:
        following = await end(broker, producer)
        with pytest.raises(ConcurrentTransactions):
            write(broker, following)


# An epoch for each.


@pytest.mark.parametrize("commit", [True, False])
async def test_every_end_increases_the_epoch_and_a_retry_gets_the_same_answer(tmp_path: Path, commit: bool) -> None:
    async with opened(tmp_path) as broker:
        producer = await begin(broker)
        following = await end(broker, producer, commit=commit)
        assert following == next_of(producer)
        assert await end(broker, producer, commit=commit) == following
    async with opened(tmp_path) as broker:
        assert await end(broker, producer, commit=commit) == following
        with pytest.raises((InvalidTransactionState, TransactionAbortable)):
            await end(broker, producer, commit=not commit)
        assert log_of(broker).visible_end == 2, "one marker"
        await write(broker, following)
        with pytest.raises(ProducerFenced):
            await end(broker, producer, commit=commit)
        assert await end(broker, following) == next_of(following)


async def test_a_late_batch_of_an_ended_transaction_does_not_join_the_next_one(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        producer = await begin(broker)
        following = await end(broker, producer)
        for _ in range(2):
            with pytest.raises(InvalidProducerEpoch):
                write(broker, producer, 1)
            await write(broker, following)
        known = broker.coordination.producers.of(log_of(broker).id)
        assert known is not None
        with pytest.raises(InvalidProducerEpoch):
            known.check(info(1, producer=producer.producer_id, epoch=producer.epoch))


def test_the_first_batch_after_a_marker_with_a_new_epoch_has_number_0() -> None:
    """One behind it that comes first, because the first was refused, is not stored in its place."""
    state = PartitionProducers()
    state.stored(first := info(0, transactional=True), state.staged(first, Ticket(), 0, 0), 0)
    state.ended(1, 1, 1, commit=True)
    restored = PartitionProducers()
    restored.restore(state.snapshot(2, 0, 0))
    for known in (state, restored):
        with pytest.raises(OutOfOrderSequence):
            known.check(info(5, epoch=1))
        assert known.check(info(0, epoch=1)) is None


async def test_to_abort_nothing_moves_the_epoch_on_and_to_commit_nothing_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        transactions = broker.coordination.transactions
        producer = Instance(*await transactions.begin_producer("x", 60_000))
        for _ in range(2):
            with pytest.raises(InvalidTransactionState):
                await end(broker, producer)
            following = await end(broker, producer, commit=False)
            assert following == next_of(producer)
            assert await end(broker, producer, commit=False) == following, "told again"
            producer = following
    async with opened(tmp_path) as broker:
        assert broker.coordination.transactions.get("x").instance == producer


async def test_an_end_is_not_visible_before_it_is_durable(tmp_path: Path) -> None:
    disk = Full()
    async with opened(tmp_path, disk) as broker:
        producer = await begin(broker)
        disk.full = True
        ending = asyncio.ensure_future(end(broker, producer))
        await asyncio.sleep(0)
        with pytest.raises(ConcurrentTransactions):
            await end(broker, producer)
        with pytest.raises(DiskFull):
            await ending
        disk.full = False
        broker.shard.tick_writes()
        await write(broker, producer, 1)
        assert await end(broker, producer) == next_of(producer)
        assert log_of(broker).stable_end == log_of(broker).visible_end == 3


async def test_an_empty_abort_refused_by_a_full_disk_opens_no_transaction(tmp_path: Path) -> None:
    disk = Full()
    async with opened(tmp_path, disk) as broker:
        producer = Instance(*await broker.coordination.transactions.begin_producer("x", 60_000))
        disk.full = True
        with pytest.raises(DiskFull):
            await end(broker, producer, commit=False)
        disk.full = False
        assert broker.coordination.transactions.get("x").state == EMPTY
        assert await end(broker, producer, commit=False) == next_of(producer)


async def test_only_the_previous_instance_learns_the_next_one(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        producer = await begin(broker)
        transactions = broker.coordination.transactions
        again = Instance(
            *await transactions.begin_producer("x", 60_000)
        )  # a new instance, which gets no state of the previous one
        await end(broker, again, commit=False)
        for stranger, refused in (
            (Instance(-1, -1), UnknownProducer),
            (Instance(producer.producer_id + 1, 0), UnknownProducer),
            (producer, ProducerFenced),
            (Instance(again.producer_id, again.epoch + 7), ProducerFenced),
        ):
            with pytest.raises(refused):
                await end(broker, stranger, commit=False)
        one = transactions.get("x")
        one.last = Instance(-1, -1)
        with pytest.raises(UnknownProducer):
            await end(broker, one.last, commit=False)


# Time that is up.


@pytest.mark.parametrize("epoch", [0, EPOCH_MAX])
async def test_a_producer_that_timed_out_can_only_abort_and_continue(tmp_path: Path, epoch: int) -> None:
    async with opened(tmp_path) as broker:
        producer = await begin(broker, epoch)
        transactions = broker.coordination.transactions
        await transactions._abort_late(transactions.get("x"))
    async with opened(tmp_path) as broker:
        transactions = broker.coordination.transactions
        with pytest.raises(InvalidProducerEpoch):
            write(broker, producer, 1)
        with pytest.raises(TransactionAbortable):
            await transactions.commit_offsets("x", *producer, [offset(3)], joins=True)
        with pytest.raises(TransactionAbortable):
            await end(broker, producer)
        following = await end(broker, producer, commit=False)
        assert following == next_of(producer) if epoch == 0 else following.epoch == 0, "never the last, which fences"
        assert await end(broker, producer, commit=False) == following
        await write(broker, following)
        await end(broker, following)
        assert log_of(broker).stable_end == log_of(broker).visible_end == 4


async def test_an_abort_during_the_timeout_is_answered_when_it_is_durable(tmp_path: Path) -> None:
    """Told before, and without room for it, it would go on in a transaction that it thinks is over."""
    disk = Full()
    async with opened(tmp_path, disk) as broker:
        producer = await begin(broker)
        transactions = broker.coordination.transactions
        disk.full = True
        late = asyncio.ensure_future(transactions._abort_late(transactions.get("x")))
        await asyncio.sleep(0)
        with pytest.raises(ConcurrentTransactions):
            await end(broker, producer, commit=False)
        await late
        assert transactions.get("x").state == ONGOING
        disk.full = False


# The last epoch.


async def test_after_its_last_epoch_a_producer_has_another_id(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        producer = await begin(broker, EPOCH_MAX)
        following = await end(broker, producer)
        assert following.epoch == 0 and following.producer_id != producer.producer_id
    async with opened(tmp_path) as broker:
        assert await end(broker, producer) == following
        with pytest.raises(UnknownProducer):
            write(broker, producer, 1)
        await write(broker, following)
        assert await end(broker, following, commit=False) == next_of(following)
        known = broker.coordination.producers.of(log_of(broker).id)
        assert known is not None and known.aborted_between(0, 9) == [(following.producer_id, 2)]
        assert broker.coordination.transactions.batches.name_of(producer.producer_id) is None


async def test_a_final_end_refused_by_a_full_disk_keeps_the_producer_id(tmp_path: Path) -> None:
    disk = Full()
    async with opened(tmp_path, disk) as broker:
        producer = await begin(broker, EPOCH_MAX)
        disk.full = True
        ending: Any = asyncio.ensure_future(end(broker, producer))
        while broker.coordination.transactions.get("x").state == ONGOING:
            await asyncio.sleep(0)
        for epoch in (0, EPOCH_MAX):
            with pytest.raises(UnknownProducer):
                write(broker, Instance(producer.producer_id, epoch), 1)
        with pytest.raises(DiskFull):
            await ending
        disk.full = False
        broker.shard.tick_writes()
        await write(broker, producer, 1)
        following = await end(broker, producer)
        assert following.epoch == 0 and log_of(broker).stable_end == 3


# Beside clients that know nothing of it.


async def test_a_transactional_id_may_go_from_one_version_to_the_other(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        producer = await begin(broker)
        transactions = broker.coordination.transactions
        await end(broker, producer)
        old = Instance(*await transactions.begin_producer("x", 60_000))
        await transactions.add_partitions("x", *old, {("t", 0): log_of(broker).id})
        await write(broker, old)
        await transactions.end("x", *old, commit=True)
        await transactions.end("x", *old, commit=True)
        assert (transactions.get("x").state, transactions.get("x").instance) == (COMMITTED, old), "no epoch was used"
        await write(broker, old, 1)
        assert await end(broker, old, commit=False) == next_of(old)
        assert transactions.get("x").state == ABORTED
        assert log_of(broker).stable_end == log_of(broker).visible_end == 6
