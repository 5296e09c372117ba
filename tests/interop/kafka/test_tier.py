"""What is archived, through every listener with real clients: the same answers as before."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.kafka.broker import KafkaBroker
from tests.listeners.amqp.running import patient_connection
from tests.listing import listed
from tests.spark.world import wait_until

TOPIC, QUEUE = "mixed", "work"


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    """Small segments, with records from three listeners in them."""
    tier = tmp_path_factory.mktemp("elsewhere")
    flags = ("--segment-size", "8KB", "--tier-dir", str(tier))
    broker = KafkaBroker(tmp_path_factory.mktemp("broker"), *flags, http=True, amqp=True).start()
    try:
        ask(broker, "POST", "/topics", {"name": TOPIC, "partitions": 1})
        produce(broker)
        publish(broker)
        yield broker
    finally:
        broker.close()


def ask(broker: KafkaBroker, method: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json"} if data else {}
    url = f"http://127.0.0.1:{broker.http_port}{path}"
    with urllib.request.urlopen(urllib.request.Request(url, data, headers, method=method), timeout=60) as answer:
        raw = answer.read()
    return json.loads(raw) if raw[:1] == b"{" else raw.decode()


def produce(broker: KafkaBroker) -> None:
    from confluent_kafka import Producer

    for codec in ("none", "lz4", "zstd"):
        producer = Producer({"bootstrap.servers": broker.address, "compression.type": codec, "linger.ms": 50})
        for n in range(120):
            value = None if n % 10 == 0 else f"{codec} {n} ".encode() * 8
            key = None if n % 7 == 0 else f"k{n % 5}".encode()
            producer.produce(TOPIC, value, key, headers=[("n", str(n).encode()), ("n", None)], timestamp=1_000 + n)
        assert producer.flush(60) == 0
    for number, ends_well in enumerate((True, False, True)):
        producer = Producer({"bootstrap.servers": broker.address, "transactional.id": f"t{number}"})
        producer.init_transactions(60)
        producer.begin_transaction()
        for n in range(60):
            producer.produce(TOPIC, f"transaction {number} {n}".encode() * 4, b"t")
        assert producer.flush(60) == 0, "what is aborted has been written before"
        producer.commit_transaction(60) if ends_well else producer.abort_transaction(60)


def publish(broker: KafkaBroker) -> None:
    import pika

    with patient_connection(broker.amqp_port) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare(TOPIC, durable=True, arguments={"x-queue-type": "stream"})
        channel.queue_declare(QUEUE, durable=True)
        for n in range(150):
            properties = pika.BasicProperties(
                content_type="text/plain",
                message_id=f"m{n}",
                delivery_mode=2,
                headers={"n": n, "deep": {"a": [1, "b"]}},
            )
            for queue in (TOPIC, QUEUE):
                channel.basic_publish("", queue, b"amqp %d " % n * 12, properties)
    for n in range(40):
        message = {"key": f"h{n}", "value": f"http {n} " * 20, "headers": {"h": str(n)}}
        ask(broker, "POST", f"/topics/{TOPIC}/messages", message)


def by_kafka(broker: KafkaBroker, isolation: str) -> list[tuple[Any, ...]]:
    from confluent_kafka import Consumer, KafkaError, TopicPartition

    consumer = Consumer(
        {
            "bootstrap.servers": broker.address,
            "group.id": "g",
            "isolation.level": isolation,
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(TOPIC, 0, 0)])
    found = []
    while True:
        message = consumer.poll(60)
        assert message is not None, "nothing came for a minute"
        if error := message.error():
            assert error.code() == KafkaError._PARTITION_EOF, error
            break
        found.append((message.offset(), message.timestamp(), message.key(), message.value(), message.headers()))
    when = [consumer.offsets_for_times([TopicPartition(TOPIC, 0, ms)], 60)[0].offset for ms in (0, 1_050, 2_000)]
    consumer.close()
    return [*found, tuple(when)]


def by_kafka_python(broker: KafkaBroker) -> list[tuple[Any, ...]]:
    from kafka import KafkaConsumer, TopicPartition

    consumer = KafkaConsumer(
        TOPIC, bootstrap_servers=broker.address, auto_offset_reset="earliest", consumer_timeout_ms=60_000
    )
    [end] = consumer.end_offsets([TopicPartition(TOPIC, 0)]).values()
    found: list[tuple[Any, ...]] = []
    while not found or found[-1][0] < end - 1:  # the last record is of HTTP, not the marker of a transaction
        m = next(consumer)
        found.append((m.offset, m.timestamp, m.timestamp_type, m.key, m.value, tuple(m.headers)))
    consumer.close()
    return found


def by_http(broker: KafkaBroker) -> list[Any]:
    found, offset = [], 0
    while True:
        page = ask(broker, "GET", f"/topics/{TOPIC}/messages?offset={offset}&limit=100&encoding=base64")
        found += page["messages"]
        if page["next_offset"] <= offset:
            return found
        offset = page["next_offset"]


def by_stream_queue(broker: KafkaBroker, count: int) -> list[tuple[Any, ...]]:
    found: list[tuple[Any, ...]] = []
    with patient_connection(broker.amqp_port) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=50)
        for method, properties, body in channel.consume(
            TOPIC, arguments={"x-stream-offset": "first"}, inactivity_timeout=60
        ):
            assert method is not None, f"only {len(found)} of {count} came"
            found.append((method.routing_key, method.exchange, str(properties), body))
            channel.basic_ack(method.delivery_tag)
            if len(found) == count:
                return found
    return found


def by_command(broker: KafkaBroker, *arguments: str) -> str:
    command = [sys.executable, "-m", "headrace", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def tier(broker: KafkaBroker, topic: str, *more: str) -> dict[str, Any]:
    url = f"http://127.0.0.1:{broker.http_port}"
    made: dict[str, Any] = json.loads(by_command(broker, "log", "tier", topic, "--url", url, "--json", *more))
    return made


def everything(broker: KafkaBroker) -> dict[str, Any]:
    url = f"http://127.0.0.1:{broker.http_port}"
    committed = by_http(broker)
    return {
        "read_committed": by_kafka(broker, "read_committed"),
        "read_uncommitted": by_kafka(broker, "read_uncommitted"),
        "kafka-python": by_kafka_python(broker),
        "http": committed,
        "stream queue": by_stream_queue(broker, len(committed)),
        "sub": by_command(broker, "sub", TOPIC, "-e", "-J", "--url", url),
    }


def test_every_listener_answers_for_archived_records_as_before(filled: KafkaBroker) -> None:
    before = everything(filled)
    assert len(before["read_uncommitted"]) > len(before["read_committed"]) > 500
    assert not any(b"transaction 1 " in (record[3] or b"") for record in before["read_committed"][:-1])
    made = tier(filled, TOPIC)
    assert made["segments"] >= 5 and tier(filled, TOPIC)["segments"] == 0, "a second run has nothing to do"
    status = ask(filled, "GET", "/status")
    assert status["archived_segments"] == made["segments"] and status["archived_bytes"] == made["bytes_after"]
    after = everything(filled)
    for listener, records in before.items():
        assert after[listener] == records, listener
    metrics = ask(filled, "GET", "/metrics")
    assert f"headrace_log_archived_segments {made['segments']:.1f}" in metrics
    assert "headrace_log_tier_reads_total 0.0" not in metrics, "it came from the tier"
    filled.kill()
    filled.start()
    assert by_http(filled) == before["http"]


def test_a_queue_delivers_messages_that_were_archived_meanwhile(filled: KafkaBroker) -> None:
    assert tier(filled, QUEUE)["segments"] >= 1
    filled.kill()
    filled.start()
    with patient_connection(filled.amqp_port) as connection:
        channel = connection.channel()
        got: list[tuple[bytes, str, dict[str, Any]]] = []
        while len(got) < 150:
            method, properties, body = channel.basic_get(QUEUE)
            assert method is not None, f"only {len(got)} came"
            got.append((body, properties.message_id, properties.headers))
            channel.basic_ack(method.delivery_tag)
    assert got == [(b"amqp %d " % n * 12, f"m{n}", {"n": n, "deep": {"a": [1, "b"]}}) for n in range(150)]


def test_restoring_and_deleting_leave_nothing_in_the_tier(filled: KafkaBroker) -> None:
    tier(filled, TOPIC)
    expected = by_http(filled)
    by_command(filled, "log", "verify", "--data-dir", str(filled.data))
    assert tier(filled, TOPIC, "--restore")["segments"] >= 5
    assert by_http(filled) == expected
    tier(filled, QUEUE)
    ask(filled, "DELETE", f"/topics/{QUEUE}")
    folder = Path(ask(filled, "GET", "/status")["tier_dir"])
    wait_until(lambda: not listed(folder, "**/*.parquet"), "Parquet files are left")
    by_command(filled, "log", "verify", "--data-dir", str(filled.data))
