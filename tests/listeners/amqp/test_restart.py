"""State after a restart or a kill: durable definitions, unacknowledged messages, redelivered flags."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pika
import pytest
from pika.exceptions import ConnectionClosedByBroker

from headrace.broker.broker import Broker
from headrace.broker.queues.queue import Queue
from headrace.broker.types.message import Message
from headrace.config import Config
from tests.broker.queue_world import refuse
from tests.listeners.amqp.running import Running, bodies, depth, eventually, take


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Running]:
    broker = Running(tmp_path / "data")
    yield broker
    broker.stop()


def test_durable_queues_and_exchanges_survive_a_restart_and_transient_ones_do_not(fresh: Running) -> None:
    channel = fresh.channel()
    for durable in (True, False):
        channel.exchange_declare(f"x{durable}", "topic", durable=durable)
        channel.queue_declare(f"q{durable}", durable=durable, arguments={"x-message-ttl": 600_000})
        channel.queue_bind(f"q{durable}", f"x{durable}", "a.#")
    channel.queue_bind("qTrue", "amq.fanout")
    channel.queue_bind("qTrue", "xTrue", "gone")
    channel.queue_unbind("qTrue", "xTrue", "gone")
    channel.exchange_declare("y", "fanout", durable=True)
    channel.exchange_bind("xTrue", "y", "k")
    fresh.restart()
    channel = fresh.channel()
    channel.queue_declare("qTrue", durable=True, arguments={"x-message-ttl": 600_000})
    channel.basic_publish("xTrue", "a.b", b"1")
    channel.basic_publish("amq.fanout", "", b"2")
    channel.basic_publish("y", "a", b"3")
    channel.basic_publish("xTrue", "gone", b"never")
    assert bodies(channel, "qTrue") == [b"1", b"2", b"3"]
    found = fresh.call(lambda: fresh.server.broker.vhosts.get("/"))
    assert "qFalse" not in found.queues and "xFalse" not in found.routing.exchanges


def test_after_a_restart_only_unacknowledged_messages_remain_and_are_redelivered(fresh: Running) -> None:
    channel = fresh.channel()
    channel.queue_declare("q", durable=True)
    for n in range(10):
        channel.basic_publish("", "q", b"%d" % n)
    tags = [channel.basic_get("q")[0].delivery_tag for _ in range(6)]
    for n in (0, 1, 4):
        channel.basic_ack(tags[n])
    depth(channel, "q")
    fresh.restart()
    channel = fresh.channel()
    got = [channel.basic_get("q") for _ in range(7)]
    assert [body for _, _, body in got] == [b"2", b"3", b"5", b"6", b"7", b"8", b"9"]
    assert [method.redelivered for method, _, _ in got] == [True, True, True, False, False, False, False]


def test_priorities_and_delays_survive_a_restart(fresh: Running) -> None:
    channel = fresh.channel()
    channel.queue_declare("p", durable=True, arguments={"x-max-priority": 3})
    for n in range(4):
        channel.basic_publish("", "p", b"%d" % n, pika.BasicProperties(priority=n))
    channel.exchange_declare("d", "x-delayed-message", durable=True, arguments={"x-delayed-type": "direct"})
    channel.queue_declare("late", durable=True)
    channel.queue_bind("late", "d", "k")
    for delay in (1, 800, 600_000):
        channel.basic_publish("d", "k", b"%d" % delay, pika.BasicProperties(headers={"x-delay": delay}))
    eventually(lambda: depth(channel, "late") >= 1)
    fresh.restart()
    channel = fresh.channel()
    assert bodies(channel, "p") == [b"3", b"2", b"1", b"0"]
    eventually(lambda: depth(channel, "late") == 2)
    assert bodies(channel, "late") == [b"1", b"800"]
    delays = fresh.server.broker.vhosts.get("/").delays
    assert fresh.call(lambda: delays.waiting("d")) == 1


def test_messages_that_expired_while_the_broker_was_down_are_removed(fresh: Running) -> None:
    channel = fresh.channel()
    channel.queue_declare("q", durable=True)
    channel.basic_publish("", "q", b"x", pika.BasicProperties(expiration="1"))
    channel.basic_publish("", "q", b"y")
    fresh.restart()
    channel = fresh.channel()
    eventually(lambda: depth(channel, "q") == 1)
    _, _, body = take(channel, "q")
    assert body == b"y"


def test_a_deleted_queue_and_its_messages_do_not_return_after_a_restart(fresh: Running) -> None:
    channel = fresh.channel()
    channel.queue_declare("q", durable=True)
    channel.queue_bind("q", "amq.direct", "k")
    channel.basic_publish("", "q", b"old")
    channel.queue_delete("q")
    channel.queue_declare("q", durable=True)
    fresh.restart()
    channel = fresh.channel()
    assert depth(channel, "q") == 0
    channel.basic_publish("amq.direct", "k", b"unbound")
    assert depth(channel, "q") == 0


def test_a_queue_whose_deletion_was_interrupted_is_empty_when_declared_again(
    fresh: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    channel = fresh.channel()
    channel.queue_declare("q", durable=True)
    channel.confirm_delivery()
    channel.basic_publish("", "q", b"old")
    with monkeypatch.context() as patched, pytest.raises(ConnectionClosedByBroker):
        patched.setattr(fresh.server.broker.streams, "delete", refuse)  # as if the broker were killed here
        channel.queue_delete("q")
    fresh.restart()
    channel = fresh.channel()
    channel.queue_declare("q", durable=True, arguments={"x-max-priority": 2})
    assert depth(channel, "q") == 0


async def declare(broker: Broker, name: str = "q", **arguments: object) -> Queue:
    host = broker.vhosts.get("/")
    return await host.declare_queue(
        name, durable=True, exclusive=False, auto_delete=False, arguments=arguments, owner=object()
    )


def message(body: bytes) -> Message:
    return Message("", "q", b"\0\0", body)


async def crash(broker: Broker) -> None:
    """Stop like a kill: nothing more is written, only the lock is released."""
    broker.shard.fail(OSError("killed"))
    broker.vhosts.flushes.close()
    await asyncio.gather(broker.close(), return_exceptions=True)


async def test_after_a_kill_acks_hold_and_possibly_delivered_messages_are_redelivered(tmp_path: Path) -> None:
    config = Config(data_dir=str(tmp_path / "data"), http=None, amqp=None, kafka=None)
    broker = await Broker.open(config)
    queue = await declare(broker)
    for n in range(20):
        queue.publish(message(b"%d" % n), 1)
    await broker.vhosts.flushes.wait_all_durable()
    taken = [queue.get() for _ in range(8)]
    for found in taken[:5]:
        assert found is not None
        queue.settle(found[0], found[1], found[1] + 1)
    rounds = broker.vhosts.flushes
    # Wait until the acks are written. They need no sync to survive a kill of the process.
    while rounds._outstanding or rounds._unsaved:
        await asyncio.sleep(0.01)
    await crash(broker)
    broker = await Broker.open(config)
    queue = broker.vhosts.get("/").queues["q"]
    got = [queue.get() for _ in range(15)]
    assert [found[2].body for found in got if found] == [b"%d" % n for n in range(5, 20)]
    flags = [found[3] for found in got if found]
    assert flags[:3] == [True, True, True]
    queue.publish(message(b"new"), 1)
    await broker.vhosts.flushes.wait_all_durable()
    fresh = queue.get()
    assert fresh is not None and fresh[3] is False
    await broker.close()


def test_the_delivery_count_survives_a_restart(fresh: Running) -> None:
    channel = fresh.channel()
    channel.queue_declare("q", durable=True, arguments={"x-queue-type": "quorum"})
    for n in range(6):
        channel.basic_publish("", "q", b"%d" % n)
    tags = [channel.basic_get("q")[0].delivery_tag for _ in range(4)]
    channel.basic_nack(tags[1], requeue=True)
    method, properties, body = channel.basic_get("q")
    assert (body, properties.headers) == (b"1", {"x-delivery-count": 1})
    channel.basic_nack(method.delivery_tag, requeue=True)
    channel.basic_nack(tags[3], requeue=True)
    channel.basic_ack(tags[0])
    depth(channel, "q")
    fresh.restart()
    channel = fresh.channel()
    got: list[tuple[bytes, object]] = []
    channel.basic_consume(
        "q", lambda _c, _m, p, body: got.append((body, (p.headers or {}).get("x-delivery-count"))), auto_ack=True
    )
    eventually(lambda: channel.connection.process_data_events(0.05) or len(got) == 5)
    assert [body for body, _ in got] == [b"1", b"2", b"3", b"4", b"5"]
    assert {body: count for body, count in got if count} == {b"1": 2, b"2": 1, b"3": 1}
