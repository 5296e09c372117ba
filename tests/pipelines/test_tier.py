"""Archiving as a job, locally and on Spark, and reading archived and live records together."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace.errors import NotFound
from headrace.log.tier import parquet
from headrace.pipelines.maintenance import TopicMaintenance
from tests.listing import listed
from tests.spark.test_size import planned
from tests.spark.test_source import WAYS, load, options
from tests.spark.test_stream import run_to_end, seen, stream
from tests.spark.world import RunningBroker, batches_of, numbered, wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COLUMNS = "key,value,topic,partition,offset,timestamp,timestampType,headers"


def rows(spark: "SparkSession", broker: RunningBroker, way: str, topic: str) -> list[Any]:
    frame = load(spark, options(broker, way, topic=topic, columns=COLUMNS))
    return frame.orderBy("partition", "offset").collect()


def test_archived_and_live_records_are_read_as_one(
    spark: "SparkSession", shared_broker: RunningBroker, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(parquet, "GROUP_BYTES", 16_000)  # several row groups per segment
    broker, topic = shared_broker, "tiered"
    broker.create(topic, 2, segment_size="128KB")
    for part in range(8):
        broker.publish(topic, numbered(250, first=part * 250, size=300))
    before = {way: rows(spark, broker, way, topic) for way in WAYS}
    assert len(before["path"]) == 2000
    upkeep = TopicMaintenance(broker.url, on="local")
    sealed = len(upkeep.sealed(topic))
    done = upkeep.tier(topic)
    assert len(done.written) == sealed >= 2 and not done.left and not upkeep.sealed(topic)
    assert all(written.bytes_after < written.bytes_before for written in done.written)
    for way in WAYS:
        assert rows(spark, broker, way, topic) == before[way], way
    split = options(broker, "path", topic=topic, splitBytes="64KB")
    assert load(spark, split).rdd.getNumPartitions() > sealed + 2, "slices are cut between row groups"
    plain = spark.read.parquet(*map(str, listed(Path(upkeep.tier_root), "*-tiered-*")))
    assert plain.where("length(value) >= 300").count() == sum(written.records for written in done.written)
    upkeep.link.close()
    query = run_to_end(stream(spark, broker, topic, maxBytesPerTrigger="256KB"), tmp_path)
    assert seen(spark, tmp_path) == (2000, 2000) and len(query.recentProgress) >= 2


def test_tiering_and_restoring_on_spark_changes_no_record(spark: "SparkSession", shared_broker: RunningBroker) -> None:
    broker, topic = shared_broker, "on-spark"
    broker.create(topic, 2, segment_size="32KB")
    for part in range(4):
        broker.publish(topic, numbered(200, first=part * 200, size=300))
    before = {p: broker.messages(topic, p) for p in broker.ends(topic)}
    upkeep = TopicMaintenance(broker.url, on="spark", session=spark)
    sealed = len(upkeep.sealed(topic))
    assert len(upkeep.tier(topic).written) == sealed >= 4 and not upkeep.sealed(topic)
    assert {p: broker.messages(topic, p) for p in broker.ends(topic)} == before
    assert len(upkeep.restore(topic).written) == sealed == len(upkeep.sealed(topic))
    assert {p: broker.messages(topic, p) for p in broker.ends(topic)} == before
    upkeep.link.close()
    assert not listed(broker.data, "staging/*")


def test_older_than_archives_only_old_segments(shared_broker: RunningBroker) -> None:
    broker = shared_broker
    broker.create("aging", segment_size="16KB")
    for day in range(4):
        broker.publish("aging", ({"value": "v" * 300, "timestamp": 86_400_000 * day + n} for n in range(100)))
    upkeep = TopicMaintenance(broker.url, on="local")
    every = len(upkeep.sealed("aging"))
    done = upkeep.tier("aging", before_ms=2 * 86_400_000)
    assert 0 < len(done.written) < every and len(upkeep.sealed("aging")) == every - len(done.written)
    times = [86_400_000 * day + n for day in range(4) for n in range(100)]
    assert [m["timestamp"] for m in broker.messages("aging")] == times
    with pytest.raises(NotFound, match="does not exist"):
        upkeep.tier("nobody")
    upkeep.link.close()


def test_a_task_reads_its_archived_file_after_it_was_deleted(
    shared_broker: RunningBroker,
) -> None:
    broker, topic = shared_broker, "planned-on"
    broker.create(topic, segment_size="32KB")
    for part in range(4):
        broker.publish(topic, numbered(100, first=part * 100, size=300))
    upkeep = TopicMaintenance(broker.url, on="local")
    assert len(upkeep.tier(topic).written) >= 2
    before = [(m["offset"], m["value"]) for m in broker.messages(topic)]
    reader, pieces = planned(broker, topic=topic)
    upkeep.restore(topic)
    upkeep.link.close()
    broker.ok("DELETE", f"/topics/{topic}/partitions/0/records?before={len(before)}")
    wait_until(lambda: not listed(broker.data, f"tier/*-{topic}-*/*"), "the files are still there")
    batches = batches_of(reader, pieces)
    assert [(r["offset"], r["value"].decode()) for batch in batches for r in batch.to_pylist()] == before
