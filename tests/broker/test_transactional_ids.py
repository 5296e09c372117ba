"""Transactional ids over time: restarts of their producers, expiry, and damage to the logs they wrote to."""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from headrace.broker.broker import Broker
from headrace.broker.streams.partition import Partition
from headrace.broker.transactions.coordinator import ID_EXPIRATION_MS, Transactions
from headrace.broker.transactions.table import TRANSACTIONS
from headrace.broker.transactions.transaction import COMMITTED, EPOCH_MAX, NO_INSTANCE, ONGOING, Transaction
from headrace.clock import ManualClock
from headrace.config import Config
from headrace.errors import ConcurrentTransactions, ProducerFenced, TransactionNotFound, UnknownProducer
from headrace.log.log import Log
from headrace.record import codec


@asynccontextmanager
async def opened(folder: Path, clock: ManualClock | None = None) -> AsyncIterator[Broker]:
    config = Config(data_dir=str(folder), http=None, amqp=None, kafka=None)
    broker = await Broker.open(config, clock=clock or ManualClock())
    try:
        yield broker
    finally:
        await broker.close()


def log_of(broker: Broker, topic: str) -> Log:
    return broker.streams.get(topic).partitions[0].log


async def begin(broker: Broker, name: str, *topics: str) -> tuple[int, int]:
    """A transaction with a record in each of the topics; its producer's id and epoch."""
    transactions = broker.coordination.transactions
    pid, epoch = await transactions.begin_producer(name, 60_000)
    for topic in topics:
        if broker.streams.find(topic) is None:
            await broker.streams.create(topic)
        log = log_of(broker, topic)
        await transactions.add_partitions(name, pid, epoch, {(topic, 0): log.id})
        batch = codec.build(
            [(None, b"in a transaction", (), 1)],
            timestamp_ms=1,
            producer_id=pid,
            producer_epoch=epoch,
            base_sequence=0,
            transactional=True,
        )
        await broker.coordination.producers.append(Partition(0, log), batch, codec.validate(batch))
    return pid, epoch


# After a restart.


async def test_a_producer_whose_transaction_timed_out_may_start_over_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        pid, epoch = await begin(broker, "x", "t")
        transactions = broker.coordination.transactions
        await transactions._abort_late(transactions.get("x"))
    async with opened(tmp_path) as broker:
        transactions = broker.coordination.transactions
        with pytest.raises(ProducerFenced):
            await transactions.begin_producer("x", 1000, pid, epoch + 7)
        assert await transactions.begin_producer("x", 1000, pid, epoch) == (pid, epoch + 2)


@pytest.mark.parametrize("epoch", [0, EPOCH_MAX])
async def test_a_producer_whose_answer_a_restart_lost_may_retry(tmp_path: Path, epoch: int) -> None:
    """With the last epoch it got another id, which it never heard of."""
    async with opened(tmp_path) as broker:
        transactions = broker.coordination.transactions
        pid, _ = await transactions.begin_producer("x", 1000)
        transactions.get("x").epoch = epoch
        fresh, first = await transactions.begin_producer("x", 1000, pid, epoch)
        assert await transactions.begin_producer("x", 1000, pid, epoch) == (fresh, first), "the same, as Kafka answers"
    async with opened(tmp_path) as broker:
        transactions = broker.coordination.transactions
        assert await transactions.begin_producer("x", 1000, pid, epoch) == (fresh, first)
        assert await transactions.begin_producer("x", 1000, fresh, first) == (fresh, first + 1), "it starts over"
        assert await transactions.begin_producer("x", 1000) == (fresh, first + 2), "another instance"
        with pytest.raises(ProducerFenced):
            await transactions.begin_producer("x", 1000, pid, epoch)


def test_a_transactional_id_that_an_older_version_saved_is_read() -> None:
    one = Transaction.restored("x", msgspec.msgpack.encode([7, 3, 1000, ONGOING, 5, 6, [("t", 0, 1)], ["g"], []]))
    assert (one.producer_id, one.epoch, one.partitions) == (7, 3, {("t", 0): 1})
    assert one.last == NO_INSTANCE and one.owed == []


# Expiry.


async def test_transactional_ids_are_forgotten_after_a_week_without_use_but_not_with_an_open_transaction(
    tmp_path: Path,
) -> None:
    clock = ManualClock()
    async with opened(tmp_path, clock) as broker:
        transactions = broker.coordination.transactions
        old, epoch = await begin(broker, "old", "t")
        await transactions.end("old", old, epoch, commit=True)
        await begin(broker, "open", "t")
        clock.advance(ID_EXPIRATION_MS / 1000)
        await transactions.begin_producer("used", 1000)
        await transactions.expire()
        assert {one.transactional_id for one in transactions.every()} == {"old", "open", "used"}, "not a day too soon"
        clock.advance(1)
        await transactions.expire()
        assert {one.transactional_id for one in transactions.every()} == {"open", "used"}
        with pytest.raises(UnknownProducer):
            await transactions.add_partitions("old", old, epoch, {})
        assert transactions.batches.name_of(old) is None
    async with opened(tmp_path, clock) as broker:
        transactions = broker.coordination.transactions
        with pytest.raises(TransactionNotFound):
            transactions.get("old")
        fresh, epoch = await transactions.begin_producer("old", 1000)
        assert fresh != old and epoch == 0


async def test_a_producer_that_returns_while_its_id_expires_must_retry(tmp_path: Path) -> None:
    clock = ManualClock()
    async with opened(tmp_path, clock) as broker:
        transactions = broker.coordination.transactions
        await transactions.begin_producer("x", 1000)
        clock.advance(ID_EXPIRATION_MS / 1000 + 1)
        forgetting = transactions.expire()
        forgetting.send(None)  # its entry is on its way to the disk
        with pytest.raises(ConcurrentTransactions):
            await transactions.begin_producer("x", 1000)
        forgetting.close()
        assert not transactions.get("x").busy


async def test_the_sweep_forgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.broker.transactions.coordinator.SWEEP_S", 0.01)
    clock = ManualClock()
    async with opened(tmp_path, clock) as broker:
        transactions = broker.coordination.transactions
        await transactions.begin_producer("x", 1000)
        clock.advance(ID_EXPIRATION_MS / 1000 + 1)
        while next(transactions.every(), None) is not None:
            await broker.shard.group().commit()


# Damage.


def owed_topics(transactions: Transactions) -> set[str]:
    return {topic for topic, _ in transactions.get("x").shown_partitions}


async def test_a_damaged_log_keeps_no_marker_from_the_others_and_gets_its_own_when_it_is_sound_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with opened(tmp_path) as broker:
        pid, epoch = await begin(broker, "x", "bad", "good")
        data = next(tmp_path.glob(f"logs/{log_of(broker, 'bad').id}-*/*.log"))
    sound = data.read_bytes()
    data.write_bytes(sound[:-5])
    async with opened(tmp_path) as broker:
        transactions = broker.coordination.transactions
        assert log_of(broker, "bad").damage is not None
        with caplog.at_level(logging.ERROR, "headrace.broker"):
            await transactions.end("x", pid, epoch, commit=True)
            await transactions.end("x", pid, epoch, commit=True)
        assert log_of(broker, "good").stable_end == 2
        assert [record.message.partition(" ")[0] for record in caplog.records] == ["bad-0"]
        one = transactions.get("x")
        assert (one.state, one.shown_state, owed_topics(transactions)) == (COMMITTED, "PrepareCommit", {"bad"})
        again = {("bad", 0): log_of(broker, "bad").id}
        with pytest.raises(ConcurrentTransactions):
            await transactions.add_partitions("x", pid, epoch, again)
        await transactions.add_partitions("x", pid, epoch, {("good", 0): log_of(broker, "good").id})
        await transactions.end("x", pid, epoch, commit=False)
    data.write_bytes(sound)
    async with opened(tmp_path) as broker:
        transactions, log = broker.coordination.transactions, log_of(broker, "bad")
        while transactions.get("x").owed or transactions.get("x").busy:
            await broker.shard.group().commit()
        assert log.stable_end == log.visible_end == 2
        producers = broker.coordination.producers.of(log.id)
        assert producers is not None and producers.aborted_between(0, 2) == [], "it was committed"
        assert transactions.get("x").shown_state == "CompleteAbort"
    async with opened(tmp_path) as broker:
        assert broker.coordination.transactions.get("x").owed == []
        assert log_of(broker, "bad").visible_end == 2, "one marker"


async def test_a_damaged_topic_that_is_deleted_is_owed_nothing(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        pid, epoch = await begin(broker, "x", "bad")
        data = next(tmp_path.glob(f"logs/{log_of(broker, 'bad').id}-*/*.log"))
    data.write_bytes(data.read_bytes()[:-5])
    async with opened(tmp_path) as broker:
        transactions = broker.coordination.transactions
        await transactions.end("x", pid, epoch, commit=False)
        assert owed_topics(transactions) == {"bad"}
        await broker.streams.delete("bad")
        assert owed_topics(transactions) == set()
        assert transactions.get("x").shown_state == "CompleteAbort"
    async with opened(tmp_path) as broker:
        while Transaction.restored("x", broker.shard.state.get(TRANSACTIONS, b"x") or b"").owed:
            await broker.shard.group().commit()
