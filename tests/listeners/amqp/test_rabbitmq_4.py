"""Behaviour that follows RabbitMQ 4: headers that the broker sets, stream filters, and refused arguments."""

from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.compat import long  # pika decodes AMQP's 64-bit integers to it, and 32-bit ones to int
from pika.exceptions import ChannelClosedByBroker, ConnectionClosedByBroker

from tests.listeners.amqp.running import Running, take


def reject_and_take(channel: BlockingChannel, name: str, dead: str) -> dict[str, Any]:
    """The headers of the dead letter of the queue's first message."""
    channel.basic_reject(take(channel, name)[0].delivery_tag, requeue=False)
    method, properties, _ = take(channel, dead)
    channel.basic_ack(method.delivery_tag)
    headers: dict[str, Any] = properties.headers
    return headers


@pytest.fixture
def dead(channel: BlockingChannel, name: str) -> str:
    """The queue of the dead letters of queue `name`."""
    channel.queue_declare(name + ".dead", durable=True)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": name + ".dead"}
    channel.queue_declare(name, durable=True, arguments=arguments)
    return name + ".dead"


def test_the_count_of_deaths_has_64_bits(channel: BlockingChannel, name: str, dead: str) -> None:
    """Java casts it to Long."""
    channel.basic_publish("", name, b"x")
    assert type(reject_and_take(channel, name, dead)["x-death"][0]["count"]) is long


def test_the_delivery_count_has_64_bits(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
    channel.basic_publish("", name, b"x")
    channel.basic_nack(take(channel, name)[0].delivery_tag, requeue=True)
    assert type(take(channel, name)[1].headers["x-delivery-count"]) is long


def test_deaths_that_a_publisher_claims_do_not_count(channel: BlockingChannel, name: str, dead: str) -> None:
    claimed = [{"queue": name, "reason": "rejected", "count": 41, "exchange": "", "routing-keys": [name]}]
    headers = {"x-death": claimed, "x-first-death-queue": "elsewhere", "mine": 1}
    channel.basic_publish("", name, b"x", pika.BasicProperties(headers=headers))
    method, properties, _ = take(channel, name)
    assert properties.headers["x-death"][0]["count"] == 41, "delivered as it was sent"
    channel.basic_nack(method.delivery_tag, requeue=True)
    found = reject_and_take(channel, name, dead)
    assert [(death["queue"], death["count"]) for death in found["x-death"]] == [(name, 1)]
    assert (found["x-first-death-queue"], found["mine"]) == (name, 1)


def test_a_claimed_death_does_not_make_a_dead_letter_look_like_a_cycle(channel: BlockingChannel, name: str) -> None:
    """Otherwise a publisher could have its message dropped where the operator expects a dead letter."""
    dead = name + ".dead"
    channel.queue_declare(dead, durable=True)
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead, "x-message-ttl": 1}
    channel.queue_declare(name, durable=True, arguments=arguments)
    claimed = [{"queue": dead, "reason": "expired", "count": 1, "exchange": "", "routing-keys": [dead]}]
    channel.basic_publish("", name, b"x", pika.BasicProperties(headers={"x-death": claimed}))
    assert take(channel, dead)[2] == b"x"


def test_cc_stays_in_a_dead_letter_and_is_not_routed_again(channel: BlockingChannel, name: str, dead: str) -> None:
    channel.queue_declare(name + ".copy", durable=True)
    channel.basic_publish("", name, b"x", pika.BasicProperties(headers={"CC": [name + ".copy"]}))
    channel.queue_purge(name + ".copy")
    found = reject_and_take(channel, name, dead)
    assert found["CC"] == [name + ".copy"] and found["x-death"][0]["routing-keys"] == [name, name + ".copy"]
    assert channel.queue_declare(name + ".copy", durable=True, passive=True).method.message_count == 0


@pytest.fixture
def colours(running: Running, name: str) -> str:
    """A stream with messages that have a filter value, and one without."""
    channel = running.channel()
    channel.confirm_delivery()
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
    for value in ("red", "green", None, "blue", "red"):
        headers = {} if value is None else {"x-stream-filter-value": value}
        channel.basic_publish("", name, str(value).encode(), pika.BasicProperties(headers=headers))
    return name


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"x-stream-filter": "red"}, [b"red", b"red"]),
        ({"x-stream-filter": ["red", "blue"]}, [b"red", b"blue", b"red"]),
        ({"x-stream-filter": "blue", "x-stream-match-unfiltered": True}, [b"None", b"blue"]),
        ({"x-stream-filter": []}, [b"red", b"green", b"None", b"blue", b"red"]),
    ],
)
def test_a_stream_consumer_receives_only_the_values_of_its_filter(
    running: Running, colours: str, arguments: dict[str, Any], expected: list[bytes]
) -> None:
    channel = running.channel()
    channel.basic_qos(prefetch_count=10)
    got: list[tuple[bytes, Any]] = []

    def on_message(_channel: Any, method: Any, properties: pika.BasicProperties, body: bytes) -> None:
        assert properties.headers is not None
        got.append((body, properties.headers["x-stream-offset"]))
        channel.basic_ack(method.delivery_tag)

    channel.basic_consume(colours, on_message, arguments={"x-stream-offset": "first", **arguments})
    last = running.channel()
    last.confirm_delivery()
    for value in ("red", "blue"):  # each filter lets one of them through
        last.basic_publish("", colours, b"end", pika.BasicProperties(headers={"x-stream-filter-value": value}))
    while b"end" not in [body for body, _ in got]:
        channel.connection.process_data_events(time_limit=1)
    assert [body for body, _ in got if body != b"end"] == expected
    assert all(type(offset) is long for _, offset in got)


def test_a_stream_refuses_automatic_acknowledgement(running: Running, colours: str) -> None:
    channel = running.channel()
    channel.basic_qos(prefetch_count=10)
    with pytest.raises(ConnectionClosedByBroker, match="automatic acknowledgement not supported by stream") as refusal:
        channel.basic_consume(colours, lambda *_: None, auto_ack=True)
    assert refusal.value.reply_code == 540


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"x-delivery-limit": 3}, "invalid arg 'x-delivery-limit' for queue"),
        ({"x-queue-type": "quorum", "x-queue-leader-locator": "nowhere"}, "invalid_queue_locator_arg"),
    ],
)
def test_arguments_that_rabbitmq_refuses_are_refused(
    channel: BlockingChannel, name: str, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ChannelClosedByBroker, match=text) as refusal:
        channel.queue_declare(name, durable=True, arguments=arguments)
    assert refusal.value.reply_code == 406
