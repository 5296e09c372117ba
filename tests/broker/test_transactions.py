"""Transactions: begun, ended, timed out, fenced, and restored after a restart."""

import asyncio
from pathlib import Path

import pytest

from headrace.broker.broker import Broker
from headrace.broker.transactions.transaction import ABORTED, ONGOING
from headrace.errors import (
    InvalidProducerEpoch,
    InvalidTransactionState,
    InvalidTransactionTimeout,
    ProducerFenced,
    UnknownProducer,
)
from tests.broker.producer_world import append, batch, opened


async def begin(broker: Broker) -> tuple[int, int]:
    """A transaction with one record in it."""
    transactions = broker.coordination.transactions
    pid, epoch = await transactions.begin_producer("x", 60_000)
    log = broker.streams.get("t").partitions[0].log
    await transactions.add_partitions("x", pid, epoch, {("t", 0): log.id})
    await append(broker, batch(b"x", producer_id=pid, producer_epoch=epoch, base_sequence=0, transactional=True))
    return pid, epoch


async def time_out(broker: Broker) -> None:
    """Its time is short only from now on: the record was to be in it before."""
    transactions = broker.coordination.transactions
    one = transactions.get("x")
    assert one.timer is not None and one.timeout_ms == 60_000
    one.timer.cancel()
    one.timeout_ms = 50
    transactions._start_timer(one)
    while one.state == ONGOING or one.busy:
        await broker.shard.group().commit()


async def test_a_transaction_interrupted_by_a_restart_can_be_ended(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        await broker.streams.create("t")
        pid, epoch = await begin(broker)
        assert broker.streams.get("t").partitions[0].log.stable_end == 0
    async with opened(tmp_path) as broker:
        log = broker.streams.get("t").partitions[0].log
        assert (log.stable_end, log.visible_end) == (0, 1)
        await broker.coordination.transactions.end("x", pid, epoch, commit=False)
        assert log.stable_end == log.visible_end == 2
    async with opened(tmp_path) as broker:
        log = broker.streams.get("t").partitions[0].log
        assert log.stable_end == 2
        producers = broker.coordination.producers.of(log.id)
        assert producers is not None
        assert producers.aborted_between(0, 2) == [(pid, 0)]


async def test_a_transaction_is_aborted_and_fenced_when_its_time_is_up(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        await broker.streams.create("t")
        pid, epoch = await begin(broker)
        log = broker.streams.get("t").partitions[0].log
        transactions = broker.coordination.transactions
        await time_out(broker)
        assert transactions.get("x").state == ABORTED
        assert log.stable_end == log.visible_end == 2
        with pytest.raises(ProducerFenced):
            await transactions.end("x", pid, epoch, commit=True)


async def test_a_producer_may_restart_after_a_timeout_and_another_one_may_not(
    tmp_path: Path,
) -> None:
    async with opened(tmp_path) as broker:
        await broker.streams.create("t")
        pid, epoch = await begin(broker)
        transactions = broker.coordination.transactions
        await time_out(broker)
        with pytest.raises(ProducerFenced):
            await transactions.begin_producer("x", 1000, pid, epoch + 7)
        assert await transactions.begin_producer("x", 1000, pid, epoch) == (pid, epoch + 2)
        assert await transactions.begin_producer("x", 1000, pid, epoch) == (pid, epoch + 2), "a lost answer"
        assert await transactions.begin_producer("x", 1000) == (pid, epoch + 3), "another instance"
        with pytest.raises(ProducerFenced):
            await transactions.begin_producer("x", 1000, pid, epoch)


async def test_a_producer_whose_transaction_timed_out_gets_an_error_it_can_recover_from(tmp_path: Path) -> None:
    """Of a batch, that its epoch is old: a fence ends Java's producers. And that it is aborted, as it asks then."""
    async with opened(tmp_path) as broker:
        await broker.streams.create("t")
        pid, epoch = await begin(broker)
        transactions = broker.coordination.transactions
        await time_out(broker)
        with pytest.raises(InvalidProducerEpoch):
            transactions.batches.check_append(pid, epoch, ("t", 0))
        await transactions.end("x", pid, epoch, commit=False)
        with pytest.raises(ProducerFenced):
            await transactions.end("x", pid, epoch - 1, commit=False)
        assert await transactions.begin_producer("x", 1000, pid, epoch) == (pid, epoch + 2)
        with pytest.raises(ProducerFenced):
            await transactions.end("x", pid, epoch, commit=False)


async def test_invalid_transaction_operations_are_refused(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        await broker.streams.create("t")
        transactions = broker.coordination.transactions
        with pytest.raises(InvalidTransactionTimeout):
            await transactions.begin_producer("x", 10**9)
        pid, epoch = await transactions.begin_producer("x", 1000)
        with pytest.raises(InvalidTransactionState):
            await transactions.end("x", pid, epoch, commit=True)
        with pytest.raises(InvalidTransactionState):
            transactions.batches.check_append(pid, epoch, ("t", 0))
        with pytest.raises(UnknownProducer):
            await transactions.add_partitions("x", pid + 1, epoch, {})
        again = await transactions.begin_producer("x", 1000)
        assert again == (pid, epoch + 1)
        with pytest.raises(ProducerFenced):
            await transactions.add_partitions("x", pid, epoch, {("t", 0): 1})


async def test_ending_twice_the_same_way_is_an_answer_that_was_lost(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        await broker.streams.create("t")
        pid, epoch = await begin(broker)
        transactions = broker.coordination.transactions
        await transactions.end("x", pid, epoch, commit=True)
        await transactions.end("x", pid, epoch, commit=True)
        with pytest.raises(InvalidTransactionState):
            await transactions.end("x", pid, epoch, commit=False)
        assert broker.streams.get("t").partitions[0].end_offset == 2, "one marker"


async def test_a_transaction_is_not_shown_as_complete_before_its_marker_can_be_read(tmp_path: Path) -> None:
    """Clients that wait for this and then read, as Kafka's tools do, get all records."""
    async with opened(tmp_path) as broker:
        await broker.streams.create("t")
        pid, epoch = await begin(broker)
        transactions, log = broker.coordination.transactions, broker.streams.get("t").partitions[0].log
        ending = asyncio.create_task(transactions.end("x", pid, epoch, commit=True))
        while not ending.done():
            await asyncio.sleep(0)
            assert (transactions.get("x").shown_state, log.visible_end) != ("CompleteCommit", 1)
        assert (transactions.get("x").shown_state, log.visible_end) == ("CompleteCommit", 2)
