"""Kafka transactions and AMQP consumers of the same log: who consumes a queue or a stream gets what was committed."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pika
import pytest
from confluent_kafka import Producer

from tests.interop.kafka.broker import KafkaBroker
from tests.interop.kafka.test_confluent import SECONDS, make_topic, produce

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
    with pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", broker.amqp_port)) as connection:
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


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_an_open_transaction_wrote_is_waited_for(broker: KafkaBroker, name: Name, is_stream: bool) -> None:
    topic = make_topic(broker, name("t"))
    arguments = {"x-stream-offset": "first"} if is_stream else {}
    with connected(broker) as channel:
        channel.queue_declare(topic, durable=True, arguments=STREAM if is_stream else {})
        produce(broker, topic, [b"before"])
        producer = begun(broker, topic, [b"in it"])
        produce(broker, topic, [b"after"])
        channel.basic_qos(prefetch_count=50)
        found = []
        for method, _, body in channel.consume(topic, arguments=arguments, inactivity_timeout=SECONDS):
            assert method is not None, f"only {found} came"
            channel.basic_ack(method.delivery_tag)
            found.append(body)
            if body == b"before":
                producer.commit_transaction(SECONDS)
            if body == b"after":
                break
        assert found == [b"before", b"in it", b"after"]
