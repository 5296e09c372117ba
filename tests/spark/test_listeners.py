"""What came in by other listeners, as Spark sees it: AMQP messages with their properties, Kafka's transactions."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.log.read.external import Ends, LogFiles
from tests.listing import listed
from tests.spark.test_size import planned
from tests.spark.test_source import WAYS, load, options
from tests.spark.world import RunningBroker, wait_until

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
    """Ready for a transaction, which the broker leaves open however long Spark takes to look at it."""
    from confluent_kafka import Producer

    address = f"127.0.0.1:{broker.ports['kafka']}"
    producer = Producer({"bootstrap.servers": address, "transactional.id": name, "transaction.timeout.ms": 600_000})
    producer.init_transactions(PATIENCE_S)
    return producer


def produce(broker: RunningBroker, topic: str, name: str, values: list[str]) -> "Producer":
    """In a transaction that is still open."""
    producer = transactional(broker, name)
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(PATIENCE_S) == 0
    return producer


def wait_for_slot(broker: RunningBroker, topic: str) -> None:
    """Whoever reads the files learns of the end of a transaction a moment after its producer: from a slot."""
    [log] = broker.ok("GET", f"/topics/{topic}/log")["partitions"]
    files = LogFiles(broker.path)

    def is_told() -> bool:
        ends = files.ends().get(log["log"])
        return ends is not None and ends.stable_end == log["stable_end"]

    wait_until(is_told, "the slot is not written")


def texts(reader: "DataSourceReader", pieces: "list[InputPartition]") -> list[str]:
    found = [row for piece in pieces for batch in reader.read(piece) for row in batch.to_pylist()]
    return [row["value"].decode() for row in found]


def test_committed_records_are_read_and_those_of_open_and_aborted_transactions_are_not(
    spark: "SparkSession", listeners: RunningBroker
) -> None:
    broker = listeners
    broker.create("paid")
    produce(broker, "paid", "a", ["a1", "a2"]).commit_transaction(PATIENCE_S)
    produce(broker, "paid", "b", ["b1", "b2"]).abort_transaction(PATIENCE_S)
    broker.publish("paid", [{"value": "plain"}])
    produce(broker, "paid", "c", ["c1"]).commit_transaction(PATIENCE_S)
    pending = produce(broker, "paid", "d", ["d1"])
    broker.publish("paid", [{"value": "behind"}])

    def read(way: str, **more: str) -> list[str]:
        # Not held for an hour: what is removed below is to go.
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
    # Planned, then removed before a task came to it: its markers went with it, and are still minded.
    reader, pieces = planned(broker, topic="paid")
    broker.ok("DELETE", f"/topics/paid/partitions/0/records?before={broker.ends('paid')[0][1]}")
    wait_until(lambda: not listed(broker.data, f"logs/*-paid/{0:020d}.log"), "it was not removed")
    assert texts(reader, pieces) == ["a1", "a2", "plain", "c1", "d1", "behind"]
    # The same through the broker. Each piece ends before the marker of the transaction that begins in it.
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


def test_a_task_that_comes_when_nothing_is_held_any_more_minds_the_markers_that_are_still_there(
    listeners: RunningBroker,
) -> None:
    """The broker takes away what was held too long; the segment itself is where it was."""
    listeners.create("late")
    produce(listeners, "late", "e", ["e1"]).commit_transaction(PATIENCE_S)
    produce(listeners, "late", "f", ["f1"]).abort_transaction(PATIENCE_S)
    wait_for_slot(listeners, "late")
    reader, pieces = planned(listeners, topic="late")
    links = [Path(piece.piece.held) for piece in pieces]  # type: ignore[attr-defined]
    assert links
    for link in links:
        link.unlink()
    assert texts(reader, pieces) == ["e1"]


def test_markers_of_a_transaction_that_lie_in_a_later_piece_are_minded_though_all_of_it_was_removed(
    listeners: RunningBroker,
) -> None:
    """Retention took them before a task looked for them: what was aborted came out as committed."""
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


def test_a_slot_that_is_just_being_written_is_looked_at_again(
    listeners: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until where the markers of a transaction may lie was not known for a moment, and its log said to be damaged."""
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


def test_a_transaction_is_read_to_its_end_though_its_topic_was_deleted_meanwhile(listeners: RunningBroker) -> None:
    """All of it is held, its markers too; without a slot its log was said to be damaged."""
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
