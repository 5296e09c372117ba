"""The delivery count survives kills, so that a message that is requeued repeatedly reaches the dead-letter queue."""

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest

from tests.crash.broker_process import HttpBroker

LIMIT = 2
PATIENCE_S = 60.0


class Killable:
    def __init__(self, folder: Path) -> None:
        self.process = HttpBroker(folder, amqp=True).start()

    def channel(self) -> pika.adapters.blocking_connection.BlockingChannel:
        self.connection = pika.BlockingConnection(
            pika.ConnectionParameters("127.0.0.1", self.process.amqp_port, socket_timeout=60, stack_timeout=60)
        )
        channel = self.connection.channel()
        channel.confirm_delivery()
        return channel

    def kill_and_start(self) -> None:
        self.process.kill()
        self.disconnect()
        self.process.start()

    def disconnect(self) -> None:
        with contextlib.suppress(pika.exceptions.AMQPError):  # the broker is dead
            self.connection.close()


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Killable]:
    broker = Killable(tmp_path)
    yield broker
    broker.disconnect()
    broker.process.close()


def get(channel: pika.adapters.blocking_connection.BlockingChannel, queue: str) -> tuple[Any, Any, bytes]:
    deadline = time.monotonic() + PATIENCE_S
    while True:
        method, properties, body = channel.basic_get(queue)
        if method is not None:
            return method, properties, body
        assert time.monotonic() < deadline, f"no message in {queue}"
        time.sleep(0.02)


def test_a_poison_message_is_dead_lettered_although_the_broker_is_killed_after_each_requeue(
    broker: Killable,
) -> None:
    channel = broker.channel()
    for name in ("dead", "other"):
        channel.queue_declare(name, durable=True)
    arguments = {"x-queue-type": "quorum", "x-delivery-limit": LIMIT, "x-dead-letter-exchange": "",
                 "x-dead-letter-routing-key": "dead"}  # fmt: skip
    channel.queue_declare("work", durable=True, arguments=arguments)
    channel.basic_publish("", "work", b"fine before")
    channel.basic_publish("", "work", b"poison")
    channel.basic_publish("", "work", b"fine after")
    method, _, body = get(channel, "work")
    assert body == b"fine before"
    channel.basic_ack(method.delivery_tag)
    for returned in range(LIMIT + 1):
        method, properties, body = get(channel, "work")
        assert body == b"poison"
        assert (properties.headers or {}).get("x-delivery-count", 0) == returned
        channel.basic_nack(method.delivery_tag, requeue=True)
        channel.basic_publish("", "other", b"")  # its confirm proves that the nack is in the journal
        broker.kill_and_start()
        channel = broker.channel()
    _, properties, body = get(channel, "dead")
    assert body == b"poison"
    assert properties.headers["x-first-death-reason"] == "delivery_limit"
    method, properties, body = get(channel, "work")
    assert (body, (properties.headers or {}).get("x-delivery-count")) == (b"fine after", None)


def test_after_a_kill_only_requeued_messages_have_a_delivery_count(broker: Killable) -> None:
    channel = broker.channel()
    for name, kind in (("work", "quorum"), ("other", "classic")):
        channel.queue_declare(name, durable=True, arguments={"x-queue-type": kind})
    for body in (b"held", b"returned", b"new"):
        channel.basic_publish("", "work", body)
    get(channel, "work")
    method, _, _ = get(channel, "work")
    channel.basic_nack(method.delivery_tag, requeue=True)
    channel.basic_publish("", "other", b"")
    broker.kill_and_start()
    channel = broker.channel()
    got = []
    for method, properties, body in channel.consume("work", inactivity_timeout=PATIENCE_S):
        got.append((body, (properties.headers or {}).get("x-delivery-count"), method.redelivered))
        if len(got) == 3:
            break
    channel.cancel()
    assert got[:2] == [(b"held", None, True), (b"returned", 1, True)]
    assert got[2][:2] == (b"new", None)
