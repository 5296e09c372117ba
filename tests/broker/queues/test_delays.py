"""Delayed messages: clock changes, full disks, damaged records and odd headers."""

import asyncio
import threading
from typing import Any

import pytest

from headrace.broker.broker import Broker
from headrace.broker.queues.delays import DUE_HEADER
from headrace.broker.queues.view import stored_log
from headrace.broker.routing.exchanges import DELAYED
from headrace.broker.types.message import Message
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.log.read.cold_reads import Loads
from headrace.record.amqp.properties import edit
from tests.broker.queue_world import Refusing, bodies, declare, declare_exchange, delayed, pass_time, refuse, say, until


async def test_a_dead_letter_for_a_delayed_exchange_waits_there_once(broker: Broker, host: VirtualHost) -> None:
    """Regression: the dead letter was not delayed and circulated as fast as its consumer rejected it."""
    await declare_exchange(host, "x", DELAYED, arguments={"x-delayed-type": "fanout"})
    queue = await declare(host, "q", x_dead_letter_exchange="x")
    await host.bind("x", queue, "", {})
    queue.publish(Message("", "q", edit(b"\0\0", headers={"x-delay": 50}), b"again"), host.clock.now_ms())

    async def rejected() -> Any:
        await until(lambda: queue.ready == 1)
        taken = queue.get()
        assert taken is not None
        queue.reject(taken[0], taken[1])
        await host.flushes.wait_all_durable()
        return taken[2].headers().get("x-delay")

    assert await rejected() == 50
    await until(lambda: host.delays.waiting("x") == 1)
    assert queue.ready == 0
    pass_time(broker)
    assert await rejected() == -50
    assert await rejected() == -50, "it has waited"
    assert host.delays.waiting("x") == 0


async def test_timers_check_for_due_messages_at_least_every_minute(broker: Broker, host: VirtualHost) -> None:
    """Event-loop timers stop while the machine is suspended and do not follow the wall clock."""
    exchange = await declare_exchange(host, "x", DELAYED, arguments={"x-delayed-type": "fanout"})
    properties = edit(b"\0\0", headers={"x-delay": 50 * 60_000})
    assert host.delays.route(exchange, Message("x", "", properties, b"later"), host.clock.now_ms(), [""]).waits_in
    mortal = await declare(host, "q", x_message_ttl=50 * 60_000)
    say(mortal, b"old")
    await host.flushes.wait_all_durable()
    log = host.delays._logs["x"]
    await until(lambda: log._timer is not None and mortal.limits.head_timer is not None)
    assert max(log._timer_at, mortal.limits._head_timer_at) <= asyncio.get_running_loop().time() + 61


async def test_a_delayed_message_refused_by_a_full_disk_is_published_later(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await delayed(host, b"1", b"2")
    refusing = Refusing(lambda: host.delays.waiting("x"))
    with monkeypatch.context() as patched:
        patched.setattr(broker.shard, "group", refusing)
        pass_time(broker)
        await until(lambda: 0 in refusing.times)
    await until(lambda: queue.ready == 2)
    assert bodies(queue) == [b"1", b"2"]


async def test_a_due_message_is_read_from_disk_without_blocking_the_event_loop(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: the event loop read the message and blocked on the disk."""
    queue = await delayed(host, b"1", b"2")
    log = host.delays._logs["x"].view.log
    loads = Loads(broker.shard.loader)
    disk = threading.Event()
    read_now = log.read_now

    def cold(offset: int, size: int) -> Any:
        loads.result(offset, lambda: disk.wait(60))
        return read_now(offset, size)

    monkeypatch.setattr(log, "read_now", cold)
    monkeypatch.setattr(log, "read", refuse)
    pass_time(broker)
    await until(lambda: loads._running)
    say(queue, b"meanwhile")
    await until(lambda: queue.ready == 1)
    assert host.delays.waiting("x") == 2
    disk.set()
    await until(lambda: queue.ready == 3)
    assert bodies(queue) == [b"meanwhile", b"1", b"2"]
    assert host.delays.waiting("x") == 0


async def test_a_delayed_message_that_cannot_be_read_does_not_hold_back_the_others(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await delayed(host, b"1", b"2", b"3")
    log = host.delays._logs["x"]
    chunk = log.view.reader.chunk

    def damaged(run: Any) -> Any:
        return refuse() if run.start == 0 else chunk(run)

    monkeypatch.setattr(log.view.reader, "chunk", damaged)
    pass_time(broker)
    await until(lambda: queue.ready == 2)
    assert bodies(queue) == [b"2", b"3"]


async def test_a_deleted_delayed_message_is_not_retried(
    broker: Broker, host: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await delayed(host, b"1", b"2")
    await broker.shard.maintenance.starts.delete_before(stored_log(host.delays._logs["x"].view), 1)
    pass_time(broker)
    await until(lambda: queue.ready == 1)
    assert bodies(queue) == [b"2"]
    assert (host.delays.waiting("x"), caplog.messages) == (0, [])


async def test_a_delayed_message_with_a_malformed_cc_does_not_block_others(broker: Broker, host: VirtualHost) -> None:
    """As stored by an earlier version, which did not check CC."""
    queue = await delayed(host, b"1")
    strange = Message("x", "", edit(b"\0\0", headers={"CC": 5}), b"0")
    log = host.delays._logs["x"]
    log.view.open_batch().writer.append(b"", strange.body, (*strange.record_headers(), (DUE_HEADER, bytes(8))), 0)
    await host.flushes.wait_all_durable()
    log.index_new()
    pass_time(broker)
    await until(lambda: queue.ready == 2)
    assert bodies(queue) == [b"0", b"1"]
