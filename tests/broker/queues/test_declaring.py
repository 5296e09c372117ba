"""Concurrent changes to queues, exchanges and bindings while the disk is being written."""

import asyncio
from typing import Any

import pytest

from headrace.broker.broker import Broker
from headrace.broker.queues.queue import Queue
from headrace.broker.routing.exchanges import DELAYED
from headrace.broker.types.message import Message
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import ArgumentMismatch, InUse, StorageError
from headrace.record.amqp.properties import edit
from tests.broker.queue_world import bodies, declare, declare_exchange, refuse, say, until

# Deleting and declaring.


async def test_delete_if_empty_checks_again_for_messages_after_waiting_for_the_lock(
    host: VirtualHost,
) -> None:
    queue = await declare(host, "q")
    async with host._changing:
        deletion = asyncio.ensure_future(host.delete_queue("q", if_empty=True))
        await asyncio.sleep(0)
        assert say(queue, b"confirmed") == [True]
        await host.flushes.wait_all_durable()
    with pytest.raises(InUse):
        await deletion
    assert bodies(queue) == [b"confirmed"]


async def test_delete_if_empty_checks_again_for_messages_after_writing_the_catalog(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await declare(host, "q")
    remove = host.store.remove_queue

    async def slow(vhost: str, gone: Queue) -> None:
        await remove(vhost, gone)
        assert say(queue, b"confirmed") == [True]
        await host.flushes.wait_all_durable()

    monkeypatch.setattr(host.store, "remove_queue", slow)
    with pytest.raises(InUse):
        await host.delete_queue("q", if_empty=True)
    await broker.close()
    again = await Broker.open(broker.config)
    assert bodies(again.vhosts.get("/").queues["q"]) == [b"confirmed"]
    await again.close()


async def test_delete_if_unused_checks_again_for_bindings_after_waiting_for_the_lock(
    host: VirtualHost,
) -> None:
    queue = await declare(host, "q")
    exchange = await declare_exchange(host, "x")
    async with host._changing:
        deletion = asyncio.ensure_future(host.delete_exchange("x", if_unused=True))
        await asyncio.sleep(0)
        await host.bind("x", queue, "key", {})
    with pytest.raises(InUse):
        await deletion
    assert host.routing.exchanges["x"] is exchange


async def test_an_auto_delete_exchange_stays_when_it_was_bound_again_in_time(host: VirtualHost) -> None:
    queue = await declare(host, "q")
    exchange = await declare_exchange(host, "x", auto_delete=True)
    await host.bind("x", queue, "1", {})
    async with host._changing:
        await host.unbind("x", queue, "1", {})
        await asyncio.sleep(0)
        await host.bind("x", queue, "2", {})
    for task in list(host._tasks):
        await task
    assert host.routing.exchanges.get("x") is exchange
    await host.unbind("x", queue, "2", {})
    await until(lambda: "x" not in host.routing.exchanges)


async def test_of_two_different_exchanges_declared_at_once_under_one_name_one_is_refused(
    host: VirtualHost,
) -> None:
    told = await asyncio.gather(
        declare_exchange(host, "x", "direct"), declare_exchange(host, "x", "fanout"), return_exceptions=True
    )
    assert [type(one) for one in told if isinstance(one, Exception)] == [ArgumentMismatch]


async def test_a_queue_in_memory_cannot_take_the_name_of_one_being_stored(host: VirtualHost) -> None:
    told = await asyncio.gather(declare(host, "q"), declare(host, "q", durable=False), return_exceptions=True)
    assert [type(one) for one in told if isinstance(one, Exception)] == [ArgumentMismatch]


async def test_an_exchange_in_memory_cannot_take_the_name_of_one_being_stored(host: VirtualHost) -> None:
    told = await asyncio.gather(
        declare_exchange(host, "x"), declare_exchange(host, "x", durable=False), return_exceptions=True
    )
    assert [type(one) for one in told if isinstance(one, Exception)] == [ArgumentMismatch]


async def test_a_delayed_exchange_deleted_and_declared_again_at_once_keeps_new_delayed_messages(
    broker: Broker, host: VirtualHost
) -> None:
    options: dict[str, Any] = {"arguments": {"x-delayed-type": "direct"}}
    await declare_exchange(host, "x", DELAYED, **options)
    deletion = asyncio.ensure_future(host.delete_exchange("x"))
    await asyncio.sleep(0)
    async with host._changing:
        pass  # the exchange is gone, its log may be on its way
    exchange = await declare_exchange(host, "x", DELAYED, **options)
    await deletion
    properties = edit(b"\0\0", headers={"x-delay": 3_600_000})
    assert host.delays.route(exchange, Message("x", "q", properties, b"later"), broker.clock.now_ms(), [""]).waits_in
    await host.flushes.wait_all_durable()
    await until(lambda: host.delays.waiting("x") == 1)


async def test_the_exchanges_of_a_deleted_virtual_host_stay_deleted(broker: Broker) -> None:
    brief = await broker.vhosts.create("brief")
    await declare_exchange(brief, "x")
    await declare_exchange(brief, "later", DELAYED, arguments={"x-delayed-type": "direct"})
    await broker.vhosts.delete("brief")
    await broker.close()
    again = await Broker.open(broker.config)
    assert [host.name for host in again.vhosts] == ["/"]
    assert not [stream.name for stream in again.streams if stream.vhost == "brief"]
    await again.close()


# Bindings.


async def restarted(broker: Broker) -> tuple[Broker, list[str]]:
    await broker.close()
    again = await Broker.open(broker.config)
    host = again.vhosts.get("/")
    return again, sorted(b.key for b in host.routing.bindings_to(host.queues["q"]))


async def test_a_binding_that_could_not_be_stored_is_stored_when_it_is_made_again(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await declare(host, "q")
    with monkeypatch.context() as patched:
        patched.setattr(host.store, "put_binding", refuse)
        with pytest.raises(StorageError):
            await host.bind("amq.direct", queue, "key", {})
    await host.bind("amq.direct", queue, "key", {})
    again, keys = await restarted(broker)
    assert keys == ["key"]
    await again.close()


async def test_a_binding_removed_while_it_is_being_stored_does_not_reappear(broker: Broker, host: VirtualHost) -> None:
    queue = await declare(host, "q")
    binding = asyncio.ensure_future(host.bind("amq.direct", queue, "key", {}))
    await asyncio.sleep(0)
    await host.unbind("amq.direct", queue, "key", {})
    await binding
    again, keys = await restarted(broker)
    assert keys == []
    await again.close()


async def test_a_new_exchange_does_not_inherit_the_bindings_of_a_deleted_one(broker: Broker, host: VirtualHost) -> None:
    exchange = await declare_exchange(host, "x")
    await host.bind("amq.direct", exchange, "key", {})
    await host.delete_exchange("x")
    await declare_exchange(host, "x")
    await declare(host, "q")
    again, _ = await restarted(broker)
    routing = again.vhosts.get("/").routing
    assert routing.bindings_to(routing.exchanges["x"]) == []
    await again.close()


async def test_unbind_returns_when_it_is_durable(host: VirtualHost) -> None:
    queue = await declare(host, "q")
    await host.bind("amq.direct", queue, "key", {})
    state = host.store._shard.state
    assert len(list(state.items("bindings"))) == 1
    await host.unbind("amq.direct", queue, "key", {})
    assert list(state.items("bindings")) == []
