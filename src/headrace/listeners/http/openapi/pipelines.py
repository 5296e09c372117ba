"""The part of /openapi.json for bulk readers, exactly-once writers and pipelines."""

from typing import Any

from headrace.listeners.http.native.bulk_read import HOLDER_CHARS_MAX, LEASE_MS_MAX, SLICES_MAX
from headrace.listeners.http.native.segments import GAIN
from headrace.listeners.http.openapi.schemas import INT32, INT64, TEXT, TIMESTAMP, Schema, array, record, ref

CLOSED = {"additionalProperties": False}


def schemas() -> dict[str, Schema]:
    stored = record({"topic": TEXT, "partition": INT32, "base_offset": INT64, "next_offset": INT64})
    line = {"batch": INT64, "records": INT64, "updated": TIMESTAMP, "stored": array(stored)}
    pipeline = {
        "name": TEXT,
        "state": {"enum": ["starting", "running", "stopped", "failed", "lost"]},
        "started": TIMESTAMP,
        "updated": TIMESTAMP,
        "stop_requested": {"type": "boolean"},
        "details": {"type": "object"},
    }
    log = {
        "partition": INT32,
        "log": INT64,
        "epoch": INT64,
        "start": INT64,
        "end": INT64,
        "stable_end": INT64,
        "durable_end": INT64,
        "held_from": {"type": ["integer", "null"]},
        "size_bytes": INT64,
    }
    segment = {"log": INT64, "segment": INT64, "generation": INT64}
    part = {"staged": TEXT, "topic": TEXT, "partition": INT32, "position": INT64, "length": INT64}
    return {
        "Logs": record({"topic": TEXT, "partitions": array(record(log))}),
        "Lease": record(
            {
                "slices": array(record(segment, **CLOSED), maxItems=SLICES_MAX),
                "ranges": array(
                    record({"topic": TEXT, "partition": INT32, "start": INT64, "end": INT64}, **CLOSED),
                    maxItems=SLICES_MAX,
                ),
                "for_ms": {"type": "integer", "minimum": 1, "maximum": LEASE_MS_MAX},
                "holder": {"type": "string", "minLength": 1, "maxLength": HOLDER_CHARS_MAX},
            },
            "holder",
            "slices",
            "ranges",
            oneOf=[{"required": ["slices"]}, {"required": ["ranges"]}],
            **CLOSED,
        ),
        "Leased": record(
            {
                "until": TIMESTAMP,
                "gone": array(record(segment)),
                "ranges": array(
                    record({"segments": array(record({"segment": INT64, "generation": INT64, "next_offset": INT64}))})
                ),
            },
            "gone",
            "ranges",
        ),
        "SinkCommit": record({"parts": array(record(part, **CLOSED))}, **CLOSED),
        "SinkOutcome": record({"duplicate": {"type": "boolean"}, **line}),
        "Writer": record({"writer": TEXT, **line}),
        "PipelineReport": record(
            {"state": {"enum": ["starting", "running", "stopped", "failed"]}, "details": {"type": "object"}}, **CLOSED
        ),
        "Pipeline": record(pipeline),
    }


def paths(kit: Any) -> dict[str, Any]:
    """`kit` is openapi.py, whose vocabulary this speaks."""
    staged = kit.in_path(
        "staged", {"type": "string", "pattern": "^[0-9a-f]{32}$"}, "Name of the upload: 32 hexadecimal digits."
    )
    writer = kit.in_path("writer", {"type": "string", "minLength": 1, "maxLength": 255}, "Who writes: a query's id.")
    batch = kit.in_path("batch", INT64, "Number of the writer's batch; they only grow.")
    pipeline = kit.in_path("pipeline", {"type": "string", "minLength": 1, "maxLength": 255}, "Name of the pipeline.")

    number = kit.in_path("partition", INT32, "Number of the partition.")

    def operation(name: str, summary: str, good: dict[int, dict[str, Any]], *refusals: int, **more: Any) -> Any:
        return {"operationId": name, "summary": summary, "responses": kit.answers(good, *refusals), **more}

    def body(schema: Schema, media: str = kit.JSON) -> dict[str, Any]:
        return {"required": True, "content": kit.content(schema, media)}

    def found(name: str, text: str) -> dict[int, dict[str, Any]]:
        return {200: kit.json_of(ref(name), text)}

    staged_answer = kit.json_of(record({"bytes": INT64, "records": INT64}), "It is on stable storage.")
    gone = {204: {"description": "It is gone."}}
    return {
        "/topics/{topic}/log": {
            "parameters": [kit.TOPIC],
            "get": operation("logs", "Id, epoch and every end of each partition", found("Logs", "The logs."), 404),
        },
        "/topics/{topic}/compact": {
            "parameters": [kit.TOPIC],
            "post": operation(
                "compact",
                "Keep the latest record of each key, in sealed segments",
                {200: kit.json_of(record({"partitions": array(record({"partition": INT32, **GAIN}))}), "Done.")},
                404,
                409,
                503,
            ),
        },
        "/topics/{topic}/partitions/{partition}/records": {
            "parameters": [kit.TOPIC, number],
            "delete": operation(
                "deleteRecords",
                "Remove the records before an offset",
                gone,
                404,
                416,
                503,
                parameters=[kit.in_query("before", INT64, "The new first offset.") | {"required": True}],
            ),
        },
        "/topics/{topic}/partitions/{partition}/segments/{segment}": {
            "parameters": [kit.TOPIC, number, kit.in_path("segment", INT64, "First offset of the segment.")],
            "post": operation(
                "replaceSegment",
                "Make an upload the next generation of a sealed segment",
                {200: kit.json_of(record(GAIN), "Replaced.")},
                404,
                409,
                *kit.WRITING,
                requestBody=body(record({"generation": INT64, "staged": TEXT}, **CLOSED)),
            ),
        },
        "/topics/{topic}/partitions/{partition}/segments/{segment}/archive": {
            "parameters": [kit.TOPIC, number, kit.in_path("segment", INT64, "First offset of the segment.")],
            "post": operation(
                "archiveSegment",
                "Put the Parquet file that was written for a sealed segment in its place",
                {200: kit.json_of(record(GAIN), "Archived.")},
                404,
                409,
                *kit.WRITING,
                requestBody=body(record({"generation": INT64}, **CLOSED)),
            ),
        },
        "/leases": {
            "post": operation(
                "lease",
                "Keep segments for whoever plans to read them",
                {200: kit.json_of(ref("Leased"), "They stay until then.")},
                404,
                409,
                *kit.WRITING,
                requestBody=body(ref("Lease")),
            )
        },
        "/staging/{staged}": {
            "parameters": [staged],
            "put": operation(
                "stage",
                "Upload record batches that no reader sees before they are committed",
                {201: staged_answer},
                *kit.WRITING,
                requestBody=body({"type": "string", "format": "binary"}, kit.RAW),
            ),
            "delete": operation("discard", "Throw an upload away; one that is not there is fine", gone),
        },
        "/sinks": {
            "get": operation(
                "listWriters",
                "Every writer of the ledger and its last batch",
                {200: kit.json_of(record({"writers": array(ref("Writer"))}), "The writers.")},
            )
        },
        "/sinks/{writer}": {
            "parameters": [writer],
            "get": operation("getWriter", "A writer's last batch", found("Writer", "The writer."), 404),
        },
        "/sinks/{writer}/batches/{batch}": {
            "parameters": [writer, batch],
            "put": operation(
                "commitStaged",
                "Store uploads, all or none, once per writer and batch",
                found("SinkOutcome", "They are stored, now or earlier."),
                404,
                409,
                *kit.WRITING,
                requestBody=body(ref("SinkCommit")),
            ),
        },
        "/pipelines": {
            "get": operation(
                "listPipelines",
                "Every pipeline with its state",
                {200: kit.json_of(record({"pipelines": array(ref("Pipeline"))}), "The pipelines.")},
            )
        },
        "/pipelines/{pipeline}": {
            "parameters": [pipeline],
            "get": operation("getPipeline", "State, lag and rates of one", found("Pipeline", "The pipeline."), 404),
            "put": operation(
                "reportPipeline",
                "What a pipeline says of itself",
                found("Pipeline", "Kept."),
                409,
                *kit.WRITING,
                requestBody=body(ref("PipelineReport")),
            ),
            "delete": operation("forgetPipeline", "Forget a pipeline", gone, 404),
        },
        "/pipelines/{pipeline}/stop": {
            "parameters": [pipeline],
            "post": operation("stopPipeline", "Ask it to stop after its batch", found("Pipeline", "Asked."), 404),
        },
    }
