"""The disk space of settled messages is reclaimed, and a stuck message keeps only itself."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from headrace.broker.broker import Broker
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.view import stored_log
from headrace.broker.types.message import Message
from headrace.broker.upkeep import reclaim
from headrace.config import Config
from headrace.log.settings import KB, StreamSettings
from headrace.record import codec

BODY = b"x" * 1000


@pytest.fixture
def open_broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Awaitable[Broker]]:
    for name in ("EMPTY_BYTES_MIN", "REWRITE_BYTES_MIN"):
        monkeypatch.setattr(reclaim, name, 16 * KB)
    stream = StreamSettings(segment_size=64 * KB)
    return lambda: Broker.open(Config(data_dir=str(tmp_path), http=None, amqp=None, kafka=None, stream=stream))


@pytest.fixture
async def broker(open_broker: Callable[[], Awaitable[Broker]]) -> AsyncIterator[Broker]:
    made = await open_broker()
    yield made
    await made.close()


async def files_are_gone(queue: Queue, size_max: int) -> None:
    """Their removal goes on in the background once it is decided, durably."""
    async with asyncio.timeout(60):
        while queue.view.log.size_bytes >= size_max:
            await asyncio.sleep(0.01)


async def queue_of(broker: Broker, count: int, **arguments: int) -> Queue:
    queue = await broker.vhosts.get("/").declare_queue(
        "q", durable=True, exclusive=False, auto_delete=False,
        arguments={name.replace("_", "-"): value for name, value in arguments.items()}, owner=object(),
    )  # fmt: skip
    for number in range(count):
        queue.publish(Message("", "q", b"\0\0", b"%06d" % number + BODY), broker.clock.now_ms())
        if number % 20 == 19:
            await broker.vhosts.flushes.wait_all_durable()
    await broker.vhosts.flushes.wait_all_durable()
    return queue


def settle_all_but(queue: Queue, kept: set[int]) -> None:
    while (found := queue.get()) is not None:
        view, offset, _, _ = found
        if offset not in kept:
            queue.settle(view, offset, offset + 1)


async def test_an_emptied_queue_gives_all_its_segments_back(broker: Broker) -> None:
    queue = await queue_of(broker, 500)
    assert queue.view.log.size_bytes > 400 * KB
    settle_all_but(queue, set())
    await broker.reclaim.once()
    await files_are_gone(queue, 64 * KB)
    queue.publish(Message("", "q", b"\0\0", b"next"), 1)
    await broker.vhosts.flushes.wait_all_durable()
    found = queue.get()
    assert found is not None and (found[1], found[2].body) == (500, b"next")


async def test_a_stuck_message_holds_only_itself_and_is_still_there(broker: Broker) -> None:
    queue = await queue_of(broker, 600)
    settle_all_but(queue, {3, 250})
    await broker.reclaim.once()
    assert broker.reclaim.segments_rewritten >= 1
    await files_are_gone(queue, 130 * KB)
    for offset in (3, 250):
        queue.give_back(queue.view, offset)
    got = [queue.get(), queue.get(), queue.get()]
    assert [found and (found[1], found[2].body[:6]) for found in got] == [(3, b"000003"), (250, b"000250"), None]


async def test_the_rewritten_queue_is_the_same_after_a_restart(open_broker: Callable[[], Awaitable[Broker]]) -> None:
    broker = await open_broker()
    queue = await queue_of(broker, 600)
    settle_all_but(queue, {3, 250})
    await broker.reclaim.once()
    await broker.close()
    again = await Broker.open(broker.config)
    queue = again.vhosts.get("/").queues["q"]
    got = [queue.get(), queue.get(), queue.get()]
    assert [found and (found[1], found[2].body[:6], found[3]) for found in got] == [
        (3, b"000003", True),
        (250, b"000250", True),
        None,
    ]
    await again.close()


async def test_requested_history_is_kept(broker: Broker) -> None:
    queue = await queue_of(broker, 300, x_retain_ms=3_600_000)
    before = queue.view.log.size_bytes
    settle_all_but(queue, set())
    await broker.reclaim.once()
    assert queue.view.log.size_bytes == before
    assert queue.view.log.read(0).base_offset == 0


async def test_history_is_kept_up_to_its_size(broker: Broker) -> None:
    queue = await queue_of(broker, 600, x_retain_bytes=150 * KB)
    settle_all_but(queue, set())
    await broker.reclaim.once()
    await files_are_gone(queue, 300 * KB)
    assert queue.view.log.size_bytes >= 150 * KB


@pytest.mark.parametrize("stuck", [set(), {650}], ids=["whole segments", "around stuck ones"])
async def test_messages_settled_by_a_queue_on_a_topic_stay_in_the_topic(broker: Broker, stuck: set[int]) -> None:
    topic = await broker.streams.create("q")
    for _ in range(30):
        await broker.publish(topic, [(None, BODY, (), None, -1)] * 20)
    queue = await queue_of(broker, 300)
    assert queue.ready == 300
    settle_all_but(queue, stuck)
    await broker.reclaim.once()
    log = topic.partitions[0].log
    assert (log.start_offset, sum(segment.records for segment in log.segments)) == (0, 900)


async def test_a_cursor_pins_the_records_it_has_not_read(broker: Broker) -> None:
    queue = await queue_of(broker, 300)
    stored_log(queue.view).set_pin("cursor", 10)
    settle_all_but(queue, set())
    await broker.reclaim.once()
    assert queue.view.log.start_offset <= 10


@pytest.mark.parametrize("stuck", [set(), {3, 250}], ids=["whole segments", "around stuck ones"])
async def test_a_cursor_created_during_a_disk_write_pins_the_records_it_has_not_read(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, stuck: set[int]
) -> None:
    queue = await queue_of(broker, 600)
    settle_all_but(queue, stuck)
    wait_all_durable = broker.vhosts.flushes.wait_all_durable

    async def meanwhile() -> None:
        await wait_all_durable()
        await broker.cursors.commit("spark", broker.streams.get("q"), {0: 100}, pin=True)

    monkeypatch.setattr(broker.vhosts.flushes, "wait_all_durable", meanwhile)
    await broker.reclaim.once()
    monkeypatch.setattr(broker.vhosts.flushes, "wait_all_durable", wait_all_durable)
    log = queue.view.log
    assert log.start_offset <= 100
    found, offset = 0, 100
    while offset < log.visible_end:
        chunk = log.read(offset)
        found += len(codec.records(chunk.data, from_offset=offset))
        offset = chunk.next_offset
    assert found == 500


@pytest.mark.parametrize("kept", [set(), {3, 250}], ids=["whole segments", "around stuck ones"])
async def test_a_moved_message_is_durable_before_its_old_copy_is_deleted(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, kept: set[int]
) -> None:
    """A dead letter counts as settled from when its move begins; a kill before the move is stored would lose it."""
    monkeypatch.setattr("headrace.broker.queues.dead_letter_outbox.AT_ONCE", 600)
    host, maintenance = broker.vhosts.get("/"), broker.shard.maintenance
    dead = await host.declare_queue(
        "dead", durable=True, exclusive=False, auto_delete=False, arguments={}, owner=object()
    )
    queue = await queue_of(broker, 600, x_dead_letter_exchange="", x_dead_letter_routing_key="dead")  # type: ignore[arg-type]
    stored: list[int] = []
    for owner, name in ((maintenance.starts, "retire_before"), (maintenance, "rewrite_segments")):
        real = getattr(owner, name)

        def spied(*arguments: object, real: Callable[..., object] = real, **named: object) -> object:
            stored.append(stored_log(dead.view).durable_end)
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, spied)
    while (found := queue.get()) is not None:
        if found[1] not in kept:
            queue.reject(found[0], found[1])
    await broker.reclaim.once()
    assert stored and set(stored) == {600 - len(kept)}, "removed before the copies were on disk"
