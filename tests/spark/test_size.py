"""A million records, and slices that outlive what they were cut from."""

import uuid
from typing import TYPE_CHECKING

from headrace.record.partitioned import BinaryRows, PartitionedWriter
from headrace.spark.broker import BrokerLink
from tests.spark.world import RunningBroker, numbered, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

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


def test_a_lease_keeps_files_that_retention_is_done_with(tmp_path: "Path") -> None:
    """What a batch was planned on stays until it is done, though the log has moved on."""
    from headrace.log.reading import LogFiles

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
        link.lease([(kept.log_id, kept.segment, kept.generation)], 60_000, "test")
        broker.ok("DELETE", f"/topics/short/partitions/0/records?before={pieces[-1].base_offset}")
        wait_until(
            lambda: not list(broker.data.glob(f"logs/*/{gone.segment:020d}.log")), "what nobody leased is still there"
        )
        with files.open(kept) as source:
            assert len(source.read(1 << 20)) > 0
        link.close()
    finally:
        broker.close()
