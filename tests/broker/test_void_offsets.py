"""Offsets without a message (markers, aborted records): no queue counts, delivers or limits them."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.broker import Broker
from headrace.broker.queues import limits
from headrace.broker.queues.dead_letter_browser import Selection
from headrace.broker.queues.queue import Queue
from headrace.broker.streams.partition import Partition
from headrace.log.log import Log
from headrace.record import codec
from tests.broker.queue_world import bodies, declare, opened, pass_time, say, until


def log_of(queue: Queue) -> Log:
    log = queue.view.log
    assert isinstance(log, Log)
    return log


async def begin(broker: Broker, queue: Queue, values: list[bytes]) -> tuple[int, int]:
    """A transaction with a batch for each value; its producer's id and epoch."""
    transactions, log = broker.coordination.transactions, log_of(queue)
    pid, epoch = await transactions.begin_producer("x", 60_000)
    await transactions.add_partitions("x", pid, epoch, {(queue.name, 0): log.id})
    for sequence, value in enumerate(values):
        batch = codec.build(
            [(None, value, (), 1)],
            timestamp_ms=1,
            producer_id=pid,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=True,
        )
        await broker.coordination.producers.append(Partition(0, log), batch, codec.validate(batch))
    return pid, epoch


async def transact(broker: Broker, queue: Queue, values: list[bytes], *, commit: bool) -> None:
    pid, epoch = await begin(broker, queue, values)
    await broker.coordination.transactions.end("x", pid, epoch, commit=commit)


async def said(broker: Broker, queue: Queue, *values: bytes) -> None:
    say(queue, *values)
    await broker.vhosts.flushes.wait_all_durable()


async def settled_down(broker: Broker, queue: Queue) -> None:
    """What a bound drops, it has dropped."""
    await broker.vhosts.flushes.wait_all_durable()
    await until(
        lambda: not queue.limits.deferred.pending and (queue.limits.bytes is None or not queue.limits.bytes._is_busy)
    )


async def test_aborted_records_are_not_counted_without_readers(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        queue = await declare(broker.vhosts.get("/"), "q")
        await said(broker, queue, b"one")
        pid, epoch = await begin(broker, queue, [b"taken back"] * 3)
        await said(broker, queue, b"two")
        assert queue.ready == 1, "what is behind an open transaction waits for its end"
        await broker.coordination.transactions.end("x", pid, epoch, commit=False)
        assert queue.ready == 2
        assert bodies(queue) == [b"one", b"two"]
        assert (queue.ready, queue.unacked) == (0, 2)


async def test_the_ends_of_transactions_are_not_counted_unless_there_are_very_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "VOID_RUNS_MAX", 4)
    async with opened(tmp_path) as broker:
        queue = await declare(broker.vhosts.get("/"), "q")
        for turn in range(1, 7):
            await transact(broker, queue, [b"in it"], commit=True)
            assert queue.ready == max(turn, 2 * turn - 4)
        assert bodies(queue) == [b"in it"] * 6
        assert queue.ready == 0


@pytest.mark.parametrize("commit", [False, True])
async def test_max_length_ignores_offsets_without_a_message(tmp_path: Path, commit: bool) -> None:
    async with opened(tmp_path) as broker:
        queue = await declare(broker.vhosts.get("/"), "q", x_max_length=3)
        await said(broker, queue, b"one", b"two")
        await transact(broker, queue, [b"three"] if commit else [b"taken back"] * 5, commit=commit)
        await said(broker, queue, *() if commit else (b"three",))
        await settled_down(broker, queue)
        assert queue.ready == 3
        assert bodies(queue) == [b"one", b"two", b"three"]


@pytest.mark.parametrize("is_told", [False, True])
async def test_a_byte_limit_does_not_count_aborted_records(tmp_path: Path, is_told: bool) -> None:
    async with opened(tmp_path) as broker:
        queue = await declare(broker.vhosts.get("/"), "q", x_max_length_bytes=30)
        if not is_told:
            broker.coordination.producers.unwatch(log_of(queue))
        await said(broker, queue, b"one", b"two")
        await transact(broker, queue, [b"taken back " * 10], commit=False)
        await settled_down(broker, queue)
        assert bodies(queue) == [b"one", b"two"]


@pytest.mark.parametrize("is_told", [False, True])
async def test_a_kill_right_after_an_abort_leaves_nothing_to_count(tmp_path: Path, is_told: bool) -> None:
    """The queue could not store the end of the transaction, or was not notified of it."""
    before, after = tmp_path / "before", tmp_path / "after"
    async with opened(before) as broker:
        queue = await declare(broker.vhosts.get("/"), "q")
        await said(broker, queue, b"one")
        await transact(broker, queue, [b"in it"], commit=True)
        if not is_told:
            broker.coordination.producers.unwatch(log_of(queue))
        await transact(broker, queue, [b"taken back"] * 3, commit=False)
        shutil.copytree(before, after)  # as a kill leaves it
    async with opened(after) as broker:
        queue = broker.vhosts.get("/").queues["q"]
        assert queue.ready == 2
        assert bodies(queue) == [b"one", b"in it"]


async def test_a_transaction_that_was_open_over_a_restart_is_not_counted_when_it_is_aborted(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        queue = await declare(broker.vhosts.get("/"), "q")
        pid, epoch = await begin(broker, queue, [b"taken back"] * 3)
        await said(broker, queue, b"one")
    async with opened(tmp_path) as broker:
        queue = broker.vhosts.get("/").queues["q"]
        assert queue.ready == 0
        await broker.coordination.transactions.end("x", pid, epoch, commit=False)
        assert queue.ready == 1
        assert bodies(queue) == [b"one"]


@pytest.mark.parametrize("is_told", [False, True])
async def test_aborted_records_are_not_dead_lettered_when_they_expire(tmp_path: Path, is_told: bool) -> None:
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        dead = await declare(host, "dead")
        arguments: Any = {"x_message_ttl": 100, "x_dead_letter_exchange": "", "x_dead_letter_routing_key": "dead"}
        queue = await declare(host, "q", **arguments)
        if not is_told:
            broker.coordination.producers.unwatch(log_of(queue))
        await transact(broker, queue, [b"taken back"] * 3, commit=False)
        await said(broker, queue, b"one")
        pass_time(broker)
        queue.drop_expired()
        await until(lambda: dead.ready)
        await settled_down(broker, queue)
        assert (queue.ready, queue.unacked) == (0, 0)
        assert bodies(dead) == [b"one"]


async def test_aborted_records_are_not_replayed(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        queue: Any = await declare(host, "q")
        await declare(host, "elsewhere")
        broker.coordination.producers.unwatch(log_of(queue))
        await said(broker, queue, b"one")
        await transact(broker, queue, [b"taken back"] * 3, commit=False)
        plan = await broker.dead_letters.plan(queue, Selection(), to="elsewhere")
        assert plan.matched == 1
