"""Kafka transactions and AMQP consumers of the same log: consumers of queues and streams get committed records only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.interop.kafka.broker import KafkaBroker
from tests.interop.kafka.test_confluent import SECONDS, make_topic, produce
from tests.listeners.amqp.running import patient_connection
from tests.spark.world import wait_until

Name = Callable[[str], str]
STREAM = {"x-queue-type": "stream"}


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    started = KafkaBroker(tmp_path_factory.mktemp("broker"), amqp=True).start()
    yield started
    started.close()
    assert started.errors() == [], started.said()


@contextmanager
def connected(broker: KafkaBroker) -> Iterator[Any]:
    with patient_connection(broker.amqp_port) as connection:
        yield connection.channel()


def begun(broker: KafkaBroker, topic: str, values: list[bytes], **config: Any) -> Producer:
    """In an open transaction, with all of them in the log."""
    producer = Producer({"bootstrap.servers": broker.address, "transactional.id": f"of {topic}", **config})
    producer.init_transactions(SECONDS)
    write(producer, topic, values)
    return producer


def write(producer: Producer, topic: str, values: list[bytes]) -> None:
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(SECONDS) == 0


def fill(broker: KafkaBroker, topic: str, **config: Any) -> list[bytes]:
    """Committed and aborted in turns, aborted ones first and last but one. What was committed."""
    producer = begun(broker, topic, many(b"aborted first"), **config)
    producer.abort_transaction(SECONDS)
    write(producer, topic, many(b"committed"))
    producer.commit_transaction(SECONDS)
    produce(broker, topic, [b"in no transaction"], **config)
    for turn in range(3):
        write(producer, topic, many(b"aborted %d" % turn))
        producer.abort_transaction(SECONDS)
    write(producer, topic, [b"the last"])
    producer.commit_transaction(SECONDS)
    return [*many(b"committed"), b"in no transaction", b"the last"]


def many(word: bytes) -> list[bytes]:
    return [b"%s %d" % (word, number) for number in range(300)]


def consume(channel: Any, queue: str, last: bytes, **arguments: Any) -> list[bytes]:
    """All up to that one, each acknowledged."""
    channel.basic_qos(prefetch_count=50)
    found: list[bytes] = []
    for method, _, body in channel.consume(queue, arguments=arguments, inactivity_timeout=SECONDS):
        assert method is not None, f"only {len(found)} came"
        found.append(body)
        channel.basic_ack(method.delivery_tag)
        if body == last:
            break
    channel.cancel()
    return found


def depth(channel: Any, queue: str) -> int:
    return int(channel.queue_declare(queue, passive=True).method.message_count)


def is_empty(broker: KafkaBroker, queue: str) -> None:
    with connected(broker) as channel:
        wait_until(lambda: depth(channel, queue) == 0, "all that was there is acknowledged")
        assert channel.basic_get(queue)[0] is None


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_consumers_of_a_queue_get_only_committed_records(broker: KafkaBroker, name: Name, codec: str) -> None:
    queue = name("q")
    with connected(broker) as channel:
        channel.queue_declare(queue, durable=True)
        committed = fill(broker, queue, **{"compression.type": codec})
        assert depth(channel, queue) == len(committed), "nothing else is counted"
        assert consume(channel, queue, b"the last") == committed
    is_empty(broker, queue)


def test_basic_get_returns_no_aborted_records(broker: KafkaBroker, name: Name) -> None:
    queue = name("q")
    with connected(broker) as channel:
        channel.queue_declare(queue, durable=True)
        committed = fill(broker, queue)
        assert [channel.basic_get(queue, auto_ack=True)[2] for _ in committed] == committed
        assert channel.basic_get(queue)[0] is None
    is_empty(broker, queue)


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_consumers_of_a_stream_get_only_committed_records(broker: KafkaBroker, name: Name, codec: str) -> None:
    topic = make_topic(broker, name("t"))
    committed = fill(broker, topic, **{"compression.type": codec})
    with connected(broker) as channel:
        channel.queue_declare(topic, durable=True, arguments=STREAM)
        assert consume(channel, topic, b"the last", **{"x-stream-offset": "first"}) == committed


@pytest.mark.parametrize("is_stream", [False, True])
def test_consumers_wait_for_the_end_of_an_open_transaction(broker: KafkaBroker, name: Name, is_stream: bool) -> None:
    topic = make_topic(broker, name("t"))
    arguments = {"x-stream-offset": "first"} if is_stream else {}
    with connected(broker) as channel:
        channel.queue_declare(topic, durable=True, arguments=STREAM if is_stream else {})
        produce(broker, topic, [b"before"])
        producer = begun(broker, topic, [b"in it"])
        produce(broker, topic, [b"after"])
        channel.basic_qos(prefetch_count=50)
        found: list[bytes] = []
        for method, _, body in channel.consume(topic, arguments=arguments, inactivity_timeout=SECONDS):
            assert method is not None, f"only {found} came"
            channel.basic_ack(method.delivery_tag)
            found.append(body)
            if body == b"before":
                producer.commit_transaction(SECONDS)
            if body == b"after":
                break
        assert found == [b"before", b"in it", b"after"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_aborted_records_stay_invisible_after_a_restart(
    tmp_path_factory: pytest.TempPathFactory, is_killed: bool
) -> None:
    """Some transactions are aborted before it, one is open then and aborted after it."""
    broker = KafkaBroker(tmp_path_factory.mktemp("broker"), amqp=True).start()
    try:
        make_topic(broker, "topic")
        with connected(broker) as channel:
            channel.queue_declare("queue", durable=True)
            channel.queue_declare("topic", durable=True, arguments=STREAM)
        committed = {name: fill(broker, name) for name in ("queue", "topic")}
        still_open = {name: begun(broker, name, many(b"open")) for name in committed}
        broker.kill() if is_killed else broker.stop()
        broker.start()
        for name, producer in still_open.items():
            producer.abort_transaction(SECONDS)
            produce(broker, name, [b"after the restart"])
        with connected(broker) as channel:
            assert depth(channel, "queue") == len(committed["queue"]) + 1
            for name, arguments in (("queue", {}), ("topic", {"x-stream-offset": "first"})):
                found = consume(channel, name, b"after the restart", **arguments)
                assert found == [*committed[name], b"after the restart"]
        is_empty(broker, "queue")
        broker.kill() if is_killed else broker.stop()
        broker.start()
        is_empty(broker, "queue")
    finally:
        broker.close()
