"""Topics that are deleted, and possibly created again, while they are read. Without a JVM."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from pyspark.sql.types import StructType

from headrace.spark.access import DataLoss
from headrace.spark.source import HeadraceSource
from tests.spark.world import RunningBroker, batches_of, numbered

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition

SCHEMA = StructType().add("value", "binary")


def source(broker: RunningBroker, way: str, **options: str) -> HeadraceSource:
    where = {"path": broker.path} if way == "path" else {"bootstrap": broker.url}
    return HeadraceSource(where | {"startingOffsets": "earliest"} | options)


def values(reader: "DataSourceReader | DataSourceStreamReader", pieces: "Sequence[InputPartition]") -> list[str]:
    return [value.decode() for batch in batches_of(reader, pieces) for value in batch.column(0).to_pylist()]


def make_anew(broker: RunningBroker, topic: str, count: int) -> None:
    broker.ok("DELETE", f"/topics/{topic}")
    broker.create(topic)
    broker.publish(topic, numbered(count, first=1000))


def test_a_task_does_not_read_a_new_topic_of_the_same_name(
    shared_broker: RunningBroker,
) -> None:
    """Through the broker, a topic is only a name, and the segments of both topics start at 0."""
    broker = shared_broker
    broker.create("renewed")
    broker.publish("renewed", numbered(10))
    strict = source(broker, "bootstrap", topic="renewed").reader(SCHEMA)
    lax = source(broker, "bootstrap", topic="renewed", failOnDataLoss="false").reader(SCHEMA)
    plans = [(strict, strict.partitions()), (lax, lax.partitions())]
    make_anew(broker, "renewed", 20)
    with pytest.raises(DataLoss, match="topic 'renewed' was deleted"):
        values(*plans[0])
    assert values(*plans[1]) == []


@pytest.mark.parametrize("way", ["path", "bootstrap"])
def test_a_repeated_batch_does_not_read_a_topic_created_meanwhile(shared_broker: RunningBroker, way: str) -> None:
    """A driver dies during a batch, its topic is created again, and the batch is repeated with an end in the old
    log."""
    broker, topic = shared_broker, f"repeated-{way}"
    broker.create(topic)
    broker.publish(topic, numbered(10))
    stream = source(broker, way, topic=topic, failOnDataLoss="false").streamReader(SCHEMA)
    try:
        start = stream.initialOffset()
        end = stream.latestOffset(start, stream.getDefaultReadLimit())
        make_anew(broker, topic, 4)
        repeated = values(stream, stream.partitions(start, end))
        latest = stream.latestOffset(end, stream.getDefaultReadLimit())
        assert repeated + values(stream, stream.partitions(end, latest)) == ["1000", "1001", "1002", "1003"]
    finally:
        stream.stop()


@pytest.mark.parametrize("way", ["path", "bootstrap"])
def test_a_stream_without_fail_on_data_loss_survives_a_deleted_topic(shared_broker: RunningBroker, way: str) -> None:
    broker, name = shared_broker, f"one-of-two-{way}"
    for topic in (f"{name}.a", f"{name}.b"):
        broker.create(topic)
        broker.publish(topic, numbered(2))
    chosen = {"topics": f"{name}.a,{name}.b"}
    lax = source(broker, way, failOnDataLoss="false", **chosen).streamReader(SCHEMA)
    strict = source(broker, way, **chosen).streamReader(SCHEMA)
    try:
        start = lax.latestOffset(lax.initialOffset(), lax.getDefaultReadLimit())
        broker.ok("DELETE", f"/topics/{name}.a")
        broker.publish(f"{name}.b", numbered(2, first=1000))
        with pytest.raises(DataLoss, match=f"topic '{name}.a' was deleted"):
            strict.latestOffset(start, strict.getDefaultReadLimit())
        end = lax.latestOffset(start, lax.getDefaultReadLimit())
        assert values(lax, lax.partitions(start, end)) == ["1000", "1001"]
        lax.reportLatestOffset()
        broker.create(f"{name}.a")  # once it exists again, it is read again
        broker.publish(f"{name}.a", numbered(1, first=2000))
        again = lax.latestOffset(end, lax.getDefaultReadLimit())
        assert values(lax, lax.partitions(end, again)) == ["2000"]
    finally:
        lax.stop()
        strict.stop()
