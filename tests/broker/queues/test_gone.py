"""Deleting vhosts, queues and their streams while they are used, and what must not reappear after a restart."""

import asyncio
import errno
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.broker.broker import Broker
from headrace.broker.queues.queue import Queue
from headrace.broker.types.message import Message
from headrace.broker.vhosts.publish_message import publish_message
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import Conflict, NotFound, StorageError
from tests.broker.queue_world import bodies, declare, declare_exchange, delayed, opened, pass_time, refuse, say, until

# Deleted vhosts.


async def leaving(broker: Broker) -> tuple[VirtualHost, "asyncio.Task[None]"]:
    """A vhost whose deletion is waiting for one of its queues."""
    host = await broker.vhosts.create("v")
    await declare(host, "q")
    await host._changing.acquire()
    deletion = asyncio.create_task(broker.vhosts.delete("v"))
    await asyncio.sleep(0)
    return host, deletion


async def test_declarations_in_a_vhost_being_deleted_do_not_bring_it_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        host, deletion = await leaving(broker)
        late = [asyncio.create_task(declare(host, "late")), asyncio.create_task(declare_exchange(host, "late"))]
        await asyncio.sleep(0)
        host._changing.release()
        await deletion
        assert all(isinstance(error, NotFound) for error in await asyncio.gather(*late, return_exceptions=True))
    async with opened(tmp_path) as broker:
        assert [host.name for host in broker.vhosts] == ["/"]


async def test_a_vhost_created_while_it_is_being_deleted_is_a_new_one(broker: Broker) -> None:
    host, deletion = await leaving(broker)
    again = asyncio.create_task(broker.vhosts.create("v"))
    await asyncio.sleep(0)
    host._changing.release()
    await deletion
    made = await again
    assert made is broker.vhosts.get("v") and made is not host and not made.queues


async def test_bindings_left_after_a_kill_do_not_restore_their_vhost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as broker:
        host = await broker.vhosts.create("v")
        await host.bind("amq.direct", await declare(host, "q"), "key", {})
        # They go with the next round: the broker is killed before it.
        monkeypatch.setattr(broker.vhosts.store, "remove_bindings", lambda *_: None)
        await broker.vhosts.delete("v")
    async with opened(tmp_path) as broker:
        assert [host.name for host in broker.vhosts] == ["/"]


async def test_a_vhost_is_deleted_once(broker: Broker) -> None:
    host, deletion = await leaving(broker)
    second = asyncio.create_task(broker.vhosts.delete("v"))
    host._changing.release()
    await deletion
    with pytest.raises(NotFound):
        await second


async def test_a_vhost_that_could_not_be_deleted_can_be_tried_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await declare(await broker.vhosts.create("v"), "q")
    with monkeypatch.context() as patched:
        patched.setattr(broker.vhosts.store, "remove_queue", refuse)
        with pytest.raises(StorageError):
            await broker.vhosts.delete("v")
    assert broker.vhosts.get("v").queue("q")
    await broker.vhosts.delete("v")
    with pytest.raises(NotFound):
        broker.vhosts.get("v")


# Deleted queues.


def settled(broker: Broker) -> list[bytes]:
    return [key for key, _ in broker.shard.state.items("settle")]


def documents(broker: Broker) -> list[Any]:
    return list(broker.catalog.load("queues"))


async def cut_off(broker: Broker, monkeypatch: pytest.MonkeyPatch, at: str, deletion: Coroutine[Any, Any, Any]) -> None:
    """The broker is killed in the middle of a deletion."""
    where = {"stream": broker.streams, "settles": broker.vhosts.store, "document": broker.catalog}[at]
    step = {"stream": "delete", "settles": "_forget_settles", "document": "remove"}[at]
    with monkeypatch.context() as patched:
        patched.setattr(where, step, refuse)
        with pytest.raises(StorageError):
            await deletion


@pytest.mark.parametrize("at", ["stream", "settles"])
async def test_an_interrupted_deletion_is_finished_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    """Regression: the stream or its settles remained."""
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        queue = await declare(host, "q")
        say(queue, b"done", b"open")
        await host.flushes.wait_all_durable()
        taken = queue.get()
        assert taken is not None
        queue.settle(taken[0], taken[1], taken[1] + 1)
        await host.flushes.wait_settles_stored()
        await cut_off(broker, monkeypatch, at, host.delete_queue("q"))
    async with opened(tmp_path) as broker:
        assert broker.streams.find("q") is None
        assert not settled(broker) and not documents(broker)
        assert bodies(await declare(broker.vhosts.get("/"), "q")) == []
    async with opened(tmp_path) as broker:
        assert list(broker.vhosts.get("/").queues) == ["q"]


async def test_a_topic_stays_when_the_deletion_of_its_queue_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        await broker.streams.create("t")
        queue = await declare(host, "t")
        say(queue, b"1", b"2")
        await host.flushes.wait_all_durable()
        await cut_off(broker, monkeypatch, "settles", host.delete_queue("t"))
    async with opened(tmp_path) as broker:
        assert broker.streams.get("t").partitions[0].end_offset == 2
        assert not settled(broker) and not documents(broker)


async def test_a_new_topic_does_not_belong_to_a_deleted_queue_whose_document_remains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the queue reappeared on the topic, and deleting it deleted the topic."""
    async with opened(tmp_path) as broker:
        await declare(broker.vhosts.get("/"), "q")
        kill = asyncio.get_running_loop().create_future()
        with monkeypatch.context() as patched:  # killed before the document is gone
            patched.setattr(broker.vhosts.store, "stream_deleted", lambda *_: kill)
            kill.set_result(None)
            await broker.streams.delete("q")
        await broker.streams.create("q")
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        assert not host.queues and not documents(broker)
        await host.delete_queue("q")
        assert broker.streams.find("q") is not None


async def test_messages_of_a_delayed_exchange_being_deleted_do_not_reappear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        await delayed(host, b"1")
        await cut_off(broker, monkeypatch, "stream", host.delete_exchange("x"))
    async with opened(tmp_path) as broker:
        assert broker.streams.find("amq.delayed.x") is None
        assert all(broker.streams.of_log(int.from_bytes(key, "big")) for key in settled(broker))


async def test_the_stream_of_an_interrupted_declaration_stays_only_if_it_has_messages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Kafka client may have used the stream. An empty one would prevent a queue with other priorities."""
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        put, kinds = broker.catalog.put, {"streams"}
        monkeypatch.setattr(broker.catalog, "put", lambda kind, *rest: (put if kind in kinds else refuse)(kind, *rest))
        for name in ("empty", "used"):
            with pytest.raises(StorageError):
                await declare(host, name, x_max_priority=3)
        stream = broker.streams.get("used")
        await broker.publish(stream, [(None, b"confirmed", (), 0, 1)])
    async with opened(tmp_path) as broker:
        assert broker.streams.find("empty") is None
        assert broker.streams.get("used").partitions[0].end_offset == 1
        await declare(broker.vhosts.get("/"), "empty")


async def test_a_queue_can_be_deleted_when_the_catalog_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        await declare(host, "q")

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, "no room")

        monkeypatch.setattr(broker.catalog, "put", full)
        await host.delete_queue("q")
    async with opened(tmp_path) as broker:
        assert broker.streams.find("q") is None and not documents(broker)


async def test_a_queue_is_deleted_when_its_stream_is_deleted_as_a_topic(tmp_path: Path) -> None:
    """Kafka and HTTP clients can do that. Regression: the queue stayed, and confirmed messages that were lost."""
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        await host.bind("amq.direct", await declare(host, "q"), "key", {})
        await declare(host, "after")
        await broker.streams.delete("q")
        assert await publish_message(host, broker.pressure, Message("", "q", b"\0\0", b"nowhere"), ["q"]) == 0
        with pytest.raises(NotFound):
            host.queue("q")
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        assert list(host.queues) == ["after"] and not host.routing.exchange("amq.direct").bindings
        queue = await declare(host, "q")
        assert await publish_message(host, broker.pressure, Message("", "q", b"\0\0", b"new"), ["q"]) == 1
        assert bodies(queue) == [b"new"]


@pytest.mark.parametrize("on_it", [None, "classic"])
async def test_a_recreated_topic_receives_messages_published_over_amqp(
    broker: Broker, host: VirtualHost, on_it: str | None
) -> None:
    message = Message("", "t", b"\0\0", b"x")
    for _ in range(2):
        topic = await broker.streams.create("t")
        if on_it is not None:
            await declare(host, "t", x_queue_type=on_it)
        assert await publish_message(host, broker.pressure, message, ["t"]) == 1
        assert topic.partitions[0].end_offset == 1
        await broker.streams.delete("t")


async def test_the_stream_of_delayed_messages_is_deleted_only_with_its_exchange(
    broker: Broker, host: VirtualHost
) -> None:
    queue = await delayed(host, b"1")
    with pytest.raises(Conflict):
        await broker.streams.delete("amq.delayed.x")
    pass_time(broker)
    await until(lambda: queue.ready == 1)
    await host.delete_exchange("x")
    assert broker.streams.find("amq.delayed.x") is None


@pytest.mark.parametrize("made", ["queue", "priorities", "stream", "queue on a topic"])
async def test_partitions_cannot_be_added_to_a_queue(broker: Broker, host: VirtualHost, made: str) -> None:
    if made == "queue on a topic":
        await broker.streams.create("q")
    kinds: dict[str, dict[str, Any]] = {"stream": {"x_queue_type": "stream"}, "priorities": {"x_max_priority": 1}}
    await declare(host, "q", **kinds.get(made, {}))
    with pytest.raises(Conflict):
        await broker.streams.configure("q", {}, partitions=5)
    topic = await broker.streams.create("t")
    assert host.find_topic("t")
    await broker.streams.configure("t", {}, partitions=5)
    assert len(topic.partitions) == 5


async def test_deleting_a_queue_frees_space_on_a_full_disk(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await declare(host, "q")
    say(queue, b"large")
    await host.flushes.wait_all_durable()
    full = SimpleNamespace(group=lambda: SimpleNamespace(delete=lambda *_: None, commit=refuse))
    monkeypatch.setattr(host.store, "_shard", full)
    await host.delete_queue("q")
    assert broker.streams.find("q") is None and queue.view.log.is_deleted


async def test_settling_messages_of_a_deleted_queue_has_no_effect(broker: Broker, host: VirtualHost) -> None:
    dead = await declare(host, "dead")
    queue = await declare(host, "q", x_dead_letter_exchange="", x_dead_letter_routing_key="dead")
    say(queue, b"1", b"2")
    await host.flushes.wait_all_durable()
    first, second = queue.get(), queue.get()
    assert first is not None and second is not None
    await host.delete_queue("q")
    queue.reject(first[0], first[1])
    queue.settle(second[0], second[1], second[1] + 1)
    await host.flushes.wait_all_durable()
    await asyncio.sleep(0.05)
    assert dead.ready == 0
    keys = {key for key, _ in broker.shard.state.items("settle")}
    assert queue.view.key not in keys


async def test_a_get_that_waited_while_its_queue_was_deleted_returns_nothing(host: VirtualHost) -> None:
    queue = await declare(host, "q")
    say(queue, b"1")
    await host.flushes.wait_all_durable()
    assert queue.ready == 1
    waiting = asyncio.ensure_future(queue.prepare_get())
    await asyncio.sleep(0)
    await host.delete_queue("q")
    await waiting
    assert queue.get() is None


async def test_a_queue_has_one_timer_however_often_consumers_come_and_go(host: VirtualHost) -> None:
    """Regression: each removed consumer started another timer."""
    loop, timers = asyncio.get_running_loop(), []

    def call_later(*arguments: Any) -> Any:
        timers.append(loop.call_later(*arguments))
        return timers[-1]

    spied: Any = SimpleNamespace(call_soon=loop.call_soon, call_later=call_later)
    host.services = replace(host.services, loop=spied)
    queue = await declare(host, "q", durable=False, x_expires=60_000)
    consumer: Any = SimpleNamespace(priority=0, exclusive=False, credit=lambda: 0, cancelled=lambda: None)
    for _ in range(3):
        queue.add_consumer(consumer)
        queue.remove_consumer(consumer)
    assert [timer.cancelled() for timer in timers] == [True, True, True, False]
    host.forget_queue(queue)
    assert timers[-1].cancelled()


async def test_closing_a_connection_examines_only_its_own_queues(host: VirtualHost) -> None:
    """Regression: examining 100,000 other queues took 5 ms for each closed connection."""
    owner, other = object(), object()

    async def exclusive(name: str, owner: object) -> Queue:
        nothing: dict[str, Any] = {}
        return await host.declare_queue(
            name, durable=False, exclusive=True, auto_delete=False, arguments=nothing, owner=owner
        )

    own = [await exclusive("a", owner), await exclusive("b", owner)]
    theirs = await exclusive("c", other)
    host.forget_queue(own[0])

    class Untouched(dict[str, Queue]):
        def values(self) -> Any:
            raise AssertionError("everybody's queues")

    host.queues = Untouched(host.queues)
    host.connection_closed(owner)
    assert list(host.queues) == ["c"] and own[1].is_deleted
    host.connection_closed(other)
    assert theirs.is_deleted and not host._owned
    host.queues = {}
