"""What came in by other doors, as Spark sees it: AMQP messages with their properties, Kafka's transactions."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.ports import free_port
from tests.spark.test_size import planned
from tests.spark.test_source import WAYS, load, options
from tests.spark.world import RunningBroker, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningBroker, int, int]]:
    amqp, kafka = free_port(), free_port()
    folder: Path = tmp_path_factory.mktemp("doors")
    broker = RunningBroker(folder, "--amqp", f"127.0.0.1:{amqp}", "--kafka", f"127.0.0.1:{kafka}").start()
    yield broker, amqp, kafka
    broker.close()


@pytest.mark.parametrize("way", WAYS)
def test_amqp_messages_have_their_exchange_routing_key_and_properties(
    spark: "SparkSession", doors: tuple[RunningBroker, int, int], way: str
) -> None:
    import pika

    broker, port, _ = doors
    queue = f"tasks-{way}"
    with pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.exchange_declare("events", "topic", durable=True)
        channel.queue_declare(queue, durable=True)
        channel.queue_bind(queue, "events", "order.*")
        properties = pika.BasicProperties(
            content_type="application/json", correlation_id="c1", priority=3, headers={"retries": 2, "who": "ann"}
        )
        channel.basic_publish("events", "order.new", b"{}", properties)
        channel.basic_publish("", queue, b"plain")
    broker.publish(queue, [{"key": "k", "value": "over http"}])
    columns = "offset,value,exchange,routing_key,properties"
    rows = load(spark, options(broker, way, topic=queue, columns=columns)).orderBy("offset").collect()
    assert [(bytes(r.value), r.exchange, r.routing_key) for r in rows] == [
        (b"{}", "events", "order.new"), (b"plain", "", queue), (b"over http", None, None),
    ]  # fmt: skip
    assert rows[0].properties["content_type"] == "application/json"
    assert rows[0].properties["correlation_id"] == "c1" and rows[0].properties["priority"] == "3"
    assert '"who":"ann"' in rows[0].properties["headers"]
    assert rows[2].properties is None


def test_committed_records_are_read_and_those_of_open_and_aborted_transactions_are_not(
    spark: "SparkSession", doors: tuple[RunningBroker, int, int]
) -> None:
    from confluent_kafka import Producer

    broker, _, port = doors
    broker.create("paid")

    def produce(name: str, values: list[str], topic: str = "paid") -> Producer:
        producer = Producer({"bootstrap.servers": f"127.0.0.1:{port}", "transactional.id": name})
        producer.init_transactions(60)
        producer.begin_transaction()
        for value in values:
            producer.produce(topic, value)
        producer.flush(60)
        return producer

    produce("a", ["a1", "a2"]).commit_transaction(60)
    produce("b", ["b1", "b2"]).abort_transaction(60)
    broker.publish("paid", [{"value": "plain"}])
    produce("c", ["c1"]).commit_transaction(60)
    pending = produce("d", ["d1"])
    broker.publish("paid", [{"value": "behind"}])

    def read(way: str, **more: str) -> list[str]:
        # Not held for an hour: what is removed below is to go.
        frame = load(spark, options(broker, way, topic="paid", columns="offset,value", pinMaxAge="1ms", **more))
        return [bytes(r.value).decode() for r in frame.orderBy("offset").collect()]

    for way in WAYS:
        assert read(way) == ["a1", "a2", "plain", "c1"], way
        dirty = read(way, isolation="read_uncommitted")
        assert dirty == ["a1", "a2", "b1", "b2", "plain", "c1", "d1", "behind"], way
    pending.commit_transaction(60)
    for way in WAYS:
        assert read(way) == ["a1", "a2", "plain", "c1", "d1", "behind"], way
    # Planned, then removed before a task came to it: its markers went with it, and are still minded.
    reader, pieces = planned(broker, topic="paid")
    broker.ok("DELETE", f"/topics/paid/partitions/0/records?before={broker.ends('paid')[0][1]}")
    wait_until(lambda: not list(broker.data.glob(f"logs/*-paid/{0:020d}.log")), "it was not removed")
    rows = [row for piece in pieces for batch in reader.read(piece) for row in batch.to_pylist()]
    assert [row["value"].decode() for row in rows] == ["a1", "a2", "plain", "c1", "d1", "behind"]
    # The same through the broker. Each piece ends before the marker of the transaction that begins in it.
    broker.create("owed", segment_size="64KB")
    large = "x" * 100_000
    produce("a", ["a1" + large, "a2"], "owed").commit_transaction(60)
    produce("b", ["b1" + large, "b2" + large], "owed").abort_transaction(60)
    produce("c", ["c1" + large], "owed").commit_transaction(60)
    reader, pieces = planned(broker, topic="owed", path="", bootstrap=broker.url, splitBytes="64KB")
    assert len(pieces) > 3
    end = broker.ends("owed")[0][1]
    broker.ok("DELETE", f"/topics/owed/partitions/0/records?before={end}")
    wait_until(lambda: broker.ends("owed")[0][0] == end, "it was not removed")
    rows = [row for piece in pieces for batch in reader.read(piece) for row in batch.to_pylist()]
    assert [row["value"].decode()[:2] for row in rows] == ["a1", "a2", "c1"]
