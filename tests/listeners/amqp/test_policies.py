"""Queue arguments and delayed exchanges: expiration, length limits, dead-lettering, priorities, delays."""

import time
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from tests.listeners.amqp.running import Running, bodies, depth, eventually, take


def dead_letter_pair(
    channel: BlockingChannel, name: str, arguments: dict[str, Any] | None = None, *, durable: bool = True
) -> str:
    """Declare a queue and a second one for its dead letters; return the name of the second."""
    dead = name + ".dead"
    channel.queue_declare(dead, durable=durable)
    channel.queue_declare(
        name, durable=durable,
        arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": dead, **(arguments or {})},
    )  # fmt: skip
    return dead


@pytest.mark.parametrize("durable", [True, False])
def test_x_message_ttl_expires_messages_without_a_consumer(channel: BlockingChannel, name: str, durable: bool) -> None:
    channel.queue_declare(name, durable=durable, arguments={"x-message-ttl": 30})
    channel.basic_publish("", name, b"x")
    eventually(lambda: depth(channel, name) == 0)


@pytest.mark.parametrize("durable", [True, False])
def test_a_message_with_an_expiration_expires_at_the_head_of_the_queue(
    channel: BlockingChannel, name: str, durable: bool
) -> None:
    channel.queue_declare(name, durable=durable)
    channel.basic_publish("", name, b"short", pika.BasicProperties(expiration="20"))
    channel.basic_publish("", name, b"stays")
    channel.basic_publish("", name, b"behind", pika.BasicProperties(expiration="1"))
    eventually(lambda: depth(channel, name) == 2)
    assert bodies(channel, name) == [b"stays"]


def test_a_message_expires_while_the_previous_one_is_unacknowledged(channel: BlockingChannel, name: str) -> None:
    dead = dead_letter_pair(channel, name)
    channel.basic_qos(prefetch_count=1)
    channel.basic_publish("", name, b"held")
    channel.basic_publish("", name, b"short", pika.BasicProperties(expiration="100"))
    channel.basic_consume(name, lambda *_: None)
    assert take(channel, dead)[2] == b"short"


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize(
    ("arguments", "properties"),
    [
        ({"x-max-length": 3}, {}),
        ({"x-max-length-bytes": 10}, {}),
        ({"x-message-ttl": 0}, {}),
        ({}, {"expiration": "0"}),
    ],
)
def test_an_idle_consumer_gets_messages_before_limits_drop_them(
    channel: BlockingChannel, name: str, durable: bool, arguments: dict[str, Any], properties: dict[str, str]
) -> None:
    channel.queue_declare(name, durable=durable, arguments=arguments)
    got: list[bytes] = []
    channel.basic_consume(name, lambda _c, _m, _p, body: got.append(body), auto_ack=True)
    published = [b"%02d" % n for n in range(50)]
    channel.tx_select()  # all messages at once
    for body in published:
        channel.basic_publish("", name, body, pika.BasicProperties(**properties))
    channel.tx_commit()
    channel.queue_declare(name, passive=True)
    eventually(lambda: channel.connection.process_data_events(0.01) or len(got) == len(published))
    assert got == published


@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("overflow", ["reject-publish", "reject-publish-dlx"])
@pytest.mark.parametrize("bound", [{"x-max-length": 3}, {"x-max-length-bytes": 6}])
@pytest.mark.parametrize("prefetch", [0, 20])
def test_a_full_queue_refuses_only_messages_beyond_the_prefetch_of_its_consumers(
    running: Running, name: str, durable: bool, overflow: str, bound: dict[str, int], prefetch: int
) -> None:
    """RabbitMQ delivers first. Without that, a burst was refused although a consumer was idle."""
    publisher, consumer = running.channel(), running.channel()
    publisher.queue_declare(name, durable=durable, arguments={"x-overflow": overflow, **bound})
    got: list[bytes] = []
    consumer.basic_qos(prefetch_count=prefetch)
    consumer.basic_consume(name, lambda _c, _m, _p, body: got.append(body), auto_ack=not prefetch)
    published = [b"%02d" % n for n in range(50)]
    publisher.tx_select()  # all messages at once
    for body in published:
        publisher.basic_publish("", name, body)
    if prefetch:
        with pytest.raises(ChannelClosedByBroker, match="partial tx completion"):
            publisher.tx_commit()
    else:
        publisher.tx_commit()
    taken, stay = (published[:prefetch], 3) if prefetch else (published, 0)
    eventually(lambda: consumer.connection.process_data_events(0.01) or len(got) == len(taken))
    assert (got, depth(consumer, name)) == (taken, stay)
    for each in (publisher, consumer):
        each.connection.close()


@pytest.mark.parametrize("properties", [{}, {"expiration": "0"}])
def test_a_requeued_message_with_a_ttl_of_zero_expires(
    channel: BlockingChannel, name: str, properties: dict[str, str]
) -> None:
    dead = dead_letter_pair(channel, name, {} if properties else {"x-message-ttl": 0})
    channel.basic_consume(name, lambda c, m, _p, _b: c.basic_nack(m.delivery_tag, requeue=True))
    channel.basic_publish("", name, b"x", pika.BasicProperties(**properties))
    eventually(lambda: channel.connection.process_data_events(0.01) or depth(channel, dead))
    assert depth(channel, name) == 0


@pytest.mark.parametrize("durable", [True, False])
def test_max_length_applies_to_messages_beyond_the_prefetch(channel: BlockingChannel, name: str, durable: bool) -> None:
    channel.queue_declare(name, durable=durable, arguments={"x-max-length": 3})
    got: list[bytes] = []
    channel.basic_qos(prefetch_count=2)
    channel.basic_consume(name, lambda _c, _m, _p, body: got.append(body))
    for n in range(10):
        channel.basic_publish("", name, b"%d" % n)
    eventually(lambda: channel.connection.process_data_events(0.01) or len(got) == 2)
    eventually(lambda: depth(channel, name) == 3)


def test_an_expired_message_is_never_delivered(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name, durable=True)
    for n in range(20):
        expiration = "1" if n % 2 else None
        channel.basic_publish("", name, b"%d" % n, pika.BasicProperties(expiration=expiration))
    depth(channel, name)
    time.sleep(0.02)
    got: list[bytes] = []
    channel.basic_consume(name, lambda _c, _m, _p, body: got.append(body), auto_ack=True)
    eventually(lambda: channel.connection.process_data_events(0.05) or len(got) >= 10)
    assert got == [b"%d" % n for n in range(0, 20, 2)]


@pytest.mark.parametrize("durable", [True, False])
def test_the_oldest_messages_are_dropped_over_max_length(channel: BlockingChannel, name: str, durable: bool) -> None:
    channel.queue_declare(name, durable=durable, arguments={"x-max-length": 5})
    for n in range(30):
        channel.basic_publish("", name, b"%d" % n)
    eventually(lambda: depth(channel, name) == 5)
    assert bodies(channel, name) == [b"%d" % n for n in range(25, 30)]


def test_the_oldest_messages_are_dropped_over_max_length_bytes(channel: BlockingChannel, name: str) -> None:
    channel.queue_declare(name, durable=True, arguments={"x-max-length-bytes": 1000})
    for n in range(20):
        channel.basic_publish("", name, b"%03d" % n * 100)
    eventually(lambda: depth(channel, name) == 3)
    assert bodies(channel, name) == [b"%03d" % n * 100 for n in (17, 18, 19)]


def test_messages_dropped_over_max_length_are_dead_lettered(channel: BlockingChannel, name: str) -> None:
    dead = dead_letter_pair(channel, name, {"x-max-length": 1})
    channel.basic_publish("", name, b"old")
    channel.basic_publish("", name, b"new")
    _, properties, body = take(channel, dead)
    assert body == b"old"
    assert properties.headers["x-death"][0]["reason"] == "maxlen"


@pytest.mark.parametrize("durable", [True, False])
def test_a_rejected_message_is_dead_lettered_with_its_x_death_history(
    channel: BlockingChannel, name: str, durable: bool
) -> None:
    dead = dead_letter_pair(channel, name, durable=durable)
    sent = pika.BasicProperties(headers={"mine": 1}, message_id="m", delivery_mode=2)
    channel.basic_publish("", name, b"bad", sent)
    for _ in range(2):  # published again, the message begins a new history, as in RabbitMQ 4
        method, _, _ = take(channel, name)
        channel.basic_reject(method.delivery_tag, requeue=False)
        method, properties, body = take(channel, dead)
        death = properties.headers["x-death"][0]
        assert (body, properties.message_id, properties.headers["mine"]) == (b"bad", "m", 1)
        assert (death["queue"], death["reason"], death["count"]) == (name, "rejected", 1)
        assert (death["exchange"], death["routing-keys"]) == ("", [name])
        assert properties.headers["x-first-death-queue"] == name
        assert method.routing_key == dead
        channel.basic_ack(method.delivery_tag)
        channel.basic_publish("", name, body, properties)
    assert depth(channel, dead) == 0


def test_an_expired_message_is_dead_lettered_without_its_expiration(channel: BlockingChannel, name: str) -> None:
    dead = dead_letter_pair(channel, name)
    channel.basic_publish("", name, b"late", pika.BasicProperties(expiration="10"))
    _, properties, _ = take(channel, dead)
    death = properties.headers["x-death"][0]
    assert (death["reason"], death["original-expiration"]) == ("expired", "10")
    assert properties.expiration is None


def test_a_dead_letter_cycle_ends(channel: BlockingChannel, name: str) -> None:
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": name, "x-message-ttl": 10}
    channel.queue_declare(name, durable=True, arguments=arguments)
    channel.basic_publish("", name, b"x")
    eventually(lambda: depth(channel, name) == 0)


def test_a_retry_loop_of_ttl_and_dead_letters_counts_each_attempt(channel: BlockingChannel, name: str) -> None:
    """The usual retry loop: rejected messages wait in a queue whose TTL dead-letters them back."""
    waiting = name + ".wait"
    channel.queue_declare(
        name, durable=True, arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": waiting}
    )
    channel.queue_declare(
        waiting, durable=True,
        arguments={"x-dead-letter-exchange": "", "x-dead-letter-routing-key": name, "x-message-ttl": 20},
    )  # fmt: skip
    channel.basic_publish("", name, b"x")
    for _ in range(3):
        method, properties, _ = take(channel, name)
        channel.basic_reject(method.delivery_tag, requeue=False)
    _, properties, _ = take(channel, name)
    assert {death["queue"]: death["count"] for death in properties.headers["x-death"]} == {name: 3, waiting: 3}


def test_a_poison_message_is_dead_lettered_at_its_delivery_limit(channel: BlockingChannel, name: str) -> None:
    dead = dead_letter_pair(channel, name, {"x-queue-type": "quorum", "x-delivery-limit": 2})
    channel.basic_publish("", name, b"poison")
    for count in (None, 1, 2):
        method, properties, _ = take(channel, name)
        assert (properties.headers or {}).get("x-delivery-count") == count
        channel.basic_nack(method.delivery_tag, requeue=True)
    _, properties, _ = take(channel, dead)
    assert properties.headers["x-death"][0]["reason"] == "delivery_limit"


@pytest.mark.parametrize("durable", [True, False])
def test_messages_are_ordered_by_priority_and_then_by_arrival(
    channel: BlockingChannel, name: str, durable: bool
) -> None:
    channel.queue_declare(name, durable=durable, arguments={"x-max-priority": 5})
    for n, priority in enumerate([0, 3, 9, 3, None, 5]):
        channel.basic_publish("", name, b"%d" % n, pika.BasicProperties(priority=priority))
    assert bodies(channel, name) == [b"2", b"5", b"1", b"3", b"0", b"4"]


@pytest.mark.parametrize("durable", [True, False])
def test_a_delayed_message_is_routed_after_its_delay(channel: BlockingChannel, name: str, durable: bool) -> None:
    channel.exchange_declare(name, "x-delayed-message", durable=durable, arguments={"x-delayed-type": "topic"})
    channel.queue_declare(name, durable=durable)
    channel.queue_bind(name, name, "a.*")
    channel.confirm_delivery()
    sent: dict[int, float] = {}
    for delay in (600_000, 40, 0):
        sent[delay] = time.monotonic()
        channel.basic_publish(name, "a.b", b"%d" % delay, pika.BasicProperties(headers={"x-delay": delay}))
    arrived: set[int] = set()
    while len(arrived) < 2:
        delay = int(take(channel, name, auto_ack=True)[2])
        waited_ms = (time.monotonic() - sent[delay]) * 1000
        assert waited_ms > delay - 2, "delivered too early"  # the broker uses whole milliseconds
        arrived.add(delay)
    assert arrived == {0, 40}
    assert depth(channel, name) == 0


@pytest.mark.parametrize("source", ["binding", "alternate", "dead letter"])
def test_a_message_is_delayed_when_another_exchange_routes_it_to_a_delayed_exchange(
    running: Running, channel: BlockingChannel, name: str, source: str
) -> None:
    """It was routed on without a delay. Other bindings on the way get it at once, as with RabbitMQ's plugin."""
    first, delaying, second = f"{name}.first", f"{name}.delaying", f"{name}.second"
    first_arguments = {"alternate-exchange": delaying} if source == "alternate" else {}
    channel.exchange_declare(first, "fanout", durable=True, arguments=first_arguments)
    for exchange in (delaying, second):
        arguments = {"x-delayed-type": "direct"}
        channel.exchange_declare(exchange, "x-delayed-message", durable=True, arguments=arguments)
    channel.exchange_bind(second, delaying, "a")
    for queue, exchange in ((f"{name}.now", first), (f"{name}.later", delaying), (f"{name}.last", second)):
        channel.queue_declare(queue, durable=True)
        if exchange != first or source != "alternate":
            channel.queue_bind(queue, exchange, "a")
    if source != "alternate":
        channel.exchange_bind(delaying, first)
    channel.confirm_delivery()
    long, short = pika.BasicProperties(headers={"x-delay": 600_000}), pika.BasicProperties(headers={"x-delay": 40})
    if source == "dead letter":
        channel.queue_declare(name, durable=True, arguments={"x-dead-letter-exchange": first, "x-message-ttl": 1,
                                                             "x-dead-letter-routing-key": "a"})  # fmt: skip
    for properties in (long, short):
        if source == "dead letter":
            channel.basic_publish("", name, b"x", properties, mandatory=True)
        else:
            channel.basic_publish(first, "a", b"x", properties, mandatory=True)
    for queue in (f"{name}.later", f"{name}.last"):
        assert take(channel, queue, auto_ack=True)[1].headers["x-delay"] == -40, "delayed exactly once"
    host = running.server.broker.vhosts.get("/")
    eventually(lambda: running.call(lambda: host.delays.waiting(delaying)) == 1)
    assert running.call(lambda: host.delays.waiting(second)) == 0
    assert depth(channel, f"{name}.now") == (0 if source == "alternate" else 2)
    assert depth(channel, f"{name}.later") == 0


@pytest.mark.parametrize("durable", [True, False])
def test_a_delayed_message_reaches_its_cc_and_bcc_queues(channel: BlockingChannel, name: str, durable: bool) -> None:
    channel.exchange_declare(name, "x-delayed-message", durable=durable, arguments={"x-delayed-type": "direct"})
    for key in "abc":
        channel.queue_declare(name + key, durable=durable)
        channel.queue_bind(name + key, name, key)
    headers = {"x-delay": 10, "CC": ["b"], "BCC": ["c"]}
    channel.basic_publish(name, "a", b"x", pika.BasicProperties(headers=headers))
    for key in "abc":
        assert take(channel, name + key)[1].headers == {"x-delay": -10, "CC": ["b"]}


def test_a_stream_can_be_read_from_any_offset_and_keeps_its_messages(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
    channel.confirm_delivery()
    for n in range(10):
        channel.basic_publish("", name, b"%d" % n)

    def read(offset: Any, count: int) -> list[tuple[int, bytes]]:
        reader = running.channel()
        reader.basic_qos(prefetch_count=4)
        got: list[tuple[int, bytes]] = []

        def on_message(_channel: Any, method: Any, properties: Any, body: bytes) -> None:
            got.append((properties.headers["x-stream-offset"], body))
            reader.basic_ack(method.delivery_tag)

        reader.basic_consume(name, on_message, arguments={"x-stream-offset": offset})
        eventually(lambda: reader.connection.process_data_events(0.05) or len(got) >= count)
        reader.connection.close()
        return got

    assert read("first", 10) == [(n, b"%d" % n) for n in range(10)]
    assert read(7, 3) == [(n, b"%d" % n) for n in (7, 8, 9)]
    assert read("last", 1)[-1] == (9, b"9")
    assert read("1h", 10)[0] == (0, b"0")
    assert depth(channel, name) == 10
