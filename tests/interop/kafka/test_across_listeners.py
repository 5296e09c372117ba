"""One log, several listeners: what comes in by one goes out by another, from the same bytes."""

import json
import os
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pika
import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from tests.cli.running import headrace
from tests.interop.kafka.broker import KafkaBroker, present
from tests.interop.kafka.test_confluent import SECONDS, make_topic, produce, read

Name = Callable[[str], str]
LISTENERS = {"http": True, "amqp": True}


def from_start(broker: KafkaBroker, topic: str, count: int) -> list[Any]:
    reader = Consumer({"bootstrap.servers": broker.address, "group.id": "across", "enable.auto.commit": False})
    reader.assign([TopicPartition(topic, 0, 0)])
    messages = read(reader, count)
    reader.close()
    return messages


def test_an_amqp_queue_is_read_as_a_topic(broker: KafkaBroker, channel: Any, name: Name) -> None:
    queue = name("q")
    channel.queue_declare(queue, durable=True)
    channel.confirm_delivery()
    for number in range(5):
        channel.basic_publish("", queue, b"%d" % number, pika.BasicProperties(delivery_mode=2))
    messages = from_start(broker, queue, 5)
    assert [message.value() for message in messages] == [b"%d" % number for number in range(5)]
    assert {message.key() for message in messages} == {queue.encode()}, "the routing key"


def test_records_produced_by_kafka_reach_the_consumers_of_the_queue(
    broker: KafkaBroker, channel: Any, name: Name
) -> None:
    queue = name("q")
    channel.queue_declare(queue, durable=True)
    produce(broker, queue, [b"from kafka"])
    deadline = time.monotonic() + SECONDS
    body = None
    while body is None and time.monotonic() < deadline:
        _, _, body = channel.basic_get(queue, auto_ack=True)
    assert body == b"from kafka"


def test_properties_that_are_none_are_refused_and_no_consumer_over_amqp_sees_them(
    broker: KafkaBroker, channel: Any, name: Name
) -> None:
    """They would be sent as they are, and a client that can not read them hangs up."""
    queue = name("q")
    channel.queue_declare(queue, durable=True)
    refused: list[KafkaError | None] = []
    producer = Producer({"bootstrap.servers": broker.address, "compression.type": "zstd", "linger.ms": 0})
    for value in (b"\x20\x00\x00\x00\x00\x09\x01a", b"\x80\x00\x04text"):
        own: list[tuple[str, str | bytes | None]] = [("amqp.properties", value), ("amqp.exchange", b"")]
        producer.produce(queue, value, key=b"k", headers=own, on_delivery=lambda error, _: refused.append(error))
        assert producer.flush(SECONDS) == 0
    assert [error.code() if error else None for error in refused] == [KafkaError.INVALID_RECORD, None]
    for method, properties, body in channel.consume(queue, auto_ack=True, inactivity_timeout=SECONDS):
        assert method is not None and properties.content_type == "text" and body.endswith(b"text")
        break


def test_a_topic_is_consumed_over_amqp_as_a_stream(broker: KafkaBroker, channel: Any, name: Name) -> None:
    topic = make_topic(broker, name("t"))
    producer = Producer({"bootstrap.servers": broker.address})
    for number in range(5):
        producer.produce(topic, b"%d" % number, headers={"h": b"v"})
    assert producer.flush(SECONDS) == 0
    channel.queue_declare(topic, durable=True, arguments={"x-queue-type": "stream"})
    channel.basic_qos(prefetch_count=10)
    got: list[tuple[bytes, Any]] = []
    for method, properties, body in channel.consume(
        topic, arguments={"x-stream-offset": "first"}, inactivity_timeout=SECONDS
    ):
        assert method is not None, f"only {len(got)} came"
        got.append((body, properties.headers))
        channel.basic_ack(method.delivery_tag)
        if len(got) == 5:
            break
    assert [body for body, _ in got] == [b"%d" % number for number in range(5)]


def test_a_topic_is_read_over_http(broker: KafkaBroker, name: Name) -> None:
    topic = make_topic(broker, name("t"))
    produce(broker, topic, [b"one", b"two"])
    url = f"http://127.0.0.1:{broker.http_port}/topics/{topic}/messages?offset=0"
    with urllib.request.urlopen(url, timeout=SECONDS) as answer:
        assert b"one" in answer.read()


def test_a_message_published_over_http_wakes_a_waiting_kafka_consumer(broker: KafkaBroker, name: Name) -> None:
    topic = make_topic(broker, name("t"))
    url = f"http://127.0.0.1:{broker.http_port}/topics/{topic}/messages"
    request = urllib.request.Request(url, b"hello")
    request.add_header("content-type", "text/plain")
    timer = threading.Timer(0.3, lambda: urllib.request.urlopen(request, timeout=SECONDS).close())
    timer.start()
    [message] = from_start(broker, topic, 1)
    timer.join()
    assert message.value() == b"hello"


def to_the_end(broker: KafkaBroker, topic: str) -> list[Any]:
    reader = Consumer({"bootstrap.servers": broker.address, "group.id": "c", "enable.partition.eof": True})
    reader.assign([TopicPartition(topic, 0, 0)])
    messages = []
    while (message := reader.poll(SECONDS)) is not None and not message.error():
        messages.append(message)
    assert message is not None and present(message.error()).code() == KafkaError._PARTITION_EOF
    reader.close()
    return messages


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_a_delete_horizon_changes_nothing_that_a_client_sees(broker: KafkaBroker, name: Name, codec: str) -> None:
    """Its batches have another base timestamp. Of tombstones that say they are old, too, nothing is missing yet."""
    topic = make_topic(broker, name("t"), cleanup_policy="compact", segment_bytes="2048")
    producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 50, "compression.type": codec})
    for part in range(3):
        for number in range(40):
            key, time_ms = b"filler" if part == 2 else b"k%d" % number, 1_000_000_000_000 + 1000 * part + number
            value = None if part == 1 and number % 2 else os.urandom(100)
            producer.produce(topic, value, key=key, headers=[("n", b"%d" % number)], timestamp=time_ms)
        assert producer.flush(SECONDS) == 0

    def seen() -> list[tuple[Any, ...]]:
        return [(m.offset(), m.timestamp(), m.key(), m.value(), m.headers()) for m in to_the_end(broker, topic)]

    before = seen()
    url = f"http://127.0.0.1:{broker.http_port}/topics/{topic}/compact"
    for _ in range(2):
        urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=SECONDS).close()
        after = seen()
        assert after == [message for message in before if message in after]
        assert [message for message in after if message[3] is None] == [m for m in before if m[3] is None]
        assert len(after) < len(before)
    dumped = headrace("log", "dump", topic, "-b", "--json", HEADRACE_DATA_DIR=str(broker.data)).stdout.splitlines()
    horizons = {flag for line in dumped for flag in json.loads(line)["flags"].split() if "delete_horizon=" in flag}
    assert len(horizons) == 1, "the second compaction has not moved it"


def test_a_compacted_topic_is_read_back_with_the_last_value_of_every_key(tmp_path: Path) -> None:
    broker = KafkaBroker(tmp_path, "--retention-interval", "200ms").start()
    try:
        topic = make_topic(broker, "compacted", cleanup_policy="compact", segment_bytes="2048")
        producer = Producer({"bootstrap.servers": broker.address, "linger.ms": 0})
        for number in range(400):
            producer.produce(topic, b"v%d" % number, key=b"k%d" % (number % 10))
            if number % 20 == 0:
                producer.flush(SECONDS)
        assert producer.flush(SECONDS) == 0
        deadline = time.monotonic() + SECONDS
        while True:
            messages = to_the_end(broker, topic)
            latest = {message.key(): message.value() for message in messages}
            assert latest == {b"k%d" % (n % 10): b"v%d" % n for n in range(390, 400)}, "the last of each"
            offsets = [message.offset() for message in messages]
            assert offsets == sorted(offsets)
            if len(messages) < 300:
                break
            assert time.monotonic() < deadline, "nothing was compacted away"
            time.sleep(0.1)
    finally:
        broker.close()
