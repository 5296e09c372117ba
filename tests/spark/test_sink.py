"""The sink: rows arrive in the right partition, exactly once."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.listing import listed
from tests.spark.proxy import Proxy
from tests.spark.world import WAIT_S_MAX, RunningBroker, numbered, started

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def source(spark: "SparkSession", broker: RunningBroker, topic: str, **options: Any) -> "DataFrame":
    chosen = {k: str(v) for k, v in options.items()}
    return (
        spark.readStream.format("headrace")
        .options(path=broker.path, topic=topic, startingOffsets="earliest", **chosen)
        .load()
    )


def copy(frame: "DataFrame", url: str, topic: str, checkpoint: Path) -> None:
    writer = frame.select("key", "value").writeStream.format("headrace")
    writer = writer.options(bootstrap=url, topic=topic, checkpointLocation=str(checkpoint))
    query = started(writer.trigger(availableNow=True).start)
    assert query.awaitTermination(WAIT_S_MAX), query.status


def values(broker: RunningBroker, topic: str) -> list[str]:
    return sorted((m["value"] for partition in broker.ends(topic) for m in broker.messages(topic, partition)), key=int)


def test_rows_are_partitioned_like_kafka_clients_do_with_all_fields(
    spark: "SparkSession", shared_broker: RunningBroker
) -> None:
    from headrace.record.codec import partition_for

    broker = shared_broker
    broker.create("typed", 4)
    frame = spark.sql(
        "select cast(id as string) key, concat('v', id) value, array(named_struct('key', 'n', 'value', "
        "cast(cast(id as string) as binary))) headers, timestamp_millis(1700000000000 + id) timestamp from range(200)"
    )
    frame.write.format("headrace").mode("append").options(bootstrap=broker.url, topic="typed").save()
    found = [m for p in range(4) for m in broker.messages("typed", p)]
    assert len(found) == 200
    for message in found:
        assert message["partition"] == partition_for(message["key"].encode(), 4)
        assert message["value"] == "v" + message["key"] and message["headers"] == {"n": message["key"]}
        assert message["timestamp"] == 1_700_000_000_000 + int(message["key"])


def test_columns_give_the_topic_and_partition_of_each_row(spark: "SparkSession", shared_broker: RunningBroker) -> None:
    broker = shared_broker
    broker.create("left", 2)
    frame = spark.sql(
        "select if(id % 2 = 0, 'left', 'right') topic, cast(null as binary) key, cast(id as string) value, "
        "if(id % 2 = 0, 1, null) partition from range(100)"
    )
    save = frame.write.format("headrace").mode("append").options(bootstrap=broker.url, compression="zstd")
    save.save()
    assert broker.ends("left") == {0: (0, 0), 1: (0, 50)}
    assert len(values(broker, "right")) == 50


def test_a_write_with_an_id_is_stored_once(spark: "SparkSession", shared_broker: RunningBroker) -> None:
    broker = shared_broker
    frame = spark.range(100).selectExpr("cast(id as string) value")
    for _ in range(3):
        options = {"bootstrap": broker.url, "topic": "ids", "writeId": "import-1"}
        frame.write.format("headrace").mode("append").options(**options).save()
    assert values(broker, "ids") == [str(n) for n in range(100)]
    frame.write.format("headrace").mode("append").options(bootstrap=broker.url, topic="ids").save()
    assert broker.count("ids") == 200


@pytest.mark.parametrize(
    ("columns", "options", "said"),
    [
        ("id", {"topic": "x"}, "no column 'id'"),
        ("id value", {"topic": "x"}, "column 'value' must be binary or string, not bigint"),
        ("cast(id as string) key", {"topic": "x"}, "column 'value' is missing"),
        ("cast(id as string) value", {}, "or a column 'topic'"),
        ("cast(id as string) value", {"topic": "x", "compression": "rar"}, "'compression': must be one of none"),
        (
            "cast(id as string) value",
            {"topic": "x", "startingOffsets": "latest"},
            "'startingOffsets': is only for reading",
        ),
    ],
)
def test_invalid_columns_and_options_of_the_sink_are_reported(
    spark: "SparkSession", shared_broker: RunningBroker, columns: str, options: dict[str, str], said: str
) -> None:
    frame = spark.range(3).selectExpr(columns)
    with pytest.raises(Exception) as error:
        frame.write.format("headrace").mode("append").options(bootstrap=shared_broker.url, **options).save()
    assert said in str(error.value)
    assert "'bootstrap': is needed" in str(_refused(spark))


def _refused(spark: "SparkSession") -> Exception:
    try:
        spark.range(1).selectExpr("'x' value").write.format("headrace").mode("append").option("topic", "x").save()
    except Exception as error:  # noqa: BLE001 - looked at by the caller
        return error
    raise AssertionError("a sink without a broker was taken")


def test_faults_during_the_commit_neither_lose_nor_repeat_rows(
    spark: "SparkSession", broker: RunningBroker, tmp_path: Path
) -> None:
    """The connection breaks at each step of a batch in turn; the query fails or recovers, and no row is lost or stored
    twice."""
    broker.create("in", 2)
    broker.create("out", 2)
    broker.publish("in", numbered(1000))
    faults = [
        ["stage:before"], ["stage:after"], ["commit:before"], ["commit:after"], ["commit:refuse"],
        ["commit:refuse-after"], ["commit:refuse", "discard:refuse"],
    ]  # fmt: skip
    with Proxy(broker.port) as proxy:
        for number, fault in enumerate(faults):
            broker.publish("in", numbered(100, first=1000 + number * 100))
            proxy.break_next(*fault)
            for _ in range(3):
                try:
                    copy(source(spark, broker, "in"), proxy.url, "out", tmp_path / "checkpoint")
                    break
                except Exception as error:  # noqa: BLE001 - any way of failing is fine, if nothing is lost
                    assert "Headrace" in str(error) or "headrace" in str(error)
            expected = [str(n) for n in range(1000 + (number + 1) * 100)]
            assert values(broker, "out") == expected, f"after {fault}"
        assert proxy.broken == [each for fault in faults for each in fault]
    # Spark repeats its last batch, because its commit record is deleted.
    last = max(listed(tmp_path / "checkpoint" / "commits", "[0-9]*"), key=lambda p: int(p.name))
    last.unlink()
    copy(source(spark, broker, "in"), broker.url, "out", tmp_path / "checkpoint")
    assert values(broker, "out") == [str(n) for n in range(1700)]
    # Only uploads that the last abort could not discard are left; the broker removes them later.
    assert len(listed(broker.data, "staging/*.staged")) == 1, "committed and aborted uploads stay behind"


def test_a_batch_larger_than_a_journal_entry_is_stored_completely(
    spark: "SparkSession", broker: RunningBroker, tmp_path: Path
) -> None:
    """A batch of 40 MB, more than one journal entry holds."""
    broker.create("big", 2)
    frame = spark.range(40_000, numPartitions=4).selectExpr(
        "cast(id as string) key", "concat(id, repeat('x', 1000)) value"
    )
    options = {"bootstrap": broker.url, "topic": "big", "writeId": "big"}
    for _ in range(2):
        frame.write.format("headrace").mode("append").options(**options).save()
    found = spark.read.format("headrace").options(path=broker.path, topic="big").load()
    row = found.selectExpr("count(*)", "count(distinct key)", "sum(length(value))").first()
    assert row is not None and tuple(row) == (40_000, 40_000, 40_000 * 1000 + sum(len(str(n)) for n in range(40_000)))
    assert not listed(broker.data, "staging/*.staged")
