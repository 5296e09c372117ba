"""What a pipeline does, drawn as it is declared: which topics go in, what Spark does with the rows, where they go.

The topics are those of the declaration. The stages are read from the plan that Spark made of the flow's function, so
they say what really runs, whatever the function is called. They are for people: nothing is decided by them.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headrace.pipelines.declare import Pipeline, Sink, Source

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

STAGES_MAX = 12
WORD_CHARS_MAX = 60
# Spark's names of logical operators, and what people call them. What is not here is called as Spark calls it.
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
# How a plan is held together, not what it does.
UNSAID = {"SubqueryAlias", "StreamingRelationV2", "StreamingRelation", "DataSourceV2Relation", "ResolvedHint", "View"}


def topics_of(source: Source) -> str:
    return source.topic or source.topics or source.topic_pattern or ""


def topic_of(sink: Sink) -> str | None:
    """None where every row names its topic."""
    return sink.topic


def declared(pipeline: Pipeline, flow: str) -> dict[str, Any]:
    """The ends of a flow, as its declaration says them."""
    _, sink = pipeline.flows[flow]
    sources = [topics_of(pipeline.sources[name]) for name in pipeline.arguments(flow)]
    return {"function": flow, "sources": sources, "sink": topic_of(pipeline.sinks[sink])}


def stages_of(rows: "DataFrame") -> list[str]:
    """What Spark does with the rows on their way, in their order; nothing where the plan cannot be seen."""
    execution = getattr(getattr(rows, "_jdf", None), "queryExecution", None)
    if execution is None:  # a session on another machine keeps its plans to itself
        return []
    found: list[str] = []
    for name in _operators(execution().analyzed()):
        word = WORDS.get(name, name)[:WORD_CHARS_MAX]
        if name not in UNSAID and (not found or found[-1] != word):
            found.append(word)
    if len(found) > STAGES_MAX:
        found = [*found[: STAGES_MAX - 1], f"{len(found) - STAGES_MAX + 1} more"]
    return found


def _operators(plan: Any) -> Iterator[str]:
    """Names of a plan's operators, the sources first."""
    children = plan.children()
    for number in range(children.size()):
        yield from _operators(children.apply(number))
    yield plan.nodeName()


def work_of(last: Mapping[str, Any]) -> dict[str, Any]:
    """What a query's last batch says beside its rows: where its time went, what it holds, how far its clock is."""
    held = [int(operator.get("numRowsTotal", 0)) for operator in last.get("stateOperators") or ()]
    phases = {str(name): int(ms) for name, ms in (last.get("durationMs") or {}).items() if name != "triggerExecution"}
    said: dict[str, Any] = {"phases_ms": phases}
    if held:
        said["state_rows"] = sum(held)
    watermark = (last.get("eventTime") or {}).get("watermark")
    if watermark:
        said["watermark"] = str(watermark)
    return said
