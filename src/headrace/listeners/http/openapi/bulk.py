"""The part of /openapi.json for bulk reading, segment maintenance, exactly-once sinks and pipelines."""

from headrace.listeners.http.native import types
from headrace.listeners.http.openapi.operations import (
    BINARY,
    NAME_OF_255,
    NO_CONTENT,
    OFFSET,
    PARTITION_IN_PATH,
    TOPIC,
    WRITING,
    Description,
    body,
    in_path,
    in_query,
    ok,
    operation,
    response,
)
from headrace.listeners.http.openapi.schemas import ref
from headrace.wire.http.bodies import RAW

SEGMENT = in_path("segment", OFFSET, "First offset of the segment.")
STAGED = in_path(
    "staged", {"type": "string", "pattern": "^[0-9a-f]{32}$"}, "Name of the upload: 32 hexadecimal digits."
)
WRITER = in_path("writer", NAME_OF_255, "Name of the writer, such as the id of a query.")
BATCH = in_path("batch", OFFSET, "Number of the writer's batch; numbers only increase.")
PIPELINE = in_path("pipeline", NAME_OF_255, "Name of the pipeline.")


def paths() -> Description:
    return {**_reading(), **_segments(), **_sinks(), **_pipelines()}


def _reading() -> Description:
    return {
        "/topics/{topic}/log": {
            "parameters": [TOPIC],
            "get": operation("logs", "Get log id, epoch and ends of each partition", ok(types.Logs, "Logs."), 404),
        },
        "/leases": {
            "post": operation(
                "lease",
                "Keep segments readable while a bulk read runs",
                ok(types.Leased, "Leased until the given time."),
                404,
                409,
                *WRITING,
                requestBody=body(ref(types.Lease)),
            )
        },
    }


def _segments() -> Description:
    return {
        "/topics/{topic}/compact": {
            "parameters": [TOPIC],
            "post": operation(
                "compact",
                "Compact sealed segments: keep the latest record of each key",
                ok(types.Compacted, "Compacted."),
                404,
                409,
                503,
            ),
        },
        "/topics/{topic}/partitions/{partition}/records": {
            "parameters": [TOPIC, PARTITION_IN_PATH],
            "delete": operation(
                "deleteRecords",
                "Delete the records before an offset",
                NO_CONTENT,
                404,
                416,
                503,
                parameters=[in_query("before", OFFSET, "The new start offset.") | {"required": True}],
            ),
        },
        "/topics/{topic}/partitions/{partition}/segments/{segment}": {
            "parameters": [TOPIC, PARTITION_IN_PATH, SEGMENT],
            "post": operation(
                "replaceSegment",
                "Replace a sealed segment by an upload, as its next generation",
                ok(types.SegmentSizes, "Replaced."),
                404,
                409,
                *WRITING,
                requestBody=body(ref(types.SegmentReplacement)),
            ),
        },
        "/topics/{topic}/partitions/{partition}/segments/{segment}/archive": {
            "parameters": [TOPIC, PARTITION_IN_PATH, SEGMENT],
            "post": operation(
                "archiveSegment",
                "Replace a sealed segment by the Parquet file that was written for it",
                ok(types.SegmentSizes, "Archived."),
                404,
                409,
                *WRITING,
                requestBody=body(ref(types.SegmentArchive)),
            ),
        },
    }


def _sinks() -> Description:
    return {
        "/staging/{staged}": {
            "parameters": [STAGED],
            "put": operation(
                "stage",
                "Upload record batches, which stay invisible until they are committed",
                {201: response(ref(types.Staged), "Stored, durably.")},
                *WRITING,
                requestBody=body(BINARY, RAW),
            ),
            "delete": operation("discard", "Discard an upload, if it exists", NO_CONTENT),
        },
        "/sinks": {
            "get": operation("listWriters", "List all writers and their last batch", ok(types.Writers, "Writers.")),
        },
        "/sinks/{writer}": {
            "parameters": [WRITER],
            "get": operation("getWriter", "Get the last batch of a writer", ok(types.Writer, "The writer."), 404),
        },
        "/sinks/{writer}/batches/{batch}": {
            "parameters": [WRITER, BATCH],
            "put": operation(
                "commitStaged",
                "Commit uploads, all or none, once per writer and batch",
                ok(types.SinkOutcome, "Stored by this request or an earlier one."),
                404,
                409,
                *WRITING,
                requestBody=body(ref(types.SinkCommit)),
            ),
        },
    }


def _pipelines() -> Description:
    return {
        "/pipelines": {
            "get": operation("listPipelines", "List all pipelines and their state", ok(types.Pipelines, "Pipelines.")),
        },
        "/pipelines/{pipeline}": {
            "parameters": [PIPELINE],
            "get": operation(
                "getPipeline", "Get state, lag and rates of a pipeline", ok(types.Pipeline, "The pipeline."), 404
            ),
            "put": operation(
                "reportPipeline",
                "Report the state of a pipeline",
                ok(types.Pipeline, "Stored; stop_requested says whether to stop."),
                409,
                *WRITING,
                requestBody=body(ref(types.PipelineReport)),
            ),
            "delete": operation("forgetPipeline", "Delete the report of a pipeline", NO_CONTENT, 404),
        },
        "/pipelines/{pipeline}/stop": {
            "parameters": [PIPELINE],
            "post": operation(
                "stopPipeline",
                "Ask a pipeline to stop after its current batch",
                ok(types.Pipeline, "The pipeline will see the request with its next report."),
                404,
            ),
        },
    }
