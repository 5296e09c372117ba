"""Much that moves at once: dead letters are groups of the journal, and a group has a largest size."""

import asyncio
from pathlib import Path

import pytest

from headrace.broker.broker import Broker
from headrace.broker.queues.queue import Queue
from headrace.broker.types.message import Message
from headrace.clock import ManualClock
from tests.crash.queue_world import abandon_broker, config, drain, without_threads
from tests.crash.simdisk import SimulatedDisk

COUNT, SIZE = 600, 500  # three times what fits into half of a journal's file
TTL_MS = 1000


async def declare(broker: Broker, name: str, **arguments: object) -> Queue:
    return await broker.vhosts.get("/").declare_queue(
        name, durable=True, exclusive=False, auto_delete=False, arguments=arguments, owner=object()
    )


async def until(true: object) -> None:
    async with asyncio.timeout(60):
        while not true():  # type: ignore[operator]
            await asyncio.sleep(0)


async def filled(broker: Broker, **arguments: object) -> tuple[Queue, Queue]:
    dead = await declare(broker, "dead")
    letters = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"}
    queue = await declare(broker, "q", **letters, **arguments)
    for number in range(COUNT):
        queue.publish(Message("", "q", b"\0\0", b"%04d" % number + b"." * SIZE), broker.clock.now_ms())
        if number % 50 == 0:
            await broker.vhosts.flushes.wait_all_durable()
    await broker.vhosts.flushes.wait_all_durable()
    return queue, dead


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimulatedDisk:
    without_threads(monkeypatch)
    return SimulatedDisk()


def numbers(queue: Queue) -> list[int]:
    return [int(body[:4]) for body, _ in drain(queue)]


async def test_more_messages_can_expire_at_once_than_fit_in_a_journal_entry(
    tmp_path: Path, disk: SimulatedDisk
) -> None:
    """It was one group, refused as too large, put back and tried again for ever: nothing reached the dead letters."""
    clock = ManualClock()
    broker = await Broker.open(config(tmp_path), clock=clock, disk=disk)
    queue, dead = await filled(broker, **{"x-message-ttl": TTL_MS})
    clock.advance(2 * TTL_MS / 1000)
    queue.drop_expired()
    await until(lambda: dead.ready == COUNT)
    assert queue.ready == 0 and numbers(dead) == list(range(COUNT))
    await abandon_broker(broker)


async def test_more_messages_can_be_rejected_at_once_than_fit_in_a_journal_entry(
    tmp_path: Path, disk: SimulatedDisk
) -> None:
    broker = await Broker.open(config(tmp_path), clock=ManualClock(), disk=disk)
    queue, dead = await filled(broker)
    await queue.prepare_get()
    taken = []
    while (one := queue.get()) is not None:
        taken.append(one)
    assert len(taken) == COUNT
    for view, offset, _, _ in taken:  # as basic.nack with `multiple` does
        queue.reject(view, offset)
    await until(lambda: dead.ready == COUNT)
    after = disk.kill()
    await abandon_broker(broker)
    broker = await Broker.open(config(tmp_path), clock=ManualClock(), disk=after)
    queues = broker.vhosts.get("/").queues
    assert numbers(queues["dead"]) == list(range(COUNT)) and queues["q"].ready == 0
    await abandon_broker(broker)


async def test_more_messages_can_be_retried_at_once_than_fit_in_a_journal_entry(
    tmp_path: Path, disk: SimulatedDisk
) -> None:
    broker = await Broker.open(config(tmp_path), clock=ManualClock(), disk=disk)
    queue, dead = await filled(broker, **{"x-retry-limit": 1})
    await queue.prepare_get()
    taken = []
    while (one := queue.get()) is not None:
        taken.append(one)
    for view, offset, _, _ in taken:
        queue.reject(view, offset)
    await until(lambda: queue.ready == COUNT)
    assert numbers(queue) == list(range(COUNT)) and dead.ready == 0
    await abandon_broker(broker)
