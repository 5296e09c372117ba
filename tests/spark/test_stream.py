"""Streaming reads: micro-batches continue where the last one ended, whatever happens in between."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.listing import listed
from tests.spark.world import WAIT_S_MAX, RunningBroker, batches_of, numbered, started, wait_until

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming import StreamingQuery


def stream(spark: "SparkSession", broker: RunningBroker, topic: str, **options: Any) -> "DataFrame":
    chosen = {"startingOffsets": "earliest", "path": broker.path} | {k: str(v) for k, v in options.items()}
    if chosen.get("path") == "":
        del chosen["path"]
    return spark.readStream.format("headrace").options(topic=topic, **chosen).load()


def to_parquet(frame: "DataFrame", folder: Path, **trigger: Any) -> "StreamingQuery":
    """Counts rows in a Parquet sink, which is exactly-once itself."""
    writer = frame.select("topic", "partition", "offset").writeStream.format("parquet")
    writer = writer.option("checkpointLocation", str(folder / "checkpoint")).trigger(**trigger)
    return started(lambda: writer.start(str(folder / "out")))


def run_to_end(frame: "DataFrame", folder: Path) -> "StreamingQuery":
    query = to_parquet(frame, folder, availableNow=True)
    assert query.awaitTermination(WAIT_S_MAX), query.status
    return query


def seen(spark: "SparkSession", folder: Path) -> tuple[int, int]:
    """(rows, distinct rows)"""
    frame = spark.read.schema("topic string, partition int, offset long").parquet(str(folder / "out"))
    return frame.count(), frame.distinct().count()


@pytest.mark.parametrize("way", ["path", "bootstrap"])
def test_batches_respect_the_limit_and_a_restart_continues(
    spark: "SparkSession", broker: RunningBroker, tmp_path: Path, way: str
) -> None:
    where = {"path": broker.path} if way == "path" else {"path": "", "bootstrap": broker.url}
    broker.create("rows", 2)
    broker.publish("rows", numbered(1000))
    query = run_to_end(stream(spark, broker, "rows", maxOffsetsPerTrigger=300, **where), tmp_path)
    assert [p["numInputRows"] for p in query.recentProgress if p["numInputRows"]] == [300, 300, 300, 100]
    assert seen(spark, tmp_path) == (1000, 1000)
    broker.publish("rows", numbered(500, first=1000))
    run_to_end(stream(spark, broker, "rows", maxOffsetsPerTrigger=300, **where), tmp_path)
    assert seen(spark, tmp_path) == (1500, 1500)
    # Repeat the last batch, as after a crash between its output and its commit.
    last = max(listed(tmp_path / "checkpoint" / "commits", "[0-9]*"), key=lambda p: int(p.name))
    last.unlink()
    run_to_end(stream(spark, broker, "rows", maxOffsetsPerTrigger=300, **where), tmp_path)
    assert seen(spark, tmp_path) == (1500, 1500)


def test_bytes_limit_a_batch_too(spark: "SparkSession", broker: RunningBroker, tmp_path: Path) -> None:
    broker.create("bytes")
    for part in range(8):
        broker.publish("bytes", numbered(500, first=part * 500, size=100))
    query = run_to_end(stream(spark, broker, "bytes", maxBytesPerTrigger="128KB"), tmp_path)
    batches = [p["numInputRows"] for p in query.recentProgress if p["numInputRows"]]
    assert sum(batches) == 4000 and 3 <= len(batches) <= 8 and max(batches) < 2000


def test_a_stream_follows_appends_new_segments_restarts_and_new_topics(
    spark: "SparkSession", broker: RunningBroker, tmp_path: Path
) -> None:
    broker.create("live-1", 2, segment_size="64KB")
    broker.publish("live-1", numbered(100))
    reader = spark.readStream.format("headrace").options(
        path=broker.path, topicPattern="live-.*", startingOffsets="earliest"
    )
    query = to_parquet(reader.load(), tmp_path, processingTime="0 seconds")
    try:
        for part in range(3):
            broker.publish("live-1", numbered(500, first=100 + part * 500, size=100))

        def has_seen(count: int) -> bool:
            return query.exception() is not None or seen(spark, tmp_path) == (count, count)

        wait_until(lambda: has_seen(1600), "appends were not seen")
        assert query.exception() is None
        broker.stop()
        broker.start()
        broker.create("live-2")
        broker.publish("live-2", numbered(50))
        broker.publish("live-1", numbered(50))
        wait_until(lambda: has_seen(1700), "not all was seen")
        assert query.exception() is None and seen(spark, tmp_path) == (1700, 1700)

        def reached() -> Any:
            assert query.lastProgress is not None
            return json.loads(query.lastProgress["sources"][0]["endOffset"])

        wait_until(lambda: set(reached()) == {"live-1", "live-2"}, "progress is reported after the rows are written")
        assert reached()["live-2"]["0"].keys() == {"offset", "log", "epoch"}
    finally:
        query.stop()


def test_a_cursor_shows_lag_and_its_pin_delays_retention_until_it_expires(
    spark: "SparkSession", tmp_path: Path
) -> None:
    broker = RunningBroker(tmp_path, "--retention-interval", "100ms").start()
    try:
        broker.create("pinned", segment_size="64KB", retention_bytes="64KB")
        broker.publish("pinned", numbered(200, size=100))
        options = {"bootstrap": broker.url, "cursor": "job", "pin": "true", "pinMaxAge": "1h"}
        run_to_end(stream(spark, broker, "pinned", **options), tmp_path)
        for part in range(10):
            broker.publish("pinned", numbered(200, first=200 + part * 200, size=100))
        cursor = broker.ok("GET", "/cursors/job")
        assert cursor["pin"] and cursor["max_age_ms"] == 3_600_000 and cursor["lag"] >= 2000
        metrics = broker.call("GET", "/metrics/detailed")[1].decode()
        assert 'headrace_cursor_lag{cursor="job",topic="pinned"}' in metrics
        assert broker.ends("pinned")[0][0] == 0, "retention took what the cursor still needs"
        run_to_end(stream(spark, broker, "pinned", **options), tmp_path)
        assert seen(spark, tmp_path) == (2200, 2200)
        # The cursor does not move any more: its pin expires, and retention deletes the records.
        broker.ok(
            "PUT", "/cursors/job",
            {"topic": "pinned", "partitions": [{"partition": 0, "offset": 0}], "max_age_ms": 1000},
        )  # fmt: skip
        wait_until(lambda: broker.ends("pinned")[0][0] > 0, "a dead job's pin held retention for ever")
    finally:
        broker.close()


def test_lost_records_end_the_stream_unless_fail_on_data_loss_is_off(
    spark: "SparkSession", broker: RunningBroker, tmp_path: Path
) -> None:
    broker.create("again")
    broker.publish("again", numbered(10))
    run_to_end(stream(spark, broker, "again"), tmp_path)
    broker.ok("DELETE", "/topics/again")
    broker.create("again")
    broker.publish("again", numbered(20))
    query = to_parquet(stream(spark, broker, "again"), tmp_path, availableNow=True)
    with pytest.raises(Exception, match="deleted and created again"):
        query.awaitTermination(WAIT_S_MAX)
    run_to_end(stream(spark, broker, "again", failOnDataLoss="false"), tmp_path)
    assert seen(spark, tmp_path)[0] == 30
    # An offset past the end of the log, as after a power failure in async mode.
    offsets = max(listed(tmp_path / "checkpoint" / "offsets", "[0-9]*"), key=lambda p: int(p.name))
    lines = offsets.read_text().splitlines()
    position = json.loads(lines[-1])
    position["again"]["0"]["offset"] = 25
    offsets.write_text("\n".join([*lines[:-1], json.dumps(position)]))
    (offsets.parent / f".{offsets.name}.crc").unlink(missing_ok=True)
    query = to_parquet(stream(spark, broker, "again"), tmp_path, availableNow=True)
    with pytest.raises(Exception, match="ends at 20, before 25"):
        query.awaitTermination(WAIT_S_MAX)


@pytest.mark.parametrize("way", ["path", "bootstrap"])
def test_records_that_replaced_lost_ones_are_detected_by_their_epoch(broker: RunningBroker, way: str) -> None:
    """A power failure removes records that async mode had not synced, and others get the same offsets; the stream had
    read the first."""
    from pyspark.sql.types import StructType

    from headrace.spark.access import DataLoss
    from headrace.spark.source import HeadraceSource

    where = {"path": broker.path} if way == "path" else {"bootstrap": broker.url}
    schema = StructType().add("offset", "long").add("value", "binary")
    broker.create("unsafe", write_mode="async", flush_interval="1h", flush_bytes="1GB")
    broker.publish("unsafe", numbered(10))
    chosen = where | {"topic": "unsafe", "startingOffsets": "earliest"}
    stream = HeadraceSource(dict(chosen)).streamReader(schema)
    first = stream.initialOffset()
    reached = stream.latestOffset(first, stream.getDefaultReadLimit())
    assert reached["unsafe"]["0"]["offset"] == 10
    stream.stop()
    broker.kill()
    [segment] = listed(broker.data, "logs/*-unsafe/*.log")
    segment.write_bytes(b"")
    broker.start()
    broker.publish("unsafe", numbered(30, first=100))
    again = HeadraceSource(dict(chosen)).streamReader(schema)
    latest = again.latestOffset(reached, again.getDefaultReadLimit())
    with pytest.raises(DataLoss, match="replaced after an unclean stop \\(epoch 0, now 1\\)"):
        again.partitions(reached, latest)
    careless = HeadraceSource(chosen | {"failOnDataLoss": "false"}).streamReader(schema)
    batches = batches_of(careless, careless.partitions(reached, latest))
    offsets = [n for batch in batches for n in batch.column(0).to_pylist()]
    assert offsets == list(range(10, 30))
    again.stop()
    careless.stop()
