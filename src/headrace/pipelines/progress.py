"""From what Spark says of its queries to what people want to know: lag, rows a second, how long a batch takes."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from headrace.pipelines.stages import work_of
from headrace.spark.offsets import from_json


def lag_of(source: Mapping[str, Any]) -> int | None:
    """Records between what a source's batches have reached and what it has; None for somebody else's source."""
    try:
        reached = from_json(_parsed(source["endOffset"]))
        latest = from_json(_parsed(source["latestOffset"]))
    except Exception:  # noqa: BLE001 - another source writes its offsets in its own way
        return None
    return sum(max(0, at.offset - reached[place].offset) for place, at in latest.items() if place in reached)


def _parsed(offset: Any) -> Mapping[str, Any]:
    parsed = json.loads(offset) if isinstance(offset, str) else offset
    if not isinstance(parsed, Mapping):
        raise TypeError(offset)
    return parsed


def details(
    progress: Mapping[str, Mapping[str, Any] | None],
    drawn: Mapping[str, Mapping[str, Any]],
    rows_total: int,
    error: str | None,
) -> dict[str, Any]:
    """What a pipeline reports: numbers over all flows, and of each flow how it is drawn and what it did last."""
    numbers = {name: flow_details(last) for name, last in progress.items()}
    said = [flow for flow in numbers.values() if flow]
    # What failed is read by a query of its own, from the same records: they come in once.
    coming = [flow for name, flow in numbers.items() if flow and not drawn.get(name, {}).get("dead")]
    flows = {name: {**drawn.get(name, {}), **numbers.get(name, {})} for name in {**drawn, **numbers}}
    return {
        "lag": sum(flow["lag"] or 0 for flow in said),
        "input_rows_per_second": round(sum(flow["input_rows_per_second"] for flow in coming), 1),
        "rows_per_second": round(sum(flow["rows_per_second"] for flow in said), 1),
        "rows_total": rows_total,
        "batch_ms": max((flow["batch_ms"] for flow in said), default=0),
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


def line(name: str, state: str, said: Mapping[str, Any]) -> str:
    """One line for the terminal."""
    rate, lag, batch = said["rows_per_second"], said["lag"], said["batch_ms"]
    return f"{name}  {state}  {rate:,.0f} rows/s  lag {lag:,}  batch {batch:,} ms  {said['rows_total']:,} rows"


def end_offsets(last: Mapping[str, Any] | None) -> Iterable[Mapping[str, Any]]:
    """Where each source of a query stood after its last batch."""
    for source in (last or {}).get("sources", ()):
        try:
            yield _parsed(source["endOffset"])
        except (TypeError, ValueError):
            continue
