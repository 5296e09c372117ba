"""Exchanges and bindings, tested through a client."""

from collections.abc import Callable
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from tests.listeners.amqp.running import Running, bodies, eventually


@pytest.mark.parametrize("durable", [True, False])
def test_a_topic_exchange_routes_to_the_queues_with_a_matching_pattern(
    channel: BlockingChannel, name: str, durable: bool
) -> None:
    channel.exchange_declare(name, "topic", durable=durable)
    for queue, pattern in [("all", "#"), ("one", "a.*"), ("exact", "a.b.c")]:
        channel.queue_declare(name + queue, durable=durable)
        channel.queue_bind(name + queue, name, pattern)
    for key in ["a.b", "a.b.c", "x"]:
        channel.basic_publish(name, key, key.encode())
    assert bodies(channel, name + "all") == [b"a.b", b"a.b.c", b"x"]
    assert bodies(channel, name + "one") == [b"a.b"]
    assert bodies(channel, name + "exact") == [b"a.b.c"]


def test_a_headers_exchange_routes_by_the_headers_of_the_message(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "headers")
    channel.queue_declare(name + "any")
    channel.queue_declare(name + "all")
    channel.queue_bind(name + "any", name, "", {"x-match": "any", "a": 1, "b": 2})
    channel.queue_bind(name + "all", name, "", {"x-match": "all", "a": 1, "b": 2})
    for headers in [{"a": 1}, {"a": 1, "b": 2}, {"c": 3}]:
        channel.basic_publish(name, "", str(sorted(headers)).encode(), pika.BasicProperties(headers=headers))
    assert bodies(channel, name + "any") == [b"['a']", b"['a', 'b']"]
    assert bodies(channel, name + "all") == [b"['a', 'b']"]


def test_exchange_bindings_route_a_message_once_even_in_a_cycle(channel: BlockingChannel, name: str) -> None:
    for exchange in ("a", "b"):
        channel.exchange_declare(name + exchange, "fanout")
    channel.exchange_bind(name + "b", name + "a")
    channel.exchange_bind(name + "a", name + "b")
    channel.queue_declare(name)
    channel.queue_bind(name, name + "a")
    channel.queue_bind(name, name + "b")
    channel.basic_publish(name + "a", "", b"once")
    assert bodies(channel, name) == [b"once"]
    channel.exchange_unbind(name + "b", name + "a")
    channel.queue_unbind(name, name + "a")
    channel.basic_publish(name + "a", "", b"nowhere")
    assert bodies(channel, name) == []


@pytest.mark.parametrize("gone", ["exchange", "queue"])
def test_unbinding_a_missing_exchange_or_queue_succeeds(channel: BlockingChannel, name: str, gone: str) -> None:
    if gone == "queue":
        channel.exchange_declare(name)
    else:
        channel.queue_declare(name)
    channel.queue_unbind(name, name, "key")
    channel.exchange_unbind(name, "amq.direct", "key")
    channel.exchange_unbind("amq.direct", name, "key")


def test_an_unroutable_message_goes_to_the_alternate_exchange(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name + "other", "fanout")
    channel.exchange_declare(name, "direct", arguments={"alternate-exchange": name + "other"})
    channel.queue_declare(name)
    channel.queue_bind(name, name + "other")
    channel.basic_publish(name, "unknown", b"caught")
    assert bodies(channel, name) == [b"caught"]


def test_a_consistent_hash_exchange_routes_each_key_to_one_queue(channel: BlockingChannel, name: str) -> None:
    channel.exchange_declare(name, "x-consistent-hash")
    for n in range(3):
        channel.queue_declare(f"{name}{n}")
        channel.queue_bind(f"{name}{n}", name, "1")
    for n in range(60):
        channel.basic_publish(name, f"key{n % 20}", f"key{n % 20}".encode())
    found = [bodies(channel, f"{name}{n}") for n in range(3)]
    assert sum(map(len, found)) == 60
    assert not set(found[0]) & set(found[1]) and not set(found[1]) & set(found[2])


@pytest.mark.parametrize(
    ("change", "argument"),
    [({"exchange_type": "fanout"}, "type"), ({"durable": True}, "durable"), ({"auto_delete": True}, "auto_delete")],
)
def test_declaring_an_exchange_with_other_parameters_is_406(
    channel: BlockingChannel, name: str, change: dict[str, Any], argument: str
) -> None:
    channel.exchange_declare(name, "direct")
    with pytest.raises(ChannelClosedByBroker) as caught:
        channel.exchange_declare(name, **{"exchange_type": "direct", **change})
    assert caught.value.reply_code == 406
    assert f"inequivalent arg '{argument}'" in caught.value.reply_text


def test_invalid_operations_on_exchanges_have_the_reply_codes_of_rabbitmq(running: Running, name: str) -> None:
    running.channel().exchange_declare(name, "direct", internal=True)
    running.channel().exchange_declare(name + "used", "direct")
    running.channel().queue_declare(name)
    running.channel().queue_bind(name, name + "used", "k")
    attempts: list[tuple[Callable[[BlockingChannel], object], int]] = [
        (lambda c: c.exchange_declare("amq.mine", "direct"), 403),
        (lambda c: c.exchange_delete("amq.topic"), 403),
        (lambda c: c.queue_bind(name, "", "k"), 403),
        (lambda c: c.queue_bind(name, "nowhere", "k"), 404),
        (lambda c: c.exchange_declare("nowhere", passive=True), 404),
        (lambda c: c.exchange_declare("", passive=True), 403),
        (lambda c: c.exchange_delete(name + "used", if_unused=True), 406),
        (lambda c: (c.basic_publish(name, "k", b"x"), c.queue_declare(name, passive=True)), 403),
        (lambda c: (c.basic_publish("nowhere", "k", b"x"), c.queue_declare(name, passive=True)), 404),
        (lambda c: c.exchange_declare(name + "odd", "x-odd"), 406),
    ]
    for attempt, expected in attempts:
        with pytest.raises(ChannelClosedByBroker) as caught:
            attempt(running.channel())
        assert caught.value.reply_code == expected, caught.value


def test_an_auto_delete_exchange_is_deleted_with_its_last_binding(running: Running, name: str) -> None:
    channel = running.channel()
    channel.exchange_declare(name, "direct", auto_delete=True)
    channel.queue_declare(name)
    channel.queue_bind(name, name, "k")
    channel.queue_unbind(name, name, "k")
    eventually(lambda: running.call(lambda: name not in running.server.broker.vhosts.get("/").routing.exchanges))


def test_a_binding_applies_to_the_next_message_of_the_same_connection(channel: BlockingChannel, name: str) -> None:
    """Routes are cached per key, and a changed binding must invalidate the cache at once."""
    channel.exchange_declare(name, "direct")
    channel.queue_declare(name)
    for n in range(20):
        channel.basic_publish(name, "k", b"lost")
        channel.queue_bind(name, name, "k")
        channel.basic_publish(name, "k", b"%d" % n)
        channel.queue_unbind(name, name, "k")
    assert bodies(channel, name) == [b"%d" % n for n in range(20)]
