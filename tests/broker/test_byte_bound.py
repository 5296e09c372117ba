"""max-length-bytes: counted in the background, for messages of all listeners and from before a restart."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.broker.broker import Broker
from headrace.broker.queues import byte_bound
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.queue_arguments import QueueArguments
from headrace.broker.types.message import Message
from headrace.broker.vhosts.policies import Policy
from headrace.config import Config


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    made = await Broker.open(Config(data_dir=str(tmp_path), http=None, amqp=None, kafka=None))
    yield made
    if not made.shard.is_closed:
        await made.close()


async def declare(broker: Broker, **arguments: object) -> Queue:
    named = {name.replace("_", "-"): value for name, value in arguments.items()}
    return await broker.vhosts.get("/").declare_queue(
        "q", durable=True, exclusive=False, auto_delete=False, arguments=named, owner=None
    )


async def publish(broker: Broker, queue: Queue, *bodies: bytes) -> list[bool]:
    taken = [queue.publish(Message("", "q", b"\0\0", body), broker.clock.now_ms()) for body in bodies]
    await broker.vhosts.flushes.wait_all_durable()
    await counted(queue)
    return taken


async def counted(queue: Queue) -> None:
    """Wait until messages that have to be read from the disk are counted."""
    async with asyncio.timeout(60):
        while queue.limits.bytes is not None and queue.limits.bytes._is_busy:
            await asyncio.sleep(0.001)


async def waiting(queue: Queue, expected: list[bytes]) -> None:
    """The number of ready messages, after counting has caught up."""
    async with asyncio.timeout(60):
        while queue.ready != len(expected):
            await asyncio.sleep(0.001)
    await asyncio.sleep(0.01)  # it stays like that
    found = []
    while (taken := queue.get()) is not None:
        found.append(taken)
    assert [message.body for _, _, message, _ in found] == expected
    for view, offset, _, _ in found:
        queue.give_back(view, offset)


async def test_a_returned_message_causes_older_ones_to_be_dropped(broker: Broker) -> None:
    """Regression: the limit was not enforced before the next publish."""
    queue = await declare(broker, x_max_length_bytes=10)
    await publish(broker, queue, b"a" * 8)
    taken = queue.get()
    assert taken is not None
    await publish(broker, queue, b"b" * 8)
    queue.give_back(taken[0], taken[1])
    await waiting(queue, [b"b" * 8])


async def test_a_policy_on_a_long_backlog_reads_it_cooperatively(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await declare(broker)
    for part in range(20):
        await publish(broker, queue, *(b"%06d" % n + b"x" * 1000 for n in range(part * 50, part * 50 + 50)))
    monkeypatch.setattr(byte_bound, "TURN_BYTES", 64 * 1024)
    turns = 0
    count = byte_bound.ReadyBytes._count_on

    def counted(self: byte_bound.ReadyBytes) -> None:
        nonlocal turns
        turns += 1
        count(self)

    monkeypatch.setattr(byte_bound.ReadyBytes, "_count_on", counted)
    bound = Policy(vhost="/", name="bound", pattern=".*", definition={"max-length-bytes": 3 * 1006})
    apply, read_at_once = queue.apply_policy, []

    def applied(policy: QueueArguments) -> None:
        apply(policy)
        read_at_once.append((turns, queue.ready))

    monkeypatch.setattr(queue, "apply_policy", applied)
    await broker.policies.put(bound)
    assert read_at_once == [(0, 1000)], "the backlog is read after the policy is in force, not before"
    await waiting(queue, [b"%06d" % n + b"x" * 1000 for n in (997, 998, 999)])
    assert turns >= 8


async def test_the_limit_applies_to_messages_from_before_a_restart(broker: Broker) -> None:
    queue = await declare(broker, x_max_length_bytes=30)
    await publish(broker, queue, b"1" * 10, b"2" * 10, b"3" * 10)
    await broker.close()
    again = await Broker.open(broker.config)
    queue = again.vhosts.get("/").queues["q"]
    await publish(again, queue, b"4" * 10)
    await waiting(queue, [b"2" * 10, b"3" * 10, b"4" * 10])
    await again.close()


@pytest.mark.parametrize("bound", [{"x_max_length_bytes": 30}, {"x_max_length": 3}], ids=["bytes", "length"])
async def test_the_limit_applies_to_messages_from_other_listeners(broker: Broker, bound: dict[str, int]) -> None:
    queue = await declare(broker, **bound)
    stream = broker.streams.get("q")
    await broker.publish(stream, [(None, b"%d" % n * 10, (), None, -1) for n in range(5)])
    await waiting(queue, [b"2" * 10, b"3" * 10, b"4" * 10])


async def test_messages_in_flight_do_not_count_until_they_are_returned(broker: Broker) -> None:
    queue = await declare(broker, x_max_length_bytes=20, x_overflow="reject-publish")
    assert await publish(broker, queue, b"1" * 10, b"2" * 10, b"3") == [True, True, False], "as many as fit, at once"
    taken = queue.get()
    assert taken is not None
    assert await publish(broker, queue, b"4" * 10, b"5") == [True, False]
    queue.settle(taken[0], taken[1], taken[1] + 1)
    other = queue.get()
    assert other is not None
    queue.give_back(other[0], other[1])
    assert await publish(broker, queue, b"6") == [False]
    assert await queue.purge() == 2
    assert await publish(broker, queue, b"7" * 20) == [True]
