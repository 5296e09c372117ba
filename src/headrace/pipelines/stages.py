"""The graph of a pipeline for the dashboard: its topics, and the stages of each flow.

Topics come from the declaration. Stages are read from Spark's logical plan of the flow's function, so they show what
really runs. They are for display only.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headrace.pipelines.declare import Pipeline, Sink, Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

STAGES_MAX = 12
WORD_CHARS_MAX = 60
# Display names of Spark's logical operators. Operators not listed are shown with Spark's name.
WORDS = {
    "Project": "select",
    "Filter": "filter",
    "Aggregate": "aggregate",
    "EventTimeWatermark": "watermark",
    "Join": "join",
    "Union": "union",
    "Deduplicate": "deduplicate",
    "DeduplicateWithinWatermark": "deduplicate",
    "Generate": "explode",
    "Expand": "expand",
    "Window": "window",
    "Sort": "sort",
    "Sample": "sample",
    "RepartitionByExpression": "repartition",
    "Repartition": "repartition",
    "MapInArrow": "Arrow function",
    "MapInPandas": "pandas function",
    "PythonMapInArrow": "Arrow function",
    "FlatMapGroupsInPandas": "pandas function by key",
    "FlatMapGroupsInArrow": "Arrow function by key",
    "TransformWithState": "state by key",
    "TransformWithStateInPySpark": "state by key",
    "TransformWithStateInPandas": "state by key",
}
# Operators that only structure a plan.
HIDDEN = {"SubqueryAlias", "StreamingRelationV2", "StreamingRelation", "DataSourceV2Relation", "ResolvedHint", "View"}


def topics_of(source: Source) -> str:
    return source.topic or source.topics or source.topic_pattern or ""


def topic_of(sink: Sink) -> str | None:
    """None if every row names its topic."""
    return sink.topic


def declared(pipeline: Pipeline, flow: str) -> dict[str, Any]:
    """Sources and sink of a flow, from its declaration."""
    _, sink = pipeline.flows[flow]
    sources = [topics_of(pipeline.sources[name]) for name in pipeline.arguments(flow)]
    return {"function": flow, "sources": sources, "sink": topic_of(pipeline.sinks[sink])}


def stages_of(rows: "DataFrame") -> list[str]:
    """The operators that the rows pass, in order; empty if the plan is not accessible."""
    execution = getattr(getattr(rows, "_jdf", None), "queryExecution", None)
    if execution is None:  # Spark Connect does not expose plans
        return []
    found: list[str] = []
    for name in _operators(execution().analyzed()):
        word = WORDS.get(name, name)[:WORD_CHARS_MAX]
        if name not in HIDDEN and (not found or found[-1] != word):
            found.append(word)
    if len(found) > STAGES_MAX:
        found = [*found[: STAGES_MAX - 1], f"{len(found) - STAGES_MAX + 1} more"]
    return found


def _operators(plan: Any) -> Iterator[str]:
    """Names of a plan's operators, starting at the sources."""
    children = plan.children()
    for number in range(children.size()):
        yield from _operators(children.apply(number))
    yield plan.nodeName()


def work_of(last: Mapping[str, Any]) -> dict[str, Any]:
    """Details of a query's last batch: time per phase, rows of state, and the watermark."""
    state_rows = [int(operator.get("numRowsTotal", 0)) for operator in last.get("stateOperators") or ()]
    phases = {str(name): int(ms) for name, ms in (last.get("durationMs") or {}).items() if name != "triggerExecution"}
    found: dict[str, Any] = {"phases_ms": phases}
    if state_rows:
        found["state_rows"] = sum(state_rows)
    watermark = (last.get("eventTime") or {}).get("watermark")
    if watermark:
        found["watermark"] = str(watermark)
    return found
