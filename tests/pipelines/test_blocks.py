"""The building blocks, each in a running pipeline."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from headrace.errors import InvalidInput
from headrace.pipelines import Pipeline, Sink, Source, blocks
from headrace.pipelines.run import BrokerEndpoint, PipelineFailed, PipelineRunner
from tests.listing import listed
from tests.spark.world import RunningBroker

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# PySpark warns about pandas 3 even where it does not use it.
pytestmark = pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
DAY_MS = 1_700_000_000_000


def pipeline(name: str, **more: Any) -> Pipeline:
    chosen: dict[str, Any] = {"sources": {"orders": Source(f"{name}.in")}, "sinks": {"out": Sink(f"{name}.out")}}
    return Pipeline(name, **(chosen | more))


def run(spark: "SparkSession", broker: RunningBroker, declared: Pipeline, folder: Path) -> list[str]:
    said: list[str] = []
    where = BrokerEndpoint(broker.url, local=True)
    assert where.path == broker.path, "on one machine the files are read themselves"
    PipelineRunner(declared, spark, where, folder / "checkpoints", once=True, say=said.append).run()
    return said


def publish(broker: RunningBroker, topic: str, rows: Iterator[Any] | list[Any]) -> None:
    broker.create(topic)
    broker.publish(topic, ({"value": row if isinstance(row, str) else json.dumps(row)} for row in rows))


def results(broker: RunningBroker, topic: str) -> list[Any]:
    return [json.loads(m["value"]) for p in broker.ends(topic) for m in broker.messages(topic, p)]


def test_json_is_decoded_and_bad_records_are_kept_with_the_reason(
    spark: "SparkSession", shared_broker: RunningBroker, tmp_path: Path
) -> None:
    declared = pipeline("json", dead_letter="json.dead")
    rows = [{"id": 1, "n": 5}, "nonsense", {"id": 2, "n": 50}, {"id": "x", "n": 1}, {"id": 3}]
    publish(shared_broker, "json.in", rows)

    @declared.flow(to="out")
    def double(orders: Any) -> Any:
        good, bad = blocks.decode_json(orders, "id int, n int")
        return blocks.encode_json(good.where("n > 10").selectExpr("id", "n * 2 n"), key="id"), bad

    run(spark, shared_broker, declared, tmp_path)
    assert results(shared_broker, "json.out") == [{"id": 2, "n": 100}]
    dead = shared_broker.messages("json.dead")
    assert [m["value"] for m in dead] == ["nonsense", '{"id": "x", "n": 1}']
    assert dead[0]["headers"]["headrace.error"] == "the value is not JSON with the schema id int, n int"
    assert dead[0]["headers"]["headrace.place"] == "json.in/0/1"


def test_a_json_field_replaces_the_column_of_the_same_name(spark: "SparkSession") -> None:
    """Regression: with a field `timestamp` next to the column `timestamp`, Spark found the name ambiguous."""
    values = [b'{"id": 1, "timestamp": "then", "Key": "mine"}', b"nonsense"]
    rows = [(b"k", value, "t", 0, offset) for offset, value in enumerate(values)]
    records = spark.createDataFrame(rows, "key binary, value binary, topic string, partition int, offset long")
    records = records.selectExpr("*", "timestamp '2026-01-01 00:00:00' timestamp")
    good, bad = blocks.decode_json(records, "id int, timestamp string, Key string")
    assert [tuple(row) for row in good.select("id", "timestamp", "key", "offset").collect()] == [(1, "then", "mine", 0)]
    assert [bytes(row.key) for row in bad.collect()] == [b"k"]


def test_rows_are_enriched_routed_and_recompressed(
    spark: "SparkSession", shared_broker: RunningBroker, tmp_path: Path
) -> None:
    sinks = {"out": Sink(compression="zstd")}
    declared = pipeline("route", sinks=sinks)
    publish(shared_broker, "route.in", [{"country": c, "n": n} for n, c in enumerate(["de", "fr", "xx"] * 50)])
    countries = spark.createDataFrame([("de", "Germany"), ("fr", "France")], "country string, name string")

    @declared.flow(to="out")
    def route(orders: Any) -> Any:
        from pyspark.sql import functions as f

        good, _ = blocks.decode_json(orders, "country string, n int")
        named = blocks.enrich(good.select("country", "n"), countries, "country")
        rows = blocks.encode_json(named, key="country")
        known = f.col("value").contains("name")
        return blocks.fan_out(rows, f.when(known, "route.known").otherwise("route.unknown"))

    run(spark, shared_broker, declared, tmp_path)
    known = results(shared_broker, "route.known")
    assert len(known) == 100 and {r["name"] for r in known} == {"Germany", "France"}
    assert results(shared_broker, "route.unknown")[0] == {"country": "xx", "n": 2}
    [segment] = listed(shared_broker.data, "logs/*-route-known/*.log")
    from headrace.record import codec

    assert {info.codec for info in codec.scan(segment.read_bytes())} == {4}


def test_duplicates_within_a_window_are_dropped_and_windows_are_summed(
    spark: "SparkSession", shared_broker: RunningBroker, tmp_path: Path
) -> None:
    sources = {"orders": Source("windows.in", options={"maxOffsetsPerTrigger": "4"})}
    declared = pipeline("windows", sources=sources)
    shared_broker.create("windows.in", retention_ms="forever")
    rows = [(1, 0), (1, 1), (2, 2), (3, 61), (3, 62), (4, 130), (5, 500)]
    shared_broker.publish(
        "windows.in", ({"value": json.dumps({"id": i, "n": 1}), "timestamp": DAY_MS + s * 1000} for i, s in rows)
    )
    # Later timestamps, so that the watermark passes the first windows and their state is emitted.
    shared_broker.publish("windows.in", [{"value": '{"id": 9, "n": 1}', "timestamp": DAY_MS + 900_000}])

    @declared.flow(to="out")
    def sums(orders: Any) -> Any:
        from pyspark.sql import functions as f

        good, _ = blocks.decode_json(orders, "id int, n int")
        once = blocks.deduplicate(good, "id", within="30 seconds")
        summed = once.groupBy(f.window("timestamp", "1 minute")).agg(f.sum("n").alias("n"))
        return blocks.encode_json(summed.select(f.unix_millis("window.start").alias("start"), "n"))

    run(spark, shared_broker, declared, tmp_path)
    found = {r["start"] - DAY_MS // 60_000 * 60_000: r["n"] for r in results(shared_broker, "windows.out")}
    assert found == {0: 2, 60_000: 1, 120_000: 1, 480_000: 1}


def test_an_aggregate_is_emitted_when_its_window_has_ended(
    spark: "SparkSession", shared_broker: RunningBroker, tmp_path: Path
) -> None:
    declared = pipeline("aggregate")
    shared_broker.create("aggregate.in", retention_ms="forever")
    shared_broker.publish(
        "aggregate.in",
        ({"key": k, "value": str(n), "timestamp": DAY_MS + n * 10_000} for n in range(12) for k in ("a", "b")),
    )
    shared_broker.publish("aggregate.in", [{"key": "z", "value": "0", "timestamp": DAY_MS + 3_600_000}])

    @declared.flow(to="out")
    def sums(orders: Any) -> Any:
        from pyspark.sql import functions as f

        rows = orders.selectExpr("cast(key as string) k", "cast(cast(value as string) as int) n", "timestamp")
        values = {"total": f.sum("n"), "count": f.count("*")}
        return blocks.encode_json(blocks.aggregate(rows, window="1 minute", by=["k"], values=values, late="5 seconds"))

    run(spark, shared_broker, declared, tmp_path)
    found = results(shared_broker, "aggregate.out")
    assert {r["k"] for r in found} == {"a", "b"}
    assert sum(r["total"] for r in found if r["k"] == "a") == sum(range(12))
    assert sum(r["count"] for r in found) == 24


def test_state_is_kept_per_key_by_a_stateful_processor(
    spark: "SparkSession", shared_broker: RunningBroker, tmp_path: Path
) -> None:
    from pyspark.sql import Row
    from pyspark.sql.streaming.stateful_processor import StatefulProcessor

    class Counter(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.seen = handle.getValueState("seen", "n int")

        def handleInputRows(self, key: Any, rows: Any, timers: Any) -> Any:  # noqa: N802
            before = self.seen.get()[0] if self.seen.exists() else 0
            count = before + sum(1 for _ in rows)
            self.seen.update((count,))
            yield Row(k=key[0], n=count)

        def close(self) -> None:
            pass

    sinks = {"out": Sink("state.out", output_mode="update")}
    sources = {"orders": Source("state.in", options={"maxOffsetsPerTrigger": "10"})}
    declared = pipeline("state", sources=sources, sinks=sinks)
    shared_broker.create("state.in")
    shared_broker.publish("state.in", ({"key": f"k{n % 2}", "value": "x"} for n in range(20)))

    @declared.flow(to="out")
    def count(orders: Any) -> Any:
        keyed = orders.selectExpr("cast(key as string) k")
        return blocks.encode_json(blocks.stateful(keyed, by="k", processor=Counter(), schema="k string, n int"))

    run(spark, shared_broker, declared, tmp_path)
    found = results(shared_broker, "state.out")
    assert sorted((r["k"], r["n"]) for r in found) == [("k0", 5), ("k0", 10), ("k1", 5), ("k1", 10)]


def test_python_functions_run_on_arrow_batches_and_as_arrow_udfs(
    spark: "SparkSession", shared_broker: RunningBroker, tmp_path: Path
) -> None:
    import pyarrow as pa
    import pyarrow.compute as pc
    from pyspark.sql import functions as f

    def upper(batches: Any) -> Any:
        for batch in batches:
            text = pc.utf8_upper(batch.column(0).cast(pa.string()))
            yield pa.RecordBatch.from_arrays([text], names=["value"])

    declared = pipeline("arrow")
    shared_broker.create("arrow.in")
    shared_broker.publish("arrow.in", [{"value": "abc"}, {"value": "def"}])

    @declared.flow(to="out")
    def shout(orders: Any) -> Any:
        louder = blocks.map_arrow(orders.select("value"), upper, "value string")
        # pyspark's stub requires the type of function.
        exclaim = f.arrow_udf(lambda v: pc.binary_join_element_wise(v, "!", ""), "string")  # type: ignore[call-overload]
        return louder.select(exclaim("value").alias("value"))

    run(spark, shared_broker, declared, tmp_path)
    assert [m["value"] for m in shared_broker.messages("arrow.out")] == ["ABC!", "DEF!"]


def test_a_pipeline_reports_its_state_and_moves_its_cursor_to_the_end(
    spark: "SparkSession", shared_broker: RunningBroker, tmp_path: Path
) -> None:
    declared = pipeline("report")
    publish(shared_broker, "report.in", [{"n": n} for n in range(30)])

    @declared.flow(to="out")
    def copy(orders: Any) -> Any:
        return orders.select("key", "value")

    said = run(spark, shared_broker, declared, tmp_path)
    assert any("rows/s" in line for line in said)
    state = shared_broker.ok("GET", "/pipelines/report")
    assert state["state"] == "stopped" and state["details"]["rows_total"] == 30 and state["details"]["lag"] == 0
    assert shared_broker.ok("GET", "/cursors/report.copy.orders")["lag"] == 0
    metrics = shared_broker.call("GET", "/metrics/detailed")[1].decode()
    assert 'headrace_pipeline_rows_total{pipeline="report"} 30.0' in metrics


def test_an_error_in_a_flow_is_reported_in_one_line(
    spark: "SparkSession", shared_broker: RunningBroker, tmp_path: Path
) -> None:
    declared = pipeline("failing")
    publish(shared_broker, "failing.in", [{"n": 1}])

    @declared.flow(to="out")
    def fail(orders: Any) -> Any:
        return orders.selectExpr("cast(raise_error('the reason') as string) value")

    with pytest.raises(PipelineFailed, match="the reason"):
        run(spark, shared_broker, declared, tmp_path)
    state = shared_broker.ok("GET", "/pipelines/failing")
    assert state["state"] == "failed" and "the reason" in state["details"]["last_error"]


def test_an_invalid_declaration_is_refused() -> None:
    with pytest.raises(InvalidInput, match="no sink 'nowhere'"):
        pipeline("p").flow(to="nowhere")
    with pytest.raises(InvalidInput, match="parameter 'customers' of flow"):
        pipeline("p").flow(to="out")(lambda customers: customers)
    with pytest.raises(InvalidInput, match="such as 500ms"):
        pipeline("p", trigger="often")
    with pytest.raises(InvalidInput, match="one of topic"):
        pipeline("p", sources={"x": Source()})
