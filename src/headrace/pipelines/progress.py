"""Derives lag, rows per second and batch time from Spark's progress reports."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.pipelines.stages import work_of
from headrace.spark.offsets import from_json


def lag_of(source: Mapping[str, Any]) -> int | None:
    """Number of records that a source has not read yet; None for sources other than Headrace."""
    try:
        reached = from_json(_parsed(source["endOffset"]))
        latest = from_json(_parsed(source["latestOffset"]))
    except Exception:  # noqa: BLE001 - other sources have other formats of offsets
        return None
    return sum(max(0, at.offset - reached[where].offset) for where, at in latest.items() if where in reached)


def _parsed(offset: Any) -> Mapping[str, Any]:
    parsed = json.loads(offset) if isinstance(offset, str) else offset
    if not isinstance(parsed, Mapping):
        raise TypeError(offset)
    return parsed


def details(
    progress: Mapping[str, Mapping[str, Any] | None],
    graph: Mapping[str, Mapping[str, Any]],
    rows_total: int,
    error: str | None,
) -> dict[str, Any]:
    """The report of a pipeline: totals over all flows, and for each flow its graph and its last batch."""
    numbers = {name: flow_details(last) for name, last in progress.items()}
    reported = [flow for flow in numbers.values() if flow]
    # The query for failed records reads the same input again: count it once.
    inputs = [flow for name, flow in numbers.items() if flow and not graph.get(name, {}).get("dead")]
    flows = {name: {**graph.get(name, {}), **numbers.get(name, {})} for name in {**graph, **numbers}}
    return {
        "lag": sum(flow["lag"] or 0 for flow in reported),
        "input_rows_per_second": round(sum(flow["input_rows_per_second"] for flow in inputs), 1),
        "rows_per_second": round(sum(flow["rows_per_second"] for flow in reported), 1),
        "rows_total": rows_total,
        "batch_ms": max((flow["batch_ms"] for flow in reported), default=0),
        "last_error": error,
        "flows": flows,
    }


def flow_details(last: Mapping[str, Any] | None) -> dict[str, Any]:
    if last is None:
        return {}
    lags = [lag for source in last["sources"] if (lag := lag_of(source)) is not None]
    return {
        "batch": last["batchId"],
        "rows": last["numInputRows"],
        "input_rows_per_second": round(last.get("inputRowsPerSecond") or 0.0, 1),
        "rows_per_second": round(last.get("processedRowsPerSecond") or 0.0, 1),
        "batch_ms": last.get("batchDuration") or last.get("durationMs", {}).get("triggerExecution", 0),
        "lag": sum(lags) if lags else None,
        **work_of(last),
    }


def line(name: str, state: str, report: Mapping[str, Any]) -> str:
    """The report as a line for the terminal."""
    rate, lag, batch = report["rows_per_second"], report["lag"], report["batch_ms"]
    return f"{name}  {state}  {rate:,.0f} rows/s  lag {lag:,}  batch {batch:,} ms  {report['rows_total']:,} rows"


def end_offsets(last: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    """The end offsets of a query's sources after its last batch."""
    for source in (last or {}).get("sources", ()):
        try:
            yield _parsed(source["endOffset"])
        except (TypeError, ValueError):
            continue
