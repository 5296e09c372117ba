"""Batch reads, from the files and through the broker."""

import json
from typing import TYPE_CHECKING, Any

import pytest

from headrace.spark.folder_access import FolderAccess
from tests.listing import listed
from tests.spark.world import RunningBroker, numbered

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WAYS = ["path", "bootstrap"]


def options(broker: RunningBroker, way: str, **more: Any) -> dict[str, str]:
    where = {"path": broker.path} if way == "path" else {"bootstrap": broker.url}
    return where | {name: str(value) for name, value in more.items()}


def load(spark: "SparkSession", chosen: dict[str, str], schema: str | None = None) -> "DataFrame":
    reader = spark.read.format("headrace").options(**chosen)
    return (reader.schema(schema) if schema else reader).load()


@pytest.fixture(scope="module")
def orders(shared_broker: RunningBroker) -> RunningBroker:
    """3,000 messages in two partitions with segments of 64 KB, so that there is something to split."""
    shared_broker.create("orders", 2, segment_size="64KB")
    for part in range(6):
        shared_broker.publish("orders", numbered(500, first=500 * part, size=100))
    return shared_broker


@pytest.mark.parametrize("way", WAYS)
def test_every_record_is_read_once_with_the_columns_of_the_kafka_source(
    spark: "SparkSession", orders: RunningBroker, way: str
) -> None:
    frame = load(spark, options(orders, way, topic="orders", splitBytes="64KB"))
    assert frame.columns == ["key", "value", "topic", "partition", "offset", "timestamp", "timestampType"]
    rows = frame.collect()
    assert len(rows) == 3000
    for partition in (0, 1):
        expected = orders.messages("orders", partition)
        found = sorted((r for r in rows if r.partition == partition), key=lambda r: r.offset)
        assert [(r.offset, bytes(r.key).decode(), bytes(r.value).decode()) for r in found] == [
            (m["offset"], m["key"], m["value"]) for m in expected
        ]
        assert [round(r.timestamp.timestamp() * 1000) for r in found] == [m["timestamp"] for m in expected]
    assert {(r.topic, r.timestampType) for r in rows} == {("orders", 0)}


def test_columns_that_are_never_null_are_declared_so(spark: "SparkSession", orders: RunningBroker) -> None:
    """Spark generates code without null checks for these columns, so the declaration must be true, and must not be
    made for others."""
    never = {"topic", "partition", "offset", "timestamp", "timestampType"}
    chosen = options(orders, "path", topic="orders", columns="key,value,topic,partition,offset,timestamp,timestampType")
    assert {field.name for field in load(spark, chosen).schema if not field.nullable} == never
    stream = spark.readStream.format("headrace").options(**chosen).load()
    assert {field.name for field in stream.schema if not field.nullable} == never
    with pytest.raises(Exception, match="column 'value' must be nullable"):
        load(spark, options(orders, "path", topic="orders"), "offset bigint NOT NULL, value binary NOT NULL").count()


def test_the_size_to_read_is_estimated_without_an_index(orders: RunningBroker) -> None:
    access = FolderAccess(orders.path, committed=True, fail_on_data_loss=True)
    for place, state in access.states(["orders"]).items():
        whole = access.size_between(place, state, 0, state.end)
        assert whole > 64 << 10 and access.estimate_size(place, state, 0, state.end) == whole
        assert access.estimate_size(place, state, 0, state.end // 2) == pytest.approx(whole / 2, rel=0.1)
        assert access.estimate_size(place, state, state.end, state.end) == 0


def test_redundant_checks_of_arrow_are_off(spark: "SparkSession") -> None:
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    assert jvm.System.getProperty("arrow.enable_unsafe_memory_access") == "true"
    assert jvm.System.getProperty("arrow.enable_null_check_for_get") == "false"


def test_a_large_topic_is_split_into_many_tasks(spark: "SparkSession", orders: RunningBroker) -> None:
    frame = load(spark, options(orders, "path", topic="orders", splitBytes="64KB"))
    assert frame.rdd.getNumPartitions() >= 4


@pytest.mark.parametrize("way", WAYS)
def test_offsets_select_the_records(spark: "SparkSession", orders: RunningBroker, way: str) -> None:
    start = json.dumps({"orders": {"0": 100, "1": -1}})
    end = json.dumps({"orders": {"0": 137, "1": -1}})
    chosen = options(orders, way, topic="orders", startingOffsets=start, endingOffsets=end)
    found = load(spark, chosen).select("partition", "offset").orderBy("offset").collect()
    assert [(r.partition, r.offset) for r in found] == [(0, offset) for offset in range(100, 137)]


@pytest.mark.parametrize("way", WAYS)
def test_timestamps_select_the_records(spark: "SparkSession", broker: RunningBroker, way: str) -> None:
    broker.create("times", retention_ms="forever")
    broker.publish("times", ({"value": str(n), "timestamp": 1_700_000_000_000 + n * 1000} for n in range(50)))
    chosen = options(
        broker, way, topic="times", startingTimestamp="1700000010000", endingTimestamp="2023-11-14T22:13:40Z"
    )
    found = load(spark, chosen).select("offset").orderBy("offset").collect()
    assert [r.offset for r in found] == list(range(10, 20))


@pytest.mark.parametrize("way", WAYS)
def test_headers_and_nulls_are_preserved(spark: "SparkSession", broker: RunningBroker, way: str) -> None:
    broker.create("shapes")
    broker.publish(
        "shapes",
        [
            {"key": "a", "value": "x", "headers": {"trace": "1", "kind": "new"}},
            {"value": "no key"},
            {"key": "gone", "value": None},
        ],
    )
    rows = load(spark, options(broker, way, topic="shapes", columns="offset,key,value,headers")).collect()
    rows.sort(key=lambda r: r.offset)
    assert [(h.key, bytes(h.value)) for h in rows[0].headers] == [("trace", b"1"), ("kind", b"new")]
    assert rows[1].key is None and rows[1].headers == []
    assert bytes(rows[2].key) == b"gone" and rows[2].value is None


def test_only_the_columns_of_a_given_schema_are_decoded(spark: "SparkSession", orders: RunningBroker) -> None:
    frame = load(spark, options(orders, "path", topic="orders"), "offset bigint, partition int")
    assert frame.columns == ["offset", "partition"]
    assert frame.distinct().count() == 3000


@pytest.mark.parametrize("way", WAYS)
def test_several_topics_are_read_at_once(spark: "SparkSession", broker: RunningBroker, way: str) -> None:
    for number in range(10):
        broker.create(f"many-{number}")
        broker.publish(f"many-{number}", numbered(10 + number))
    broker.create("other")
    broker.publish("other", numbered(5))
    counted = load(spark, options(broker, way, topicPattern="many-.*")).groupBy("topic").count().collect()
    assert {r["topic"]: r["count"] for r in counted} == {f"many-{n}": 10 + n for n in range(10)}
    both = load(spark, options(broker, way, topics="many-1, other"))
    assert both.count() == 16


def test_an_empty_topic_is_an_empty_table(spark: "SparkSession", broker: RunningBroker) -> None:
    broker.create("empty", 3)
    for way in WAYS:
        assert load(spark, options(broker, way, topic="empty")).count() == 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"startingOfsets": "earliest"}, "did you mean startingOffsets"),
        ({"startingOffsets": "soon"}, "'startingOffsets': must be earliest, latest or JSON"),
        ({"startingOffsets": '{"orders": {"9": 1}}'}, ""),
        ({"maxOffsetsPerTrigger": "many"}, "'maxOffsetsPerTrigger': must be a whole number"),
        ({"maxOffsetsPerTrigger": "5", "maxBytesPerTrigger": "1MB"}, "cannot be combined with 'maxOffsetsPerTrigger'"),
        ({"splitBytes": "big"}, "'splitBytes': must be a size"),
        ({"columns": "offset,colour"}, "no such column: 'colour'"),
        ({"verifyCrc": "maybe"}, "'verifyCrc': must be true or false"),
        ({"isolation": "dirty"}, "'isolation': must be one of read_committed, read_uncommitted"),
        ({"cursor": "job"}, "'cursor': needs 'bootstrap'"),
        ({"pin": "true"}, "'pin': needs a 'cursor'"),
        ({"pinMaxAge": "long"}, "'pinMaxAge': must be a duration with a unit"),
        ({"topics": "orders"}, "cannot be combined with topics"),
        ({"topic": "nowhere"}, "topic 'nowhere' does not exist"),
        ({"path": "/nowhere"}, "/nowhere is not a data folder"),
        ({"compression": "zstd"}, "'compression': is only for writing"),
        ({"startingTimestamp": "yesterday"}, "'startingTimestamp': must be milliseconds"),
    ],
)
def test_an_invalid_option_is_reported_at_load(
    spark: "SparkSession", orders: RunningBroker, wrong: dict[str, str], said: str
) -> None:
    from pyspark.errors import AnalysisException

    if not said:
        with pytest.raises(Exception, match="topic 'orders' has no partition 9"):
            load(spark, options(orders, "path", topic="orders") | wrong).count()
        return
    with pytest.raises(AnalysisException) as error:
        load(spark, options(orders, "path", topic="orders") | wrong)
    assert said in str(error.value)


def test_a_torn_tail_is_ignored(spark: "SparkSession", broker: RunningBroker) -> None:
    """Readers must stop at the visible end and ignore half a batch after it, which a writer leaves for a moment."""
    broker.create("torn")
    broker.publish("torn", numbered(100))
    [segment] = listed(broker.data, "logs/*-torn/*.log")
    whole = segment.read_bytes()
    with segment.open("ab") as file:
        file.write(whole[: len(whole) // 2])
    assert load(spark, options(broker, "path", topic="torn")).count() == 100
    with segment.open("ab") as file:
        file.write(b"\xff" * 1000)
    assert load(spark, options(broker, "path", topic="torn")).count() == 100


def test_a_damaged_batch_is_reported(spark: "SparkSession", broker: RunningBroker) -> None:
    broker.create("damaged")
    broker.publish("damaged", numbered(100))
    [segment] = listed(broker.data, "logs/*-damaged/*.log")
    raw = bytearray(segment.read_bytes())
    raw[-20] ^= 0xFF
    segment.write_bytes(raw)
    frame = load(spark, options(broker, "path", topic="damaged"))
    with pytest.raises(Exception, match="is damaged at byte"):
        frame.count()


def test_deleted_records_are_reported_unless_fail_on_data_loss_is_off(
    spark: "SparkSession", tmp_path_factory: pytest.TempPathFactory
) -> None:
    broker = RunningBroker(tmp_path_factory.mktemp("gone"), "--retention-interval", "100ms").start()
    try:
        broker.create("short", segment_size="64KB", retention_bytes="64KB")
        for part in range(10):
            broker.publish("short", numbered(200, first=part * 200, size=100))
        from tests.spark.world import wait_until

        wait_until(lambda: broker.ends("short")[0][0] > 0, "retention removed nothing")
        start, end = broker.ends("short")[0]
        for way in WAYS:
            chosen = options(broker, way, topic="short", startingOffsets='{"short": {"0": 0}}')
            with pytest.raises(Exception, match="failOnDataLoss"):
                load(spark, chosen).count()
            found = load(spark, chosen | {"failOnDataLoss": "false"}).selectExpr("min(offset)", "count(*)").first()
            assert found is not None and found[0] >= start and found[0] + found[1] == end
    finally:
        broker.close()


WORKER = """
import gc, sys
from pyspark.sql.types import StructType
from headrace.spark.source import HeadraceSource

source = HeadraceSource(dict(path=sys.argv[1], topic="orders"))
columns = {"key": "binary", "value": "binary", "topic": "string", "partition": "integer", "timestamp": "timestamp"}
schema = StructType()
for name, kind in columns.items():
    schema.add(name, kind)
reader = source.reader(schema)
rows = sum(batch.num_rows for piece in reader.partitions() for batch in reader.read(piece))
frozen = gc.get_freeze_count()
rows += sum(batch.num_rows for piece in reader.partitions() for batch in reader.read(piece))
print(rows, "pandas" in sys.modules, frozen > 10_000, gc.get_freeze_count() == frozen)
"""


def test_a_worker_does_not_import_pandas_and_freezes_loaded_objects(orders: RunningBroker) -> None:
    """Both cost more than the reading itself: Spark collects garbage over all loaded objects after every task."""
    import subprocess
    import sys

    command = [sys.executable, "-W", "ignore", "-c", WORKER, orders.path]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    assert answer.stdout.split() == ["6000", "False", "True", "True"]
