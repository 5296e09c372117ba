"""A failure of one queue must not affect the others: flushes, dead letters, upkeep and statistics."""

import asyncio
import gc
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from headrace.broker.broker import Broker
from headrace.broker.metrics.history import History
from headrace.broker.queues.dead_letter_browser import Selection, death_of
from headrace.broker.queues.publish_batch import PublishBatch
from headrace.broker.queues.queue import Queue
from headrace.broker.types.message import Message
from headrace.broker.vhosts.publish_message import publish_message
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import StorageError
from headrace.record.amqp.properties import edit
from tests.broker.queue_world import Refusing, bodies, declare, opened, pass_time, refuse, say, until

T = TypeVar("T")

# Rounds.


async def test_a_failed_callback_of_one_queue_does_not_affect_the_waiters_of_others(
    host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = await declare(host, "damaged", x_message_ttl=60_000)
    say(damaged, b"1")
    await host.flushes.wait_all_durable()
    monkeypatch.setattr(damaged.view.log, "read", refuse)
    monkeypatch.setattr(damaged.view.log, "read_now", refuse)
    damaged.view.reader.release_chunk()
    say(damaged, b"2")
    async with asyncio.timeout(60):
        await host.flushes.wait_all_durable()


async def test_a_failure_of_one_queue_in_memory_does_not_stop_the_flush_of_others(
    host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = await declare(host, "bad", durable=False), await declare(host, "good", durable=False)
    with monkeypatch.context() as patched:
        patched.setattr(bad.view.log, "append", refuse)
        say(bad, b"lost")
        say(good, b"1")
        host.flushes.flush_memory()
    say(bad, b"2")
    say(good, b"2")
    await host.flushes.wait_all_durable()
    assert (bodies(bad), bodies(good)) == ([b"2"], [b"1", b"2"])


async def test_a_dead_letter_keeps_a_routing_key_that_is_not_utf8(host: VirtualHost) -> None:
    """Regression: encoding x-death failed, and other queues in memory were not flushed."""
    dead = await declare(host, "dead", durable=False)
    moving: dict[str, Any] = {"x_dead_letter_exchange": "", "x_dead_letter_routing_key": "dead"}
    bounded = await declare(host, "bounded", durable=False, x_max_length=1, **moving)
    for body in (b"1", b"2"):
        bounded.publish(Message("x", "caf\udce9", b"\0\0", body), host.clock.now_ms())
    await until(lambda: dead.ready)
    taken = dead.get()
    assert taken is not None
    assert taken[2].headers()["x-death"][0]["routing-keys"] == [b"caf\xe9"]
    death = death_of(taken[2])
    assert death is not None
    assert death.routing_key == "caf\udce9"
    assert bodies(bounded) == [b"2"]
    bounded.publish(taken[2], host.clock.now_ms())  # with its history, and dies once more
    say(bounded, b"3")
    await until(lambda: dead.ready)
    taken = dead.get()
    assert taken is not None
    assert b"S\0\0\0\x04caf\xe9" in taken[2].properties


@pytest.mark.parametrize(
    "forged", [{"x-death": 5}, {"CC": 5}, {"x-death": [{"queue": "q", "reason": "rejected", "count": "many"}]}]
)
async def test_a_message_with_malformed_death_headers_is_dead_lettered(
    host: VirtualHost, forged: dict[str, Any]
) -> None:
    dead = await declare(host, "dead", durable=False)
    queue = await declare(host, "q", durable=False, x_dead_letter_exchange="amq.fanout")
    await host.bind("amq.fanout", dead, "", {})
    queue.publish(Message("", "q", edit(b"\0\0", headers=forged), b"1"), host.clock.now_ms())
    await host.flushes.wait_all_durable()
    taken = queue.get()
    assert taken is not None
    queue.reject(taken[0], taken[1])
    await until(lambda: dead.ready)


async def test_an_old_rejection_does_not_disable_cycle_detection(broker: Broker, host: VirtualHost) -> None:
    to_itself: dict[str, Any] = {"x_dead_letter_exchange": "", "x_dead_letter_routing_key": "q"}
    queue = await declare(host, "q", durable=False, x_message_ttl=1000, **to_itself)
    say(queue, b"1")
    await host.flushes.wait_all_durable()
    taken = queue.get()
    assert taken is not None
    queue.reject(taken[0], taken[1])
    await host.flushes.wait_all_durable()
    assert queue.ready == 1
    pass_time(broker)
    queue.drop_expired()
    await host.flushes.wait_all_durable()
    assert queue.ready == 0


@pytest.mark.parametrize("atomic", [False, True])
async def test_a_publish_to_a_deleted_queue_does_not_fail_the_flush_of_others(host: VirtualHost, atomic: bool) -> None:
    """Regression: a body frame that arrived after the deletion failed everyone in that flush with 541."""
    doomed, good = await declare(host, "doomed"), await declare(host, "good")
    await host.delete_queue("doomed")
    assert doomed.view.log.is_deleted
    if atomic:
        host.flushes.begin_atomic()
    say(doomed, b"late")
    say(good, b"1")
    if atomic:
        host.flushes.end_atomic()
    await host.flushes.wait_all_durable()
    assert bodies(good) == [b"1"]
    assert doomed.view.pending_records == 0


async def test_waiters_of_a_flush_are_notified_after_those_of_earlier_flushes(
    host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A confirm covers all earlier publishes. Regression: a later flush confirmed those of a running one."""
    monkeypatch.setattr("headrace.broker.queues.flush.WAITING_BYTES_MAX", 0)
    doomed, good = await declare(host, "doomed"), await declare(host, "good")
    await host.delete_queue("doomed")
    told: list[tuple[str, int]] = []
    for queue in (good, doomed):
        say(queue, b"1")

        def note(_: object, name: str = queue.name) -> None:
            told.append((name, good.ready))

        host.flushes.after(note)
        host.flushes.flush()  # of the second nothing is left to be stored
    await host.flushes.wait_all_durable()
    assert told == [("good", 1), ("doomed", 1)]


async def test_a_stored_reservation_takes_effect_even_if_another_queue_of_the_flush_is_refused(
    host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, other = await declare(host, "q"), await declare(host, "other")
    say(queue, b"1")
    await host.flushes.wait_all_durable()
    monkeypatch.setattr(other.view.log, "append", refuse)
    host.flushes.begin_atomic()
    say(queue, b"2")
    host.flushes.end_atomic()
    say(other, b"lost")
    async with asyncio.timeout(60):
        await queue.prepare_get()
    assert bodies(queue) == [b"1", b"2"]


async def test_refused_settles_are_not_retried_immediately(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: retries used a whole core while the disk was full."""
    queue = await declare(host, "q")
    say(queue, b"1")
    await host.flushes.wait_all_durable()
    taken = queue.get()
    assert taken is not None
    await host.flushes.wait_settles_stored()
    monkeypatch.setattr("headrace.broker.queues.flush.RETRY_S", 3600)
    refusing = Refusing(lambda: queue.unacked)
    with monkeypatch.context() as patched:
        patched.setattr(broker.shard, "group", refusing)
        queue.settle(taken[0], taken[1], taken[1] + 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(refusing.times) == 1
        say(queue, b"2")  # what comes meanwhile does not wait for that
        await host.flushes.wait_all_durable()
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(refusing.times) == 2
    await host.flushes.wait_settles_stored()


# Background work.


async def test_a_damaged_queue_does_not_prevent_reclaiming_the_space_of_others(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged, other = await declare(host, "damaged"), await declare(host, "other")
    looked = []
    look = broker.reclaim._reclaim

    async def look_after(view: Any, retain: Any) -> None:
        looked.append(view)
        await (refuse() if view is damaged.view else look(view, retain))

    monkeypatch.setattr(broker.reclaim, "_reclaim", look_after)
    with pytest.raises(StorageError):
        await broker.reclaim.once()
    assert looked == [damaged.view, other.view]


async def test_history_continues_when_one_queue_cannot_be_sampled(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await declare(host, "q")
    assert broker._watch is not None
    broker._watch.cancel()  # its own
    monkeypatch.setattr("headrace.broker.metrics.history.INTERVAL_S", 0.001)
    monkeypatch.setattr("headrace.broker.metrics.history.QUEUES_PER_SECOND", 1e12)
    history = History(broker.stats, broker.shard.counters, broker.vhosts, broker.clock)
    failed = []

    def fails(_: Queue) -> int:
        failed.append(True)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        patched.setattr(Queue, "ready", property(fails))
        task = asyncio.ensure_future(history.run())
        await until(lambda: len(failed) >= 3 or task.done())
    await until(lambda: history.samples or task.done())
    assert not task.done()
    said = [record for record in caplog.records if "sampling the broker" in record.message]
    assert len(said) == 1, "not once a second"
    task.cancel()


async def test_housekeeping_continues_when_a_task_fails(broker: Broker) -> None:
    done = []

    async def fails() -> None:
        raise OSError(5, "Input/output error")

    async def works() -> None:
        done.append(True)

    keeper = broker.housekeeping
    keeper.add_task(fails)
    keeper.add_task(works)
    task = asyncio.ensure_future(keeper.run(0.001))
    await until(lambda: len(done) >= 2 or task.done())
    assert not task.done()
    task.cancel()


async def test_publish_message_reports_the_outcome_of_its_own_queues_only(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: a refusal by another queue was reported to the publisher."""
    good, bad = await declare(host, "good"), await declare(host, "bad")
    monkeypatch.setattr(bad.view.log, "append", refuse)
    say(bad, b"x")
    assert await publish_message(host, broker.pressure, Message("", "good", b"\0\0", b"1"), ["good"]) == 1
    with pytest.raises(StorageError):
        await publish_message(host, broker.pressure, Message("", "bad", b"\0\0", b"1"), ["bad"])
    assert bodies(good) == [b"1"]


async def beside_a_refusal(host: VirtualHost, monkeypatch: pytest.MonkeyPatch, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` while a flush is running in which the log of another queue refuses its batch."""
    bad = await declare(host, "bad")
    monkeypatch.setattr(bad.view.log, "append", refuse)
    with monkeypatch.context() as held:
        held.setattr(host.flushes, "flush", lambda: None)
        say(bad, b"x")
        task = asyncio.ensure_future(work)
        await until(lambda: host.flushes._waiters)
    host.flushes.flush()
    return await task


async def test_a_clean_stop_saves_exact_positions_even_if_a_queue_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        good = await declare(host, "good")
        say(good, b"1")
        await host.flushes.wait_all_durable()
        await good.prepare_get()  # reserved, and not handed out
        await beside_a_refusal(host, monkeypatch, broker.close())
    async with opened(tmp_path) as broker:
        taken = broker.vhosts.get("/").queue("good").get()
        assert taken is not None
        assert (taken[2].body, taken[3]) == (b"1", False)


async def test_a_replay_can_be_stopped_while_another_queue_refuses(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = await declare(host, "dead")
    await declare(host, "back")
    say(dead, *[b"x"] * 10)
    await host.flushes.wait_all_durable()
    replay = await broker.dead_letters.replay(dead, Selection(), replay_id="r", to="back", rate=0.01)
    await until(lambda: replay.moved == 1)
    await beside_a_refusal(host, monkeypatch, broker.dead_letters.stop("r"))
    assert replay.state == "stopped"


async def test_a_queue_that_expires_while_the_broker_stops_is_left_to_the_next_start(tmp_path: Path) -> None:
    """Regression: the deletion started after the threads had stopped, and logged a traceback."""
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        queue = await declare(host, "expiring", x_expires=60_000)
        await host.close()  # as the broker does it, before it stores the rest
        assert host._delete_unused(queue) is None
    async with opened(tmp_path) as broker:
        assert "expiring" in broker.vhosts.get("/").queues


async def test_the_messages_of_a_flush_are_freed_without_a_garbage_collection(host: VirtualHost) -> None:
    """A reference cycle kept them until the next collection, which the broker runs rarely: memory grew by 100 MB."""
    queue = await declare(host, "q")
    gc.collect()
    gc.disable()
    try:
        say(queue, b"x" * 1000)
        await host.flushes.wait_flushed()
        await asyncio.sleep(0)
        assert [one for one in gc.get_objects() if isinstance(one, PublishBatch)] == []
    finally:
        gc.enable()
