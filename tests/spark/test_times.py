"""Starting and ending at a timestamp, without a JVM."""

import pytest
from pyspark.sql.types import StructType

from headrace.spark.access import State
from headrace.spark.broker_access import BrokerAccess
from headrace.spark.folder_access import FolderAccess
from headrace.spark.offsets import Partition
from headrace.spark.source import HeadraceSource
from tests.spark.world import RunningBroker, batches_of

T0 = 1_700_000_000_000
SCHEMA = StructType().add("value", "binary")


def where(broker: RunningBroker, way: str) -> dict[str, str]:
    return {"path": broker.path} if way == "path" else {"bootstrap": broker.url}


def publish(broker: RunningBroker, topic: str, *seconds: int) -> None:
    broker.publish(topic, [{"value": str(second), "timestamp": T0 + second * 1000} for second in seconds])


def read(broker: RunningBroker, way: str, topic: str, **options: int | str) -> list[int]:
    chosen = {name: str(value) for name, value in options.items()}
    reader = HeadraceSource(where(broker, way) | {"topic": topic} | chosen).reader(SCHEMA)
    batches = batches_of(reader, reader.partitions())
    return [int(value) for batch in batches for value in batch.column(0).to_pylist()]


@pytest.mark.parametrize("way", ["path", "bootstrap"])
def test_records_appended_during_planning_are_not_reported_as_lost(
    shared_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The offset for a timestamp is looked up after the ends of the logs, and may be past them."""
    broker = shared_broker
    access = FolderAccess if way == "path" else BrokerAccess
    look = access.offset_for_timestamp

    def late(self: "FolderAccess | BrokerAccess", place: Partition, state: State, timestamp_ms: int) -> int | None:
        publish(broker, place.topic, 3, 60)
        return look(self, place, state, timestamp_ms)  # type: ignore[arg-type]

    monkeypatch.setattr(access, "offset_for_timestamp", late)
    for option, found in (("endingTimestamp", [0, 1, 2]), ("startingTimestamp", [])):
        topic = f"busy-{way}-{option}"
        broker.create(topic, retention_ms="forever")
        publish(broker, topic, 0, 1, 2)
        assert read(broker, way, topic, **{option: T0 + 5000}) == found


def test_a_stream_that_starts_at_a_timestamp_reads_nothing_older(
    shared_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = shared_broker
    broker.create("from-now-on", retention_ms="forever")
    publish(broker, "from-now-on", 0)
    look = BrokerAccess.offset_for_timestamp

    def late(self: BrokerAccess, place: Partition, state: State, timestamp_ms: int) -> int | None:
        publish(broker, "from-now-on", 3, 60)
        return look(self, place, state, timestamp_ms)

    monkeypatch.setattr(BrokerAccess, "offset_for_timestamp", late)
    chosen = {"topic": "from-now-on", "startingTimestamp": str(T0 + 5000)}
    stream = HeadraceSource(where(broker, "bootstrap") | chosen).streamReader(SCHEMA)
    try:
        start = stream.initialOffset()
        end = stream.latestOffset(start, stream.getDefaultReadLimit())
        batches = batches_of(stream, stream.partitions(start, end))
        assert [batch.column(0).to_pylist() for batch in batches] == [[b"60"]]
    finally:
        stream.stop()
