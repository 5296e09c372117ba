"""A log whose start is beyond the position of its queue: records were deleted on request or by retention."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from headrace.broker.broker import Broker
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.view import stored_log
from headrace.broker.types.message import Message
from headrace.clock import ManualClock
from headrace.config import Config
from headrace.log.settings import StreamSettings


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    stream = StreamSettings(segment_size=2048)
    config = Config(data_dir=str(tmp_path), http=None, amqp=None, kafka=None, stream=stream)
    made = await Broker.open(config, clock=ManualClock())
    yield made
    await made.close()


async def queue_of(broker: Broker, *texts: bytes, **arguments: object) -> Queue:
    queue = await broker.vhosts.get("/").declare_queue(
        "q", durable=True, exclusive=False, auto_delete=False, owner=None,
        arguments={key.replace("_", "-"): value for key, value in arguments.items()},
    )  # fmt: skip
    await say(queue, *texts)
    return queue


async def say(queue: Queue, *texts: bytes) -> list[bool]:
    said = [queue.publish(Message("", "q", b"\0\0", text), queue.vhost.clock.now_ms()) for text in texts]
    await queue.vhost.flushes.wait_all_durable()
    return said


async def get(queue: Queue) -> tuple[int, bytes] | None:
    await queue.prepare_get()
    taken = queue.get()
    return (taken[1], taken[2].body) if taken is not None else None


async def rest(queue: Queue) -> list[bytes]:
    found = []
    while (taken := await get(queue)) is not None:
        found.append(taken[1])
    return found


async def delete_before(broker: Broker, queue: Queue, offset: int) -> None:
    await broker.shard.maintenance.starts.delete_before(stored_log(queue.view), offset)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def counts(queue: Queue) -> tuple[int, int]:
    return queue.ready, queue.unacked


async def test_a_queue_continues_after_the_deleted_records(broker: Broker) -> None:
    queue = await queue_of(broker, *[b"%d" % n for n in range(10)])
    await delete_before(broker, queue, 5)
    await say(queue, b"10", b"11")
    assert counts(queue) == (7, 0)
    assert await rest(queue) == [b"%d" % n for n in range(5, 12)]
    assert counts(queue) == (0, 7)


async def test_an_unacknowledged_message_that_was_deleted_is_not_requeued(broker: Broker) -> None:
    """Neither as it was, nor as a dead letter; the others that were out do."""
    queue = await queue_of(
        broker, *[b"%d" % n for n in range(8)], x_queue_type="quorum", x_dead_letter_exchange="amq.fanout"
    )
    for _ in range(6):
        await get(queue)
    queue.give_back(queue.view, 0)
    assert counts(queue) == (3, 5)
    await delete_before(broker, queue, 4)
    assert counts(queue) == (2, 2)
    queue.give_back(queue.view, 1)
    queue.reject(queue.view, 2)
    queue.settle(queue.view, 3, 4)
    queue.give_back(queue.view, 4)
    assert counts(queue) == (3, 1)
    assert await rest(queue) == [b"4", b"6", b"7"]
    assert queue.most_returns == 1


async def test_deleted_records_do_not_count_toward_max_length_bytes(broker: Broker) -> None:
    queue = await queue_of(broker, x_max_length_bytes=1000, x_overflow="reject-publish")
    assert await say(queue, *[b"x" * 250] * 5) == [True] * 4 + [False]
    await delete_before(broker, queue, 3)
    assert await say(queue, b"x" * 250) == [True], "although there is no consumer"
    await until(lambda: queue.limits.bytes is not None and queue.limits.bytes.total == 500)
    assert await say(queue, *[b"x" * 250] * 3) == [True, True, False]


async def test_deleted_records_do_not_make_max_length_bytes_drop_messages(broker: Broker) -> None:
    queue = await queue_of(broker, *[b"x" * 250] * 3, b"kept" * 60, x_max_length_bytes=1000)
    await until(lambda: queue.limits.bytes is not None and queue.limits.bytes.total == 990)
    await delete_before(broker, queue, 3)
    await say(queue, b"new" * 80)
    await until(lambda: queue.limits.bytes is not None and queue.limits.bytes.total == 480)
    assert await rest(queue) == [b"kept" * 60, b"new" * 80]


async def test_a_topics_retention_does_not_stop_the_queue_that_was_declared_on_it(broker: Broker) -> None:
    topic = await broker.streams.create("q", 1, {"retention_bytes": 4096})
    queue = await queue_of(broker)
    for n in range(30):
        await say(queue, b"%d" % n + b"x" * 300)
    await broker.housekeeping.once()
    start = topic.partitions[0].start_offset
    assert 0 < start < 30
    assert queue.ready == 30 - start
    await say(queue, b"new")
    found = await rest(queue)
    assert (len(found), found[-1]) == (31 - start, b"new")
