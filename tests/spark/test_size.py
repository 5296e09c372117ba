"""Reading many records, and leases on files that retention deletes or compaction rewrites."""

import time
import uuid
from typing import TYPE_CHECKING

import pytest

from headrace.record.arrow.write import BinaryRows, PartitionedWriter
from headrace.spark.access import DataLoss
from headrace.spark.broker import BrokerLink
from tests.listing import listed
from tests.spark.world import RunningBroker, batches_of, numbered, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession
    from pyspark.sql.datasource import DataSourceReader, InputPartition

MILLION = 1_000_000


def test_a_million_records_are_each_read_once(spark: "SparkSession", shared_broker: RunningBroker) -> None:
    import pyarrow as pa

    shared_broker.create("million", 2, segment_size="1MB", retention_ms="forever")
    link = BrokerLink(shared_broker.url)
    for number in range(4):
        values = pa.array([b"%d" % n for n in range(number * 250_000, (number + 1) * 250_000)], pa.binary())
        _, offsets, data = values.buffers()
        writer = PartitionedWriter(2, timestamp_ms=1, batch_bytes=64 << 10)
        writer.add(None, BinaryRows(offsets, data, None, 0, len(values)))
        name, body, parts = uuid.uuid4().hex, bytearray(), []
        for partition, batches in writer.take():
            length = sum(map(len, batches))
            where = {"staged": name, "topic": "million", "partition": partition}
            parts.append(where | {"position": len(body), "length": length})
            body += b"".join(batches)
        link.stage(name, body)
        link.commit("million", number, parts)
    link.close()
    options = {"path": shared_broker.path, "topic": "million", "splitBytes": "2MB", "columns": "value,partition,offset"}
    frame = spark.read.format("headrace").options(**options).load()
    row = frame.selectExpr(
        "count(*)", "count(distinct partition, offset)", "sum(cast(cast(value as string) as bigint))"
    ).first()
    assert row is not None and tuple(row) == (MILLION, MILLION, MILLION * (MILLION - 1) // 2)
    assert frame.rdd.getNumPartitions() >= 4


def test_a_lease_keeps_files_from_retention(tmp_path: "Path") -> None:
    """The files of a batch are kept until it is finished, although the log has moved on."""
    from headrace.log.read.external import LogFiles

    broker = RunningBroker(tmp_path, "--retention-interval", "100ms").start()
    try:
        broker.create("short", segment_size="64KB")
        for part in range(6):
            broker.publish("short", numbered(200, first=part * 200, size=300))
        files = LogFiles(broker.path)
        [log] = broker.ok("GET", "/topics/short/log")["partitions"]
        pieces = files.slices(log["log"], 0, log["end"], 1 << 30)
        kept, gone = pieces[0], pieces[1]
        link = BrokerLink(broker.url)
        link.lease([(kept.log_id, kept.segment, kept.generation)], 600_000, "test")
        broker.ok("DELETE", f"/topics/short/partitions/0/records?before={pieces[-1].base_offset}")
        wait_until(
            lambda: not listed(broker.data, f"logs/*/{gone.segment:020d}.log"),
            "a segment without a lease is still there",
        )
        with files.open(kept) as source:
            assert len(source.read(1 << 20)) > 0
        link.close()
    finally:
        broker.close()


def planned(broker: RunningBroker, **more: str) -> "tuple[DataSourceReader, list[InputPartition]]":
    from pyspark.sql.types import StructType

    from headrace.spark.source import HeadraceSource

    source = HeadraceSource({name: text for name, text in ({"path": broker.path} | more).items() if text})
    reader = source.reader(StructType().add("offset", "long").add("value", "binary"))
    return reader, list(reader.partitions())


def test_a_task_reads_the_planned_files_after_retention_or_compaction(tmp_path: "Path") -> None:
    """With the option path only, without a broker: a late task and its retry read the same records."""
    broker = RunningBroker(tmp_path, "--retention-interval", "100ms").start()
    try:
        broker.create("short", segment_size="64KB")
        broker.create("keyed", segment_size="64KB", cleanup_policy="compact")
        for part in range(6):
            broker.publish("short", numbered(200, first=part * 200, size=300))
            broker.publish("keyed", numbered(200, first=part * 200, size=300, keys=1200))
        before = {topic: broker.messages(topic) for topic in ("short", "keyed")}
        plans = {topic: planned(broker, topic=topic, splitBytes="64KB") for topic in before}
        end = broker.ends("short")[0][1]
        broker.ok("DELETE", f"/topics/short/partitions/0/records?before={end}")
        for part in range(6):  # all keys again in new segments, so that the planned records are superseded
            broker.publish("keyed", numbered(200, first=part * 200, size=300, keys=1200))
        wait_until(lambda: not listed(broker.data, f"logs/*-short/{0:020d}.log"), "retention left it there")
        wait_until(lambda: broker.messages("keyed")[0]["offset"] > 0, "nothing was compacted")
        for topic, (reader, pieces) in plans.items():
            assert len(pieces) > 4
            for _ in range(2):
                batches = batches_of(reader, pieces)
                found = [(row["offset"], row["value"].decode()) for batch in batches for row in batch.to_pylist()]
                assert found == [(m["offset"], m["value"]) for m in before[topic]], topic
        # A dead reader cannot release its links: the broker removes them after their expiry.
        planned(broker, topic="keyed", pinMaxAge="1ms")
        wait_until(lambda: len(listed(broker.data, "held/*")) == 2, "what a dead reader held stays for ever")
    finally:
        broker.close()


def publish_all_keys(broker: RunningBroker, topic: str) -> None:
    for part in range(6):  # each is one batch of about a segment
        broker.publish(topic, numbered(200, first=part * 200, size=300, keys=1200))


def rewrite(broker: RunningBroker, topic: str) -> None:
    """Publishes all keys again in new segments, so that earlier records are superseded, and waits until compaction has
    removed all of them: a later plan on a segment that an earlier one still links would read records that no longer
    exist elsewhere."""
    end = broker.ends(topic)[0][1]
    publish_all_keys(broker, topic)
    again = {m["key"] for m in broker.messages(topic) if m["offset"] >= end}
    # In a new segment, so that the last one is sealed.
    broker.publish(topic, numbered(200, first=2000, size=300, keys=10_000))
    wait_until(
        lambda: all(m["offset"] >= end or m["key"] not in again for m in broker.messages(topic)),
        "what is out of date was not compacted",
    )


def rows(reader: "DataSourceReader", pieces: "list[InputPartition]") -> list[tuple[int, str]]:
    batches = batches_of(reader, pieces)
    return [(row["offset"], row["value"].decode()) for batch in batches for row in batch.to_pylist()]


def test_the_broker_serves_leased_segments_after_retention_or_compaction(
    tmp_path: "Path",
) -> None:
    """Through the broker only: it keeps leased segments, and drops expired leases."""
    broker = RunningBroker(tmp_path, "--retention-interval", "100ms").start()
    try:
        broker.create("short", segment_size="64KB")
        broker.create("keyed", segment_size="64KB", cleanup_policy="compact", compaction_dirty_percent="1")
        for topic in ("short", "keyed"):
            publish_all_keys(broker, topic)
        before = {topic: [(m["offset"], m["value"]) for m in broker.messages(topic)] for topic in ("short", "keyed")}
        where = {"path": "", "bootstrap": broker.url, "splitBytes": "64KB"}
        plans = {topic: planned(broker, topic=topic, **where) for topic in before}
        end = broker.ends("short")[0][1]
        broker.ok("DELETE", f"/topics/short/partitions/0/records?before={end}")
        rewrite(broker, "keyed")
        rewrite(broker, "keyed")
        wait_until(lambda: broker.ends("short")[0][0] == end, "nothing was removed")
        for topic, (reader, pieces) in plans.items():
            assert len(pieces) > 4
            for _ in range(2):
                assert rows(reader, pieces) == before[topic], topic
        # Without a lease, changed records are reported instead of read, unless failOnDataLoss is off.
        broker.publish("keyed", numbered(200, first=5000, size=300, keys=10_000))  # keys that are not superseded
        late = planned(broker, topic="keyed", pinMaxAge="1ms", **where)
        lax = planned(broker, topic="keyed", pinMaxAge="1ms", failOnDataLoss="false", **where)
        end = broker.ends("keyed")[0][1]
        rewrite(broker, "keyed")

        def is_reported() -> bool:
            """Waits until the broker has applied retention; until then the planned segments still exist."""
            try:
                rows(*late)
            except DataLoss as loss:
                assert "is not leased any more" in str(loss)
                return True
            return False

        wait_until(is_reported, "what is held no longer is read all the same")

        def is_what_is_left() -> bool:
            """Waits until compaction has finished all segments, which it rewrites one by one."""
            found = rows(*lax)
            left = [(m["offset"], m["value"]) for m in broker.messages("keyed") if m["offset"] < end]
            return bool(left) and found == left

        wait_until(is_what_is_left, "other records are read than those that are left")
        # A restarted broker has no leases, but the segments still exist: nothing more is compacted once the current
        # compaction has ended.
        broker.ok("PATCH", "/topics/keyed", {"config": {"cleanup_policy": "delete"}})

        def is_served_after_a_restart() -> bool:
            now = [(m["offset"], m["value"]) for m in broker.messages("keyed")]
            plan = planned(broker, topic="keyed", **where)
            broker.stop()
            broker.start()
            try:
                return rows(*plan) == now
            except DataLoss:
                return False

        wait_until(is_served_after_a_restart, "what was planned before a restart is not served after it")
    finally:
        broker.close()


def test_a_stream_releases_its_leases_at_the_broker(tmp_path: "Path") -> None:
    from pyspark.sql.types import StructType

    from headrace.spark.source import HeadraceSource

    broker = RunningBroker(tmp_path, "--retention-interval", "100ms").start()
    try:
        broker.create("released", segment_size="64KB")
        options = {"bootstrap": broker.url, "topic": "released", "startingOffsets": "earliest"}
        stream = HeadraceSource(options).streamReader(StructType().add("offset", "long"))
        reached = stream.initialOffset()
        for done in (stream.commit, lambda _: stream.stop()):  # each finishes a batch
            publish_all_keys(broker, "released")
            start, end = broker.ends("released")[0]
            until = stream.latestOffset(reached, stream.getDefaultReadLimit())
            assert stream.partitions(reached, until)
            broker.ok("DELETE", f"/topics/released/partitions/0/records?before={end}")
            first = f"logs/*-released/{start:020d}.log"
            time.sleep(0.3)  # several runs of retention
            assert listed(broker.data, first), "what is being read was removed"
            done(until)
            wait_until(lambda first=first: not listed(broker.data, first), "what was read is still held")
            reached = until
    finally:
        broker.close()


def test_a_folder_without_lease_is_warned_about_at_load(tmp_path: "Path", caplog: "pytest.LogCaptureFixture") -> None:
    from headrace.spark.source import HeadraceSource

    def warned() -> list[str]:
        """Warnings of this test only, not of threads of earlier tests."""
        return [record.getMessage() for record in caplog.records if record.name == "headrace.spark"]

    broker = RunningBroker(tmp_path).start()
    try:
        broker.create("fixed")
        broker.publish("fixed", numbered(10))
        source = HeadraceSource({"path": broker.path, "topic": "fixed"})
        source.schema()
        assert not warned()
        (broker.data / "held").rmdir()
        (broker.data / "held").touch()  # links cannot be created, as in a read-only folder
        source.schema()
        [said] = warned()
        assert "'bootstrap'" in said and "retention" in said and broker.path in said
        caplog.clear()
        HeadraceSource({"path": broker.path, "topic": "fixed", "bootstrap": broker.url}).schema()
        planned(broker, topic="fixed", bootstrap=broker.url)
        assert not warned()
        planned(broker, topic="fixed")
        assert len(warned()) == 1
    finally:
        broker.close()


def test_a_stream_releases_its_links_after_each_batch(shared_broker: RunningBroker) -> None:
    from pyspark.sql.types import StructType

    from headrace.spark.source import HeadraceSource

    broker = shared_broker
    broker.create("released")
    broker.publish("released", numbered(10))
    source = HeadraceSource({"path": broker.path, "topic": "released", "startingOffsets": "earliest"})
    stream = source.streamReader(StructType().add("offset", "long"))
    others = set(listed(broker.data, "held/*"))

    def held() -> int:
        """Links of this query only: processes of earlier queries may still be releasing theirs."""
        return len(set(listed(broker.data, "held/*")) - others)

    first = stream.initialOffset()
    second = stream.latestOffset(first, stream.getDefaultReadLimit())
    assert stream.partitions(first, second) and held() == 1
    broker.publish("released", numbered(10))
    third = stream.latestOffset(second, stream.getDefaultReadLimit())
    stream.commit(second)
    assert held() == 0
    assert stream.partitions(second, third) and held() == 1
    stream.stop()
    assert held() == 0
