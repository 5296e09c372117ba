"""Retry policies of queues: rejected messages return after a delay until the limit is reached."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from headrace.broker.queues.retries import STORED
from headrace.config import Address
from tests.listeners.amqp.running import Running, bodies, depth, eventually, take
from tests.listeners.amqp.test_http import call
from tests.listeners.amqp.test_policies import dead_letter_pair

COUNT = "x-retry-count"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    broker = Running(tmp_path_factory.mktemp("data"), http=Address("localhost", 0))
    yield broker
    broker.stop()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Running]:
    broker = Running(tmp_path)
    yield broker
    broker.stop()


def reject_one(channel: BlockingChannel, queue: str) -> Any:
    """Reject the next message and return its properties."""
    method, properties, _ = take(channel, queue)
    channel.basic_reject(method.delivery_tag, requeue=False)
    return properties


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("backoff", ["fixed", "exponential"])
def test_a_rejected_message_is_dead_lettered_after_its_retries(
    channel: BlockingChannel, name: str, backoff: str, durable: bool
) -> None:
    arguments = {"x-retry-limit": 2, "x-retry-delay": 5, "x-retry-backoff": backoff}
    dead = dead_letter_pair(channel, name, arguments, durable=durable)
    channel.basic_publish("", name, b"x", pika.BasicProperties(message_id="7", headers={"own": "kept", COUNT: 99}))
    seen = [reject_one(channel, name) for _ in range(3)]
    assert [properties.headers[COUNT] for properties in seen] == [99, 1, 2], "a publisher's count is not trusted"
    assert all(properties.message_id == "7" and properties.headers["own"] == "kept" for properties in seen)
    _, properties, body = take(channel, dead)
    assert body == b"x" and COUNT not in properties.headers
    [death] = properties.headers["x-death"]
    assert (death["queue"], death["reason"], death["count"], death["exchange"]) == (name, "rejected", 1, "")
    assert depth(channel, name) == 0


def test_without_a_dead_letter_exchange_the_last_rejection_drops_the_message(
    running: Running, channel: BlockingChannel, name: str
) -> None:
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum", "x-retry-limit": 1})
    channel.basic_publish("", name, b"x")
    assert [reject_one(channel, name).headers for _ in range(2)][1][COUNT] == 1
    channel.basic_publish("", name, b"y")
    assert take(channel, name)[2] == b"y"
    assert running.call(lambda: running.queue(name).dead_lettered) == 0


def test_a_dead_letter_starts_with_all_retries_in_the_next_queue(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name + ".second", durable=True, arguments={"x-retry-limit": 1})
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": name + ".second", "x-retry-limit": 1}
    channel.queue_declare(name, durable=True, arguments=arguments)
    channel.basic_publish("", name, b"x")
    for queue in (name, name, name + ".second"):
        reject_one(channel, queue)
    assert take(channel, name + ".second")[1].headers[COUNT] == 1


def test_requeued_and_expired_messages_are_not_retried(channel: BlockingChannel, name: str) -> None:
    dead = dead_letter_pair(channel, name, {"x-retry-limit": 5, "x-retry-delay": 600_000})
    channel.basic_publish("", name, b"x")
    channel.basic_nack(take(channel, name)[0].delivery_tag, requeue=True)
    method, properties, _ = take(channel, name)
    assert method.redelivered and not properties.headers
    channel.basic_ack(method.delivery_tag)
    channel.basic_publish("", name, b"old", pika.BasicProperties(expiration="1"))
    assert take(channel, dead)[2] == b"old"


def test_many_rejected_messages_return_once_each(channel: BlockingChannel, name: str) -> None:
    dead = dead_letter_pair(channel, name, {"x-retry-limit": 1, "x-max-priority": 2})
    published = [b"%03d" % n for n in range(300)]
    for n, body in enumerate(published):
        channel.basic_publish("", name, body, pika.BasicProperties(priority=n % 3))
    for _ in range(2):
        eventually(lambda: depth(channel, name) == len(published))
        for _ in published:
            last, _, _ = channel.basic_get(name)
        channel.basic_nack(last.delivery_tag, multiple=True, requeue=False)
    eventually(lambda: depth(channel, dead) == len(published))
    assert sorted(bodies(channel, dead)) == published


def test_a_rejection_in_a_transaction_is_retried_after_the_commit(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments={"x-retry-limit": 1})
    channel.basic_publish("", name, b"x")
    channel.tx_select()
    reject_one(channel, name)
    assert depth(channel, name) == 0
    channel.tx_commit()
    assert take(channel, name)[1].headers[COUNT] == 1


def test_a_policy_sets_retries_and_arguments_take_precedence(running: Running, channel: BlockingChannel) -> None:
    definition = {"retry-limit": 1, "retry-delay": 1, "retry-backoff": "exponential", "retry-delay-max": 4}
    call(running, "PUT", "/api/policies/%2F/tries", {"pattern": "^tried", "definition": definition})
    dead = dead_letter_pair(channel, "tried")
    dead_letter_pair(channel, "tried.own", {"x-retry-limit": 0})
    for name in ("tried", "tried.own"):
        channel.basic_publish("", name, b"x")
    reject_one(channel, "tried.own")
    assert take(channel, "tried.own.dead")[2] == b"x"
    assert [reject_one(channel, "tried").headers for _ in range(2)][1] == {COUNT: 1}
    assert take(channel, dead)[2] == b"x"
    shown = call(running, "GET", "/api/queues/%2F/tried")
    assert shown["effective_policy_definition"] == definition
    call(running, "DELETE", "/api/policies/%2F/tries")


def test_a_nack_over_http_is_retried(running: Running, channel: BlockingChannel) -> None:
    channel.queue_declare("nacked", durable=True, arguments={"x-retry-limit": 1})
    channel.basic_publish("", "nacked", b"x")
    eventually(lambda: depth(channel, "nacked") == 1)
    [received] = call(running, "POST", "/queues/nacked/receive", {})["messages"]
    call(running, "POST", "/queues/nacked/nack", {"receipts": [received["receipt"]], "requeue": False})
    assert take(channel, "nacked")[1].headers[COUNT] == 1


@pytest.mark.parametrize(
    "arguments",
    [
        {"x-retry-limit": -1},
        {"x-retry-limit": "3"},
        {"x-retry-delay": -1},
        {"x-retry-backoff": "linear"},
        {"x-retry-delay-max": 2**60},
        {"x-queue-type": "stream", "x-retry-limit": 1},
    ],
)
def test_invalid_retry_arguments_are_refused(running: Running, name: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(ChannelClosedByBroker, match="invalid arg 'x-retry"):
        running.channel().queue_declare(name, durable=True, arguments=arguments)


def test_messages_that_wait_for_a_retry_survive_a_restart(fresh: Running) -> None:
    channel = fresh.channel()
    channel.queue_declare("soon", durable=True, arguments={"x-retry-limit": 1, "x-retry-delay": 500})
    channel.queue_declare("late", durable=True, arguments={"x-retry-limit": 1, "x-retry-delay": 600_000})
    channel.confirm_delivery()
    for queue in ("soon", "late"):
        channel.basic_publish("", queue, b"x")
        reject_one(channel, queue)

    def waiting() -> int:
        return fresh.call(lambda: fresh.server.broker.vhosts.get("/").delays.waiting(STORED))

    eventually(lambda: waiting() + depth(channel, "soon") == 2)
    fresh.restart()
    channel = fresh.channel()
    _, properties, body = take(channel, "soon", auto_ack=True)
    assert (body, properties.headers) == (b"x", {COUNT: 1})
    assert (waiting(), depth(channel, "soon"), depth(channel, "late")) == (1, 0, 0)
