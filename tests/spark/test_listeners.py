"""AMQP messages with properties and Kafka transactions, as read by Spark."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.log.read.external import Ends, LogFiles
from tests.listing import listed
from tests.spark.test_size import planned
from tests.spark.test_source import WAYS, load, options
from tests.spark.world import RunningBroker, batches_of, wait_until

if TYPE_CHECKING:
    from confluent_kafka import Producer
    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSourceReader, InputPartition

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def listeners(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningBroker]:
    broker = RunningBroker(tmp_path_factory.mktemp("listeners"), listeners=("http", "amqp", "kafka")).start()
    yield broker
    broker.close()


@pytest.mark.parametrize("way", WAYS)
def test_amqp_messages_have_their_exchange_routing_key_and_properties(
    spark: "SparkSession", listeners: RunningBroker, way: str
) -> None:
    import pika

    broker, queue = listeners, f"tasks-{way}"
    where = pika.ConnectionParameters(
        "127.0.0.1", broker.ports["amqp"], socket_timeout=PATIENCE_S, stack_timeout=PATIENCE_S
    )
    with pika.BlockingConnection(where) as connection:
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


def transactional(broker: RunningBroker, name: str) -> "Producer":
    """A transactional producer whose transaction times out late enough for Spark."""
    from confluent_kafka import Producer

    address = f"127.0.0.1:{broker.ports['kafka']}"
    producer = Producer({"bootstrap.servers": address, "transactional.id": name, "transaction.timeout.ms": 600_000})
    producer.init_transactions(PATIENCE_S)
    return producer


def produce(broker: RunningBroker, topic: str, name: str, values: list[str]) -> "Producer":
    """Produces records in a transaction that stays open."""
    producer = transactional(broker, name)
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(PATIENCE_S) == 0
    return producer


def wait_for_slot(broker: RunningBroker, topic: str) -> None:
    """Waits until the slot shows the end of the transaction, which readers of the files use."""
    [log] = broker.ok("GET", f"/topics/{topic}/log")["partitions"]
    files = LogFiles(broker.path)

    def is_told() -> bool:
        ends = files.ends().get(log["log"])
        return ends is not None and ends.stable_end == log["stable_end"]

    wait_until(is_told, "the slot is not written")


def texts(reader: "DataSourceReader", pieces: "list[InputPartition]") -> list[str]:
    found = [row for batch in batches_of(reader, pieces) for row in batch.to_pylist()]
    return [row["value"].decode() for row in found]


def test_records_of_open_and_aborted_transactions_are_not_read(spark: "SparkSession", listeners: RunningBroker) -> None:
    broker = listeners
    broker.create("paid")
    produce(broker, "paid", "a", ["a1", "a2"]).commit_transaction(PATIENCE_S)
    produce(broker, "paid", "b", ["b1", "b2"]).abort_transaction(PATIENCE_S)
    broker.publish("paid", [{"value": "plain"}])
    produce(broker, "paid", "c", ["c1"]).commit_transaction(PATIENCE_S)
    pending = produce(broker, "paid", "d", ["d1"])
    broker.publish("paid", [{"value": "behind"}])

    def read(way: str, **more: str) -> list[str]:
        # No links for an hour: the segments deleted below must disappear.
        frame = load(spark, options(broker, way, topic="paid", columns="offset,value", pinMaxAge="1ms", **more))
        return [bytes(r.value).decode() for r in frame.orderBy("offset").collect()]

    for way in WAYS:
        assert read(way) == ["a1", "a2", "plain", "c1"], way
        dirty = read(way, isolation="read_uncommitted")
        assert dirty == ["a1", "a2", "b1", "b2", "plain", "c1", "d1", "behind"], way
    pending.commit_transaction(PATIENCE_S)
    wait_for_slot(broker, "paid")
    for way in WAYS:
        assert read(way) == ["a1", "a2", "plain", "c1", "d1", "behind"], way
    # Planned, then deleted with its markers before the task started: the markers still apply.
    reader, pieces = planned(broker, topic="paid")
    broker.ok("DELETE", f"/topics/paid/partitions/0/records?before={broker.ends('paid')[0][1]}")
    wait_until(lambda: not listed(broker.data, f"logs/*-paid/{0:020d}.log"), "it was not removed")
    assert texts(reader, pieces) == ["a1", "a2", "plain", "c1", "d1", "behind"]
    # The same through the broker. Each task ends before the marker of the transaction that starts in it.
    broker.create("owed", segment_size="64KB")
    large = "x" * 100_000
    produce(broker, "owed", "a", ["a1" + large, "a2"]).commit_transaction(PATIENCE_S)
    produce(broker, "owed", "b", ["b1" + large, "b2" + large]).abort_transaction(PATIENCE_S)
    produce(broker, "owed", "c", ["c1" + large]).commit_transaction(PATIENCE_S)
    reader, pieces = planned(broker, topic="owed", path="", bootstrap=broker.url, splitBytes="64KB")
    assert len(pieces) > 3
    end = broker.ends("owed")[0][1]
    broker.ok("DELETE", f"/topics/owed/partitions/0/records?before={end}")
    wait_until(lambda: broker.ends("owed")[0][0] == end, "it was not removed")
    assert [text[:2] for text in texts(reader, pieces)] == ["a1", "a2", "c1"]


def test_a_task_without_its_links_uses_the_remaining_transaction_markers(
    listeners: RunningBroker,
) -> None:
    """The broker has removed the expired links; the segment itself still exists."""
    listeners.create("late")
    produce(listeners, "late", "e", ["e1"]).commit_transaction(PATIENCE_S)
    produce(listeners, "late", "f", ["f1"]).abort_transaction(PATIENCE_S)
    wait_for_slot(listeners, "late")
    reader, pieces = planned(listeners, topic="late")
    links = [Path(piece.task.link) for piece in pieces]  # type: ignore[attr-defined]
    assert links
    for link in links:
        link.unlink()
    assert texts(reader, pieces) == ["e1"]


def test_markers_in_a_later_deleted_segment_are_found_through_the_links(
    listeners: RunningBroker,
) -> None:
    """Regression: retention deleted the markers before the task looked for them, and aborted records were read."""
    listeners.create("later", segment_size="64KB")
    large = "x" * 100_000
    produce(listeners, "later", "h", ["h1" + large, "h2"]).commit_transaction(PATIENCE_S)
    produce(listeners, "later", "i", ["i1" + large, "i2" + large]).abort_transaction(PATIENCE_S)
    produce(listeners, "later", "j", ["j1" + large]).commit_transaction(PATIENCE_S)
    wait_for_slot(listeners, "later")
    reader, pieces = planned(listeners, topic="later", splitBytes="64KB")
    assert len(pieces) > 3
    listeners.ok("DELETE", f"/topics/later/partitions/0/records?before={listeners.ends('later')[0][1]}")
    first = f"logs/*-later/{0:020d}.log"
    wait_until(lambda: not listed(listeners.data, first), "they were not removed")
    assert [text[:2] for text in texts(reader, pieces)] == ["h1", "h2", "j1"]


def test_a_slot_that_is_being_written_is_read_again(listeners: RunningBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: while a slot was being written, the log was reported as damaged."""
    listeners.create("slot")
    produce(listeners, "slot", "g", ["g1"]).commit_transaction(PATIENCE_S)
    wait_for_slot(listeners, "slot")
    reader, pieces = planned(listeners, topic="slot")
    ends, asked = LogFiles.ends, []

    def at_the_second_look(files: LogFiles) -> dict[int, Ends]:
        asked.append(files)
        return ends(files) if len(asked) > 1 else {}

    monkeypatch.setattr(LogFiles, "ends", at_the_second_look)
    assert texts(reader, pieces) == ["g1"]
    assert len(asked) == 2


def test_a_transaction_is_read_completely_after_its_topic_was_deleted(listeners: RunningBroker) -> None:
    """Regression: without a slot, the log of a deleted topic was reported as damaged, although all of it was linked."""
    listeners.create("dropped", segment_size="64KB")
    large = "x" * 100_000
    produce(listeners, "dropped", "k", ["k1" + large, "k2"]).commit_transaction(PATIENCE_S)
    produce(listeners, "dropped", "l", ["l1" + large, "l2"]).abort_transaction(PATIENCE_S)
    listeners.publish("dropped", [{"value": "plain"}])
    wait_for_slot(listeners, "dropped")
    reader, pieces = planned(listeners, topic="dropped", splitBytes="64KB")
    assert len(pieces) > 1
    listeners.ok("DELETE", "/topics/dropped")
    wait_until(lambda: not listed(listeners.data, "logs/*-dropped"), "it was not deleted")
    assert [text[:5] for text in texts(reader, pieces)] == ["k1xxx", "k2", "plain"]
