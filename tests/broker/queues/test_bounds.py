"""Limits of queues: expiry and overflow, dead-lettering, and their behaviour on a full disk."""

import asyncio
from typing import Any

import msgspec
import pytest

from headrace.broker.broker import Broker
from headrace.broker.queues.deferred_calls import DeferredCalls
from headrace.broker.queues.limits import DROPPED_AT_ONCE
from headrace.broker.queues.queue import Queue
from headrace.broker.types.message import Message
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.record.amqp.properties import encode_properties
from tests.broker.queue_world import Refusing, bodies, declare, declare_exchange, pass_time, say, until


@pytest.mark.parametrize("durable", [True, False])
async def test_many_messages_that_expire_at_once_are_dropped_over_many_iterations(
    broker: Broker, host: VirtualHost, durable: bool
) -> None:
    """Regression: dropping 200,000 messages blocked the event loop for 37 s."""
    dead = await declare(host, "dead", durable=durable)
    moving: dict[str, Any] = {"x_dead_letter_exchange": "", "x_dead_letter_routing_key": "dead"}
    queue = await declare(host, "q", durable=durable, x_message_ttl=1000, **moving)
    said = [b"%d" % n for n in range(5 * DROPPED_AT_ONCE)]
    say(queue, *said)
    await host.flushes.wait_all_durable()
    pass_time(broker)
    for _ in range(2):
        queue.drop_expired()
    assert queue.ready == 3 * DROPPED_AT_ONCE
    await asyncio.sleep(0)
    assert queue.ready == 2 * DROPPED_AT_ONCE  # asked for twice, it goes on once
    await until(lambda: dead.ready == len(said))
    assert bodies(dead) == said


async def test_many_messages_rejected_at_once_are_dead_lettered_in_order_over_many_iterations(
    host: VirtualHost,
) -> None:
    dead = await declare(host, "dead", durable=False)
    queue = await declare(host, "q", durable=False, x_dead_letter_exchange="", x_dead_letter_routing_key="dead")
    said = [b"%d" % n for n in range(3 * DROPPED_AT_ONCE)]
    say(queue, *said)
    await host.flushes.wait_all_durable()
    assert bodies(queue) == said
    for offset in range(len(said)):
        queue.reject(queue.view, offset)
    assert queue.unacked == 2 * DROPPED_AT_ONCE
    await queue.rejects_moved()
    assert queue.unacked == 0
    await host.flushes.wait_all_durable()
    assert bodies(dead) == said


async def test_rejected_messages_not_yet_moved_are_ready_again_after_a_restart(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await declare(host, "dead")
    queue = await declare(host, "q", x_dead_letter_exchange="", x_dead_letter_routing_key="dead")
    said = [b"%d" % n for n in range(2 * DROPPED_AT_ONCE)]
    say(queue, *said)
    await host.flushes.wait_all_durable()
    assert bodies(queue) == said
    monkeypatch.setattr(DeferredCalls, "call_soon", lambda *_: None)
    for offset in range(len(said)):
        queue.reject(queue.view, offset)
    await broker.close()
    queue.view.reader.release_chunk()
    queue.outbox._move_rejected()
    assert "stays" not in caplog.text
    again = await Broker.open(broker.config, clock=broker.clock)
    queues = again.vhosts.get("/").queues
    assert bodies(queues["dead"]) + bodies(queues["q"]) == said
    await again.close()


@pytest.mark.parametrize("why", ["no exchange", "no binding", "full"])
async def test_an_at_least_once_dead_letter_is_kept_until_a_queue_accepts_it(
    broker: Broker, host: VirtualHost, why: str
) -> None:
    """Regression: the strategy was accepted but ignored, and the message dropped."""
    full: dict[str, Any] = {"x_max_length": 0, "x_overflow": "reject-publish"} if why == "full" else {}
    dead = await declare(host, "dead", **full)
    if why != "no exchange":
        await declare_exchange(host, "x")
    if why == "full":
        await host.bind("x", dead, "q", {})
    queue = await declare(
        host, "q", x_queue_type="quorum", x_overflow="reject-publish", x_message_ttl=1000,
        x_dead_letter_exchange="x", x_dead_letter_strategy="at-least-once",
    )  # fmt: skip
    say(queue, b"rejected", b"expired")
    await host.flushes.wait_all_durable()
    taken = queue.get()
    assert taken is not None
    queue.reject(taken[0], taken[1])
    pass_time(broker)
    queue.drop_expired()
    await host.flushes.wait_all_durable()
    assert (queue.ready, queue.unacked, dead.ready) == (0, 2, 0)
    if why == "no exchange":
        await declare_exchange(host, "x")
    if why == "full":
        dead.apply_policy(msgspec.structs.replace(dead.policy, length_max=None))
    else:
        await host.bind("x", dead, "q", {})
    queue.outbox._retry_kept()
    await until(lambda: dead.ready == 2)
    assert bodies(dead) == [b"rejected", b"expired"]
    assert queue.unacked == 0


async def expiring(host: VirtualHost) -> tuple[Queue, Queue]:
    """A queue with a message that stays and one of half a second behind it, and the queue of its dead letters."""
    dead = await declare(host, "dead", durable=False)
    queue = await declare(host, "q", x_dead_letter_exchange="", x_dead_letter_routing_key="dead")
    say(queue, b"stays")
    short = Message("", "q", encode_properties({"expiration": "500"}), b"short")
    queue.publish(short, host.clock.now_ms())
    await host.flushes.wait_all_durable()
    return queue, dead


@pytest.mark.parametrize("late", [False, True])
async def test_a_message_expires_while_those_before_it_are_in_flight(
    broker: Broker, host: VirtualHost, late: bool
) -> None:
    queue, dead = await expiring(host)
    if late:
        pass_time(broker)
    assert queue.get() is not None
    if not late:
        await asyncio.sleep(0)
        pass_time(broker)
    await until(lambda: dead.ready)
    assert (queue.ready, queue.unacked) == (0, 1)


async def test_a_message_expires_behind_one_that_was_in_flight_before_a_restart(
    broker: Broker, host: VirtualHost
) -> None:
    await expiring(host)
    await broker.close()
    again = await Broker.open(broker.config, clock=broker.clock)
    queue = again.vhosts.get("/").queues["q"]
    await asyncio.sleep(0)
    assert queue.get() is not None
    pass_time(again)
    await until(lambda: queue.ready == 0)
    await again.close()


async def test_a_message_returned_after_its_expiration_is_dropped(broker: Broker, host: VirtualHost) -> None:
    queue, dead = await expiring(host)
    _, short = queue.get(), queue.get()
    assert short is not None
    pass_time(broker)
    queue.give_back(*short[:2])
    await until(lambda: dead.ready)
    assert (queue.ready, queue.unacked) == (0, 1)


async def test_an_empty_queue_stops_checking_for_expired_messages(broker: Broker, host: VirtualHost) -> None:
    queue, dead = await expiring(host)
    taken = queue.get()
    assert taken is not None
    pass_time(broker)
    await until(lambda: dead.ready)
    queue.settle(taken[0], taken[1], taken[1] + 1)
    queue.drop_expired()
    assert not queue.limits.may_expire


async def test_messages_being_stored_count_towards_the_limit_of_a_queue_that_refuses(host: VirtualHost) -> None:
    queue = await declare(host, "q", x_max_length=3, x_overflow="reject-publish")
    assert say(queue, b"1", b"2") == [True, True]
    host.flushes.flush()  # under way, not there yet
    assert queue.ready == 0
    assert say(queue, b"3", b"4") == [True, False]
    await host.flushes.wait_all_durable()
    assert bodies(queue) == [b"1", b"2", b"3"]


async def expire_without_room(broker: Broker, queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """Expire all ready messages while the disk refuses to store their dead letters."""
    count = queue.ready
    refusing = Refusing(lambda: queue.ready)
    with monkeypatch.context() as patched:
        patched.setattr(broker.shard, "group", refusing)
        pass_time(broker)
        await until(lambda: 0 in refusing.times)
        await until(lambda: queue.ready == count)


async def test_expired_messages_refused_by_a_full_disk_are_dead_lettered_later(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = await declare(host, "dead")
    queue = await declare(host, "q", x_message_ttl=30, x_dead_letter_exchange="", x_dead_letter_routing_key="dead")
    say(queue, b"1")
    await host.flushes.wait_all_durable()
    await expire_without_room(broker, queue, monkeypatch)
    await until(lambda: dead.ready == 1)
    assert queue.ready == 0


async def test_messages_expired_in_memory_and_refused_by_a_full_disk_are_dead_lettered_later(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = await declare(host, "dead")
    queue = await declare(
        host, "q", durable=False, x_message_ttl=30, x_dead_letter_exchange="", x_dead_letter_routing_key="dead"
    )
    say(queue, b"1", b"2")
    await host.flushes.wait_all_durable()
    await expire_without_room(broker, queue, monkeypatch)
    await until(lambda: dead.ready == 2)
    assert queue.ready == 0 and bodies(dead) == [b"1", b"2"]


async def test_a_message_moved_from_memory_to_disk_stays_in_memory_until_it_is_durable(
    host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An ack of the next message meanwhile must not drop either record too early; both are dropped in the end."""
    dead = await declare(host, "dead")
    queue = await declare(host, "q", durable=False, x_dead_letter_exchange="", x_dead_letter_routing_key="dead")
    say(queue, b"1")
    host.flushes.flush_memory()
    say(queue, b"2")
    host.flushes.flush_memory()
    first, second = queue.get(), queue.get()
    assert first is not None and second is not None
    queue.reject(first[0], first[1])
    queue.settle(second[0], second[1], second[1] + 1)
    assert queue.view.log.start_offset == 0
    await host.flushes.wait_all_durable()
    assert bodies(dead) == [b"1"]
    assert queue.view.log.start_offset == 2 and queue.view.log.size_bytes == 0


async def test_a_dead_letter_for_a_queue_in_memory_is_moved_once_even_if_the_disk_is_full(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = await declare(host, "dead", durable=False)
    queue = await declare(host, "q", x_message_ttl=30, x_dead_letter_exchange="", x_dead_letter_routing_key="dead")
    say(queue, b"1")
    await host.flushes.wait_all_durable()
    refusing = Refusing(lambda: queue.ready)
    with monkeypatch.context() as patched:
        patched.setattr(broker.shard, "group", refusing)
        pass_time(broker)
        await until(lambda: len(refusing.times) > 1)
    await host.flushes.wait_all_durable()
    assert queue.ready == 0 and bodies(dead) == [b"1"]


@pytest.mark.parametrize("bound", [{"x_message_ttl": 30}, {"x_max_length": 1}, {"x_max_length_bytes": 1}])
async def test_a_message_that_cannot_be_dead_lettered_is_retried_without_delaying_others(
    broker: Broker,
    host: VirtualHost,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    bound: dict[str, Any],
) -> None:
    """Regression: the message was in no queue until the next start."""
    monkeypatch.setattr("headrace.broker.queues.dead_letter_outbox.RETRY_S", 0.001)
    dead = await declare(host, "dead")
    queue = await declare(host, "q", x_dead_letter_exchange="", x_dead_letter_routing_key="dead", **bound)
    copy, tried = host.dead_letters.publish_copy, []

    def fails_for_one(source: Queue, message: Message, reason: str, now_ms: int) -> int:
        if message.body == b"1":
            tried.append(reason)
            raise ValueError("a bug")
        return copy(source, message, reason, now_ms)

    with monkeypatch.context() as patched:
        patched.setattr(host.dead_letters, "publish_copy", fails_for_one)
        say(queue, b"1", b"2", b"3")
        await host.flushes.wait_all_durable()
        if "x_message_ttl" in bound:
            pass_time(broker)
            queue.drop_expired()
        else:
            say(queue, b"4")
        await until(lambda: len(tried) >= 3 and dead.ready == 2)
        assert len([record for record in caplog.records if "dead-lettered" in record.message]) == 1
    await until(lambda: dead.ready == 3 and queue.unacked == 0)
    assert sorted(bodies(dead)) == [b"1", b"2", b"3"]
