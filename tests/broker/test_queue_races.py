"""Queues, exchanges and bindings that change while somebody waits for the disk, and failures that must stay alone."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.broker.broker import Broker
from headrace.broker.dead_letters import death_of
from headrace.broker.delays import DUE_HEADER
from headrace.broker.exchanges import DELAYED
from headrace.broker.history import History
from headrace.broker.message import Message
from headrace.broker.posting import post
from headrace.broker.queue import Queue
from headrace.broker.vhost import VirtualHost
from headrace.errors import ArgumentMismatch, Conflict, InUse, NotFound, StorageError
from headrace.record.properties import edit
from tests.broker.queue_world import Refusing, bodies, declare, declare_exchange, opened, pass_time, refuse, say, until


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    async with opened(tmp_path) as made:
        yield made


@pytest.fixture
def host(broker: Broker) -> VirtualHost:
    return broker.vhosts.get("/")


# Rounds.


async def test_what_fails_for_one_queue_after_a_round_keeps_no_answer_from_others(
    host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = await declare(host, "damaged", x_message_ttl=60_000)
    say(damaged, b"1")
    await host.rounds.settle_down()
    monkeypatch.setattr(damaged.view.log, "read", refuse)
    monkeypatch.setattr(damaged.view.log, "read_now", refuse)
    damaged.view.release_chunk()
    say(damaged, b"2")
    async with asyncio.timeout(60):
        await host.rounds.settle_down()


async def test_what_fails_for_one_queue_in_memory_keeps_no_turn_from_others(
    host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad, good = await declare(host, "bad", durable=False), await declare(host, "good", durable=False)
    with monkeypatch.context() as patched:
        patched.setattr(bad.view.log, "append", refuse)
        say(bad, b"lost")
        say(good, b"1")
        host.rounds.flush_memory()
    say(bad, b"2")
    say(good, b"2")
    await host.rounds.settle_down()
    assert (bodies(bad), bodies(good)) == ([b"2"], [b"1", b"2"])


async def test_a_dead_letter_whose_key_is_no_utf8_moves_with_its_key(host: VirtualHost) -> None:
    """It could not be written into x-death, and other queues in memory stopped with it."""
    dead = await declare(host, "dead", durable=False)
    moving = {"x_dead_letter_exchange": "", "x_dead_letter_routing_key": "dead"}
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
async def test_a_dead_letter_moves_whatever_its_publisher_put_into_the_headers_of_its_history(
    host: VirtualHost, forged: dict[str, Any]
) -> None:
    dead = await declare(host, "dead", durable=False)
    queue = await declare(host, "q", durable=False, x_dead_letter_exchange="amq.fanout")
    await host.bind("amq.fanout", dead, "", {})
    queue.publish(Message("", "q", edit(b"\0\0", headers=forged), b"1"), host.clock.now_ms())
    await host.rounds.settle_down()
    taken = queue.get()
    assert taken is not None
    queue.reject(taken[0], taken[1])
    await until(lambda: dead.ready)


@pytest.mark.parametrize("atomic", [False, True])
async def test_what_comes_for_a_deleted_queue_is_no_error_of_others(host: VirtualHost, atomic: bool) -> None:
    """A publish in two pieces of which the second came after the deletion: everybody in that flush was told 541."""
    doomed, good = await declare(host, "doomed"), await declare(host, "good")
    await host.delete_queue("doomed")
    assert doomed.view.log.is_deleted
    if atomic:
        host.rounds.begin_atomic()
    say(doomed, b"late")
    say(good, b"1")
    if atomic:
        host.rounds.end_atomic()
    await host.rounds.settle_down()
    assert bodies(good) == [b"1"]
    assert doomed.view.pending == 0


async def test_a_flush_is_not_answered_before_those_that_began_earlier(
    host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A confirm speaks for all before it: what an earlier flush was still storing was confirmed with the later one."""
    monkeypatch.setattr("headrace.broker.rounds.HELD_BYTES_MAX", 0)
    doomed, good = await declare(host, "doomed"), await declare(host, "good")
    await host.delete_queue("doomed")
    told: list[tuple[str, int]] = []
    for queue in (good, doomed):
        say(queue, b"1")
        host.rounds.after(lambda _, name=queue.name: told.append((name, good.ready)))
        host.rounds.flush()  # of the second nothing is left to be stored
    await host.rounds.settle_down()
    assert told == [("good", 1), ("doomed", 1)]


async def test_a_reservation_that_was_stored_is_known_although_another_queue_of_its_round_was_refused(
    host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue, other = await declare(host, "q"), await declare(host, "other")
    say(queue, b"1")
    await host.rounds.settle_down()
    monkeypatch.setattr(other.view.log, "append", refuse)
    host.rounds.begin_atomic()
    say(queue, b"2")
    host.rounds.end_atomic()
    say(other, b"lost")
    async with asyncio.timeout(60):
        await queue.prepare_get()
    assert bodies(queue) == [b"1", b"2"]


async def test_settles_that_the_disk_refuses_are_not_tried_again_at_once(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It took all of a core for as long as the disk was full."""
    queue = await declare(host, "q")
    say(queue, b"1")
    await host.rounds.settle_down()
    taken = queue.get()
    assert taken is not None
    await host.rounds.settles_stored()
    monkeypatch.setattr("headrace.broker.rounds.RETRY_S", 3600)
    refusing = Refusing(lambda: queue.unacked)
    with monkeypatch.context() as patched:
        patched.setattr(broker.shard, "group", refusing)
        queue.settle(taken[0], taken[1], taken[1] + 1)
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(refusing.times) == 1
        say(queue, b"2")  # what comes meanwhile does not wait for that
        await host.rounds.settle_down()
        for _ in range(20):
            await asyncio.sleep(0)
        assert len(refusing.times) == 2
    await host.rounds.settles_stored()


# Deleting and declaring.


async def test_a_queue_that_must_be_empty_is_not_deleted_with_what_came_while_the_deletion_waited(
    host: VirtualHost,
) -> None:
    queue = await declare(host, "q")
    async with host._changing:
        deletion = asyncio.ensure_future(host.delete_queue("q", if_empty=True))
        await asyncio.sleep(0)
        assert say(queue, b"confirmed") == [True]
        await host.rounds.settle_down()
    with pytest.raises(InUse):
        await deletion
    assert bodies(queue) == [b"confirmed"]


async def test_a_queue_that_must_be_empty_stays_when_something_comes_while_the_catalog_is_written(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await declare(host, "q")
    remove = host.store.remove_queue

    async def slow(vhost: str, gone: Queue) -> None:
        await remove(vhost, gone)
        assert say(queue, b"confirmed") == [True]
        await host.rounds.settle_down()

    monkeypatch.setattr(host.store, "remove_queue", slow)
    with pytest.raises(InUse):
        await host.delete_queue("q", if_empty=True)
    await broker.close()
    again = await Broker.open(broker.config)
    assert bodies(again.vhosts.get("/").queues["q"]) == [b"confirmed"]
    await again.close()


async def test_an_exchange_that_must_be_unused_stays_when_it_was_bound_while_the_deletion_waited(
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


async def test_two_who_declare_different_exchanges_of_one_name_are_not_both_told_that_it_is_theirs(
    host: VirtualHost,
) -> None:
    told = await asyncio.gather(
        declare_exchange(host, "x", "direct"), declare_exchange(host, "x", "fanout"), return_exceptions=True
    )
    assert [type(one) for one in told if isinstance(one, Exception)] == [ArgumentMismatch]


async def test_a_queue_in_memory_does_not_take_the_name_of_one_that_is_being_stored(host: VirtualHost) -> None:
    told = await asyncio.gather(declare(host, "q"), declare(host, "q", durable=False), return_exceptions=True)
    assert [type(one) for one in told if isinstance(one, Exception)] == [ArgumentMismatch]


async def test_an_exchange_in_memory_does_not_take_the_name_of_one_that_is_being_stored(host: VirtualHost) -> None:
    told = await asyncio.gather(
        declare_exchange(host, "x"), declare_exchange(host, "x", durable=False), return_exceptions=True
    )
    assert [type(one) for one in told if isinstance(one, Exception)] == [ArgumentMismatch]


async def test_a_delayed_exchange_that_is_declared_again_at_once_keeps_what_it_delays(
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
    assert host.delays.delay(exchange, Message("x", "q", properties, b"later"), broker.clock.now_ms())
    await host.rounds.settle_down()
    await until(lambda: host.delays.waiting("x") == 1)


async def test_a_deleted_virtual_host_does_not_come_back_with_its_exchanges(broker: Broker) -> None:
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


async def test_a_binding_that_could_not_be_stored_is_stored_when_it_is_asked_for_again(
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


async def test_a_binding_that_is_removed_while_it_is_being_stored_does_not_come_back(
    broker: Broker, host: VirtualHost
) -> None:
    queue = await declare(host, "q")
    binding = asyncio.ensure_future(host.bind("amq.direct", queue, "key", {}))
    await asyncio.sleep(0)
    await host.unbind("amq.direct", queue, "key", {})
    await binding
    again, keys = await restarted(broker)
    assert keys == []
    await again.close()


async def test_a_binding_to_a_deleted_exchange_does_not_come_back_with_the_next_of_that_name(
    broker: Broker, host: VirtualHost
) -> None:
    exchange = await declare_exchange(host, "x")
    await host.bind("amq.direct", exchange, "key", {})
    await host.delete_exchange("x")
    await declare_exchange(host, "x")
    await declare(host, "q")
    again, _ = await restarted(broker)
    routing = again.vhosts.get("/").routing
    assert routing.bindings_to(routing.exchanges["x"]) == []
    await again.close()


async def test_unbinding_is_answered_when_the_disk_has_it(host: VirtualHost) -> None:
    queue = await declare(host, "q")
    await host.bind("amq.direct", queue, "key", {})
    state = host.store._shard.state
    assert len(list(state.items("bindings"))) == 1
    await host.unbind("amq.direct", queue, "key", {})
    assert list(state.items("bindings")) == []


# Delays.


async def delayed(host: VirtualHost, *texts: bytes) -> Queue:
    exchange = await declare_exchange(host, "x", DELAYED, arguments={"x-delayed-type": "fanout"})
    queue = await declare(host, "q")
    await host.bind("x", queue, "", {})
    for body in texts:
        properties = edit(b"\0\0", headers={"x-delay": 50})
        assert host.delays.delay(exchange, Message("x", "", properties, body), host.clock.now_ms())
    await host.rounds.settle_down()
    await until(lambda: host.delays.waiting("x") == len(texts))
    return queue


async def test_a_dead_letter_for_a_delayed_exchange_waits_there_once(broker: Broker, host: VirtualHost) -> None:
    """It was routed at once, and went round as fast as its consumer could reject it."""
    await declare_exchange(host, "x", DELAYED, arguments={"x-delayed-type": "fanout"})
    queue = await declare(host, "q", x_dead_letter_exchange="x")
    await host.bind("x", queue, "", {})
    queue.publish(Message("", "q", edit(b"\0\0", headers={"x-delay": 50}), b"again"), host.clock.now_ms())

    async def rejected() -> Any:
        await until(lambda: queue.ready == 1)
        taken = queue.get()
        assert taken is not None
        queue.reject(taken[0], taken[1])
        await host.rounds.settle_down()
        return taken[2].headers().get("x-delay")

    assert await rejected() == 50
    await until(lambda: host.delays.waiting("x") == 1)
    assert queue.ready == 0
    pass_time(broker)
    assert await rejected() == -50
    assert await rejected() == -50, "it has waited"
    assert host.delays.waiting("x") == 0


async def test_whatever_the_clock_does_what_is_due_is_looked_for_within_a_minute(
    broker: Broker, host: VirtualHost
) -> None:
    """Timers of the loop stand still while the machine sleeps, and know nothing of a clock that is set."""
    exchange = await declare_exchange(host, "x", DELAYED, arguments={"x-delayed-type": "fanout"})
    properties = edit(b"\0\0", headers={"x-delay": 50 * 60_000})
    assert host.delays.delay(exchange, Message("x", "", properties, b"later"), host.clock.now_ms())
    mortal = await declare(host, "q", x_message_ttl=50 * 60_000)
    say(mortal, b"old")
    await host.rounds.settle_down()
    log = host.delays._logs["x"]
    await until(lambda: log._timer is not None and mortal._timer is not None)
    assert max(log._timer_at, mortal._timer_at) <= asyncio.get_running_loop().time() + 61


async def test_a_delayed_message_that_found_no_room_when_it_was_due_comes_later(
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


async def test_a_delayed_message_that_cannot_be_read_does_not_hold_back_the_others(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await delayed(host, b"1", b"2", b"3")
    log = host.delays._logs["x"]
    chunk = log.view.chunk

    def damaged(run: Any) -> Any:
        return refuse() if run.start == 0 else chunk(run)

    monkeypatch.setattr(log.view, "chunk", damaged)
    pass_time(broker)
    await until(lambda: queue.ready == 2)
    assert bodies(queue) == [b"2", b"3"]


async def test_a_delayed_message_that_was_deleted_is_not_tried_for_ever(
    broker: Broker, host: VirtualHost, caplog: pytest.LogCaptureFixture
) -> None:
    queue = await delayed(host, b"1", b"2")
    await broker.shard.maintenance.delete_before(host.delays._logs["x"].view.log, 1)
    pass_time(broker)
    await until(lambda: queue.ready == 1)
    assert bodies(queue) == [b"2"]
    assert (host.delays.waiting("x"), caplog.messages) == (0, [])


async def test_a_delayed_message_with_a_strange_cc_does_not_hold_back_the_others(
    broker: Broker, host: VirtualHost
) -> None:
    """As an earlier version kept it, which took anything for CC."""
    queue = await delayed(host, b"1")
    strange = Message("x", "", edit(b"\0\0", headers={"CC": 5}), b"0")
    log = host.delays._logs["x"]
    log.view.open_writer().append(b"", strange.body, (*strange.record_headers(), (DUE_HEADER, bytes(8))), 0)
    await host.rounds.settle_down()
    log.index_new()
    pass_time(broker)
    await until(lambda: queue.ready == 2)
    assert bodies(queue) == [b"0", b"1"]


# Deleted vhosts.


async def leaving(broker: Broker) -> tuple[VirtualHost, "asyncio.Task[None]"]:
    """A vhost whose deletion is under way, and waits for one of its queues."""
    host = await broker.vhosts.create("v")
    await declare(host, "q")
    await host._changing.acquire()
    deletion = asyncio.create_task(broker.vhosts.delete("v"))
    await asyncio.sleep(0)
    return host, deletion


async def test_what_is_declared_in_a_vhost_that_is_being_deleted_does_not_bring_it_back(tmp_path: Path) -> None:
    async with opened(tmp_path) as broker:
        host, deletion = await leaving(broker)
        late = [asyncio.create_task(declare(host, "late")), asyncio.create_task(declare_exchange(host, "late"))]
        await asyncio.sleep(0)
        host._changing.release()
        await deletion
        assert all(isinstance(error, NotFound) for error in await asyncio.gather(*late, return_exceptions=True))
    async with opened(tmp_path) as broker:
        assert [host.name for host in broker.vhosts] == ["/"]


async def test_a_vhost_that_is_made_while_it_is_being_deleted_is_a_new_one(broker: Broker) -> None:
    host, deletion = await leaving(broker)
    again = asyncio.create_task(broker.vhosts.create("v"))
    await asyncio.sleep(0)
    host._changing.release()
    await deletion
    made = await again
    assert made is broker.vhosts.get("v") and made is not host and not made.queues


async def test_bindings_that_a_kill_left_behind_do_not_bring_their_vhost_back(
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


async def test_a_deletion_that_is_cut_off_brings_nothing_back_that_was_settled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        queue = await declare(host, "q")
        say(queue, b"done", b"open")
        await host.rounds.settle_down()
        taken = queue.get()
        assert taken is not None
        queue.settle(taken[0], taken[1], taken[1] + 1)
        monkeypatch.setattr(broker.streams, "delete", refuse)  # the broker is killed here
        with pytest.raises(StorageError):
            await host.delete_queue("q")
    async with opened(tmp_path) as broker:
        assert bodies(await declare(broker.vhosts.get("/"), "q")) == [b"open"]


async def test_a_queue_goes_with_its_stream_that_somebody_deletes_as_a_topic(tmp_path: Path) -> None:
    """Kafka and HTTP can do that. The queue stayed: what was published to it was confirmed, and nowhere."""
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        await host.bind("amq.direct", await declare(host, "q"), "key", {})
        await declare(host, "after")
        await broker.streams.delete("q")
        assert await post(host, Message("", "q", b"\0\0", b"nowhere"), ["q"]) == 0
        with pytest.raises(NotFound):
            host.queue("q")
    async with opened(tmp_path) as broker:
        host = broker.vhosts.get("/")
        assert list(host.queues) == ["after"] and not host.routing.exchange("amq.direct").bindings
        queue = await declare(host, "q")
        assert await post(host, Message("", "q", b"\0\0", b"new"), ["q"]) == 1
        assert bodies(queue) == [b"new"]


@pytest.mark.parametrize("on_it", [None, "classic"])
async def test_a_topic_that_is_made_again_gets_what_is_published_over_amqp(
    broker: Broker, host: VirtualHost, on_it: str | None
) -> None:
    message = Message("", "t", b"\0\0", b"x")
    for _ in range(2):
        topic = await broker.streams.create("t")
        if on_it is not None:
            await declare(host, "t", x_queue_type=on_it)
        assert await post(host, message, ["t"]) == 1
        assert topic.partitions[0].end_offset == 1
        await broker.streams.delete("t")


async def test_the_stream_of_delayed_messages_goes_with_its_exchange_only(broker: Broker, host: VirtualHost) -> None:
    queue = await delayed(host, b"1")
    with pytest.raises(Conflict):
        await broker.streams.delete("amq.delayed.x")
    pass_time(broker)
    await until(lambda: queue.ready == 1)
    await host.delete_exchange("x")
    assert broker.streams.find("amq.delayed.x") is None


@pytest.mark.parametrize("made", ["queue", "priorities", "stream", "queue on a topic"])
async def test_a_queue_gets_no_partitions_that_it_does_not_read(broker: Broker, host: VirtualHost, made: str) -> None:
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


async def test_a_queue_that_is_deleted_makes_room_on_a_full_disk(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await declare(host, "q")
    say(queue, b"large")
    await host.rounds.settle_down()
    full = SimpleNamespace(group=lambda: SimpleNamespace(delete=lambda *_: None, commit=refuse))
    monkeypatch.setattr(host.store, "_shard", full)
    await host.delete_queue("q")
    assert broker.streams.find("q") is None and queue.view.log.is_deleted


async def test_settling_what_a_deleted_queue_had_out_leaves_no_trace_and_fails_nobody(
    broker: Broker, host: VirtualHost
) -> None:
    dead = await declare(host, "dead")
    queue = await declare(host, "q", x_dead_letter_exchange="", x_dead_letter_routing_key="dead")
    say(queue, b"1", b"2")
    await host.rounds.settle_down()
    first, second = queue.get(), queue.get()
    assert first is not None and second is not None
    await host.delete_queue("q")
    queue.reject(first[0], first[1])
    queue.settle(second[0], second[1], second[1] + 1)
    await host.rounds.settle_down()
    await asyncio.sleep(0.05)
    assert dead.ready == 0
    keys = {key for key, _ in broker.shard.state.items("settle")}
    assert queue.view.key not in keys


async def test_a_get_that_waited_while_its_queue_was_deleted_hands_nothing_out(host: VirtualHost) -> None:
    queue = await declare(host, "q")
    say(queue, b"1")
    await host.rounds.settle_down()
    assert queue.ready == 1
    waiting = asyncio.ensure_future(queue.prepare_get())
    await asyncio.sleep(0)
    await host.delete_queue("q")
    await waiting
    assert queue.get() is None


# Background work.


async def test_a_damaged_queue_does_not_keep_the_disk_space_of_those_behind_it(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged, other = await declare(host, "damaged"), await declare(host, "other")
    looked = []
    look = broker.reclaim._look_after

    async def look_after(view: Any, retain: Any) -> None:
        looked.append(view)
        await (refuse() if view is damaged.view else look(view, retain))

    monkeypatch.setattr(broker.reclaim, "_look_after", look_after)
    with pytest.raises(StorageError):
        await broker.reclaim.once()
    assert looked == [damaged.view, other.view]


async def test_the_numbers_of_the_broker_go_on_when_one_queue_cannot_be_counted(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await declare(host, "q")
    broker._watch.cancel()  # its own
    monkeypatch.setattr("headrace.broker.history.INTERVAL_S", 0.001)
    monkeypatch.setattr("headrace.broker.history.QUEUES_PER_SECOND", 1e12)
    history = History(broker)
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
    said = [record for record in caplog.records if "numbers" in record.message]
    assert len(said) == 1, "not once a second"
    task.cancel()


async def test_housekeeping_goes_on_when_a_chore_fails_whatever_it_says(broker: Broker) -> None:
    done = []

    async def fails() -> None:
        raise OSError(5, "Input/output error")

    async def works() -> None:
        done.append(True)

    keeper = broker.housekeeping
    keeper.also(fails)
    keeper.also(works)
    task = asyncio.ensure_future(keeper.run(0.001))
    await until(lambda: len(done) >= 2 or task.done())
    assert not task.done()
    task.cancel()
