"""Retries of rejected messages: their delays, full and deleted queues, and failures of the storage."""

from pathlib import Path
from typing import Any

import pytest

from headrace.broker.broker import Broker
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.queue_arguments import CHECKS, QueueArguments
from headrace.broker.queues.retries import COUNT_HEADER, STORED
from headrace.broker.types.message import Message, from_record
from headrace.broker.vhosts.policies import Policy
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.errors import Conflict
from headrace.record.layout import AMQP_CLIENT_DEATHS_HEADER, AMQP_RETRIES_HEADER
from headrace.record.types import Record
from tests.broker.queue_world import bodies, declare, opened, pass_time, refuse, say, until


async def reject(queue: Queue) -> Any:
    """Reject the next message and return its retry count."""
    await until(lambda: queue.ready)
    await queue.prepare_get()
    taken = queue.get()
    assert taken is not None
    queue.reject(taken[0], taken[1])
    await queue.vhost.flushes.wait_all_durable()
    return taken[2].headers().get(COUNT_HEADER)


@pytest.mark.parametrize(
    ("settings", "delays"),
    [
        ({}, [0, 0, 0]),
        ({"retry_delay_ms": 100}, [100, 100, 100]),
        ({"retry_delay_ms": 100, "retry_backoff": "fixed", "retry_delay_max_ms": 50}, [50, 50, 50]),
        ({"retry_delay_ms": 100, "retry_backoff": "exponential"}, [100, 200, 400]),
        ({"retry_delay_ms": 100, "retry_backoff": "exponential", "retry_delay_max_ms": 250}, [100, 200, 250]),
    ],
)
def test_the_delay_is_fixed_or_doubles_up_to_a_maximum(settings: dict[str, Any], delays: list[int]) -> None:
    policy = QueueArguments(retry_limit=5, **settings)
    assert [policy.retry_delay(attempt) for attempt in (1, 2, 3)] == delays
    assert policy.retry_delay(2**60) < 2**50


async def test_a_message_waits_for_its_delay_and_goes_to_the_end_of_the_queue(
    broker: Broker, host: VirtualHost
) -> None:
    queue = await declare(host, "q", x_retry_limit=2, x_retry_delay=50)
    say(queue, b"1", b"2")
    assert await reject(queue) is None
    await until(lambda: host.delays.waiting(STORED) == 1)
    assert (queue.ready, queue.unacked) == (1, 0)
    pass_time(broker)
    await until(lambda: queue.ready == 2)
    assert (bodies(queue), host.delays.waiting(STORED), queue.dead_lettered) == ([b"2", b"1"], 0, 0)


@pytest.mark.parametrize("durable", [True, False])
async def test_a_later_queue_of_the_same_name_does_not_get_the_messages(
    broker: Broker, host: VirtualHost, durable: bool
) -> None:
    """They may not be meant for its owner."""
    queue = await declare(host, "q", durable=durable, x_retry_limit=2, x_retry_delay=50)
    say(queue, b"old")
    await host.flushes.wait_all_durable()
    await reject(queue)
    log = host.delays.log(STORED if durable else "amq.retry.memory")
    assert log is not None
    await until(lambda: len(log) == 1)
    await host.delete_queue("q")
    queue = await declare(host, "q", durable=durable, x_retry_limit=2)
    pass_time(broker)
    await until(lambda: len(log) == 0)
    await host.flushes.wait_all_durable()
    assert queue.ready == 0


async def test_a_message_waits_longer_while_its_queue_is_full(broker: Broker, host: VirtualHost) -> None:
    bound: dict[str, Any] = {"x_max_length": 1, "x_overflow": "reject-publish"}
    queue = await declare(host, "q", x_retry_limit=1, x_retry_delay=50, **bound)
    say(queue, b"first")
    await reject(queue)
    log = host.delays.log(STORED)
    assert log is not None
    await until(lambda: len(log) == 1)
    due_ms = log._index.next_due()
    say(queue, b"second")
    await host.flushes.wait_all_durable()
    pass_time(broker)
    await until(lambda: log._index.next_due() not in (due_ms, None))
    assert bodies(queue) == [b"second"]
    pass_time(broker)
    await until(lambda: queue.ready == 1)
    assert bodies(queue) == [b"first"]


async def test_a_rejection_that_cannot_be_stored_leaves_the_message_in_its_queue(
    broker: Broker, host: VirtualHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = await declare(host, "q", x_retry_limit=1, x_retry_delay=50)
    say(queue, b"1")
    await until(lambda: queue.ready == 1)
    await queue.prepare_get()
    with monkeypatch.context() as patch:
        patch.setattr("headrace.broker.streams.append.Appender.stage_in", refuse)
        taken = queue.get()
        assert taken is not None
        queue.reject(taken[0], taken[1])
        await until(lambda: queue.ready == 1)
    assert await reject(queue) is None, "it was not retried before"
    await until(lambda: host.delays.waiting(STORED) == 1)


async def test_the_log_of_retries_is_deleted_only_with_its_vhost(broker: Broker) -> None:
    host = await broker.vhosts.create("v")
    definition = {"retry-limit": 1, "retry-delay": 50}
    await broker.policies.put(Policy(vhost="v", name="p", pattern=".*", definition=definition))
    name = "amq.delayed." + STORED
    with pytest.raises(Conflict, match="the retries of queues"):
        await broker.streams.delete(name, "v")
    queue = await declare(host, "q")
    say(queue, b"1")
    await reject(queue)
    await until(lambda: host.delays.waiting(STORED) == 1)
    await broker.vhosts.delete("v")
    assert broker.streams.find(name, "v") is None


async def test_arguments_stored_by_a_version_that_did_not_know_them_are_used_if_they_are_valid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(tmp_path) as broker:
        with monkeypatch.context() as patch:
            patch.delitem(CHECKS, "x-retry-limit")
            for name, limit in (("valid", 1), ("invalid", "many")):
                say(await declare(broker.vhosts.get("/"), name, x_retry_limit=limit), b"1")
    async with opened(tmp_path) as broker:
        queues = broker.vhosts.get("/").queues
        for queue in queues.values():
            await reject(queue)
        await until(lambda: queues["valid"].ready == 1)
        assert await reject(queues["valid"]) == 1
        assert queues["invalid"].ready == 0


def test_the_retry_count_of_a_record_can_have_any_content() -> None:
    """Kafka clients choose the headers of their records."""
    for value in (None, b"", b"\xff" * 100):
        names = ((AMQP_RETRIES_HEADER, value), (AMQP_CLIENT_DEATHS_HEADER, b"")) * 2000
        found = from_record(Record(0, 0, b"k", b"v", names))
        assert found.claims_deaths and 0 <= found.retries < 2**62
    again = Message("e", "k", b"\0\0", b"v", retries=3, claims_deaths=True)
    found = from_record(Record(0, 0, b"k", b"v", again.record_headers()))
    assert (found.retries, found.claims_deaths, found.properties) == (3, True, b"\0\0")
