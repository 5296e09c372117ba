"""GET /openapi.json: the OpenAPI document of the native HTTP API. Tests compare it with routes and responses."""

from starlette.requests import Request
from starlette.responses import Response

from headrace.config import Config
from headrace.listeners.http.native import types
from headrace.listeners.http.native.read import BYTES, LIMIT, LIMIT_MAX
from headrace.listeners.http.openapi import bulk, standby
from headrace.listeners.http.openapi.operations import (
    BINARY,
    ENCODING,
    FROM_OFFSET,
    FROM_TIME,
    NAME,
    NAME_OF_255,
    NO_CONTENT,
    OFFSET,
    PARTITION,
    PARTITION_IN_PATH,
    TEXT,
    TIMESTAMP,
    TOPIC,
    WRITING,
    Description,
    body,
    content,
    in_path,
    in_query,
    ok,
    operation,
    response,
)
from headrace.listeners.http.openapi.schemas import Schema, component_schemas, ref
from headrace.listeners.http.server.context import HttpContext, json_response
from headrace.listeners.http.server.requests import Query
from headrace.version import __version__
from headrace.wire.http.bodies import EVENTS, JSON, NDJSON, RAW
from headrace.wire.http.messages import Message, ReadMessage

CURSOR = in_path("cursor", NAME_OF_255, "Name of the cursor, at most 255 bytes.")
QUEUE = in_path("queue", NAME, "The name of the queue.")
VHOST = in_query("vhost", TEXT, "The virtual host of the queue; default `/`.")
KEY = in_path("key", NAME, "The key: any bytes, percent-encoded.")
WAIT = in_query(
    "wait",
    {"type": "string", "pattern": r"^[0-9]{1,9}(\.[0-9]{1,9})?(ms|s|m)?$"},
    "How long to wait for the first message: seconds, or with a unit (500ms). At most read_wait_max.",
)
LOG = in_query("log", OFFSET, "Log id from planning; 404 if the topic was deleted and created again since then.")
SEGMENT = in_query("segment", OFFSET, "First offset of a segment: read only this one. Requires generation.")
GENERATION = in_query("generation", OFFSET, "Generation of the segment, as a lease returned it.")
NEXT_OFFSET: Description = {"description": "The offset to read next.", "schema": OFFSET}


async def serve(context: HttpContext, request: Request) -> Response:
    Query(request)
    return json_response(document(context.config))


def document(config: Config) -> Description:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": __version__,
            "description": "Publish, read and follow messages; manage topics and cursors. A successful response to a "
            "publish means that the messages are on stable storage.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths(config),
        # {}: authentication is off while guest with its default password is the only user.
        "security": [{"basic": []}, {}],
        "components": {
            "schemas": component_schemas(),
            "securitySchemes": {"basic": {"type": "http", "scheme": "basic"}},
        },
    }


def paths(config: Config) -> Description:
    max_bytes = in_query(
        "max_bytes",
        {"type": "integer", "minimum": 1, "maximum": config.read_bytes_max},
        f"Approximate size of the response; default: {min(BYTES, config.read_bytes_max):,}. A larger single message is "
        "still returned.",
    )
    return {
        **_status(),
        **_topics(),
        "/topics/{topic}/messages": {"parameters": [TOPIC], "post": _publish(), "get": _read(max_bytes)},
        "/topics/{topic}/keys": {"parameters": [TOPIC], "get": _keys(max_bytes)},
        "/topics/{topic}/keys/{key}": {"parameters": [TOPIC, KEY], "get": _last_of_key()},
        "/topics/{topic}/stream": {"parameters": [TOPIC], "get": _stream()},
        "/topics/{topic}/partitions/{partition}/batches": {
            "parameters": [TOPIC, PARTITION_IN_PATH],
            "get": _batches(max_bytes),
        },
        **_queues(),
        **_cursors(),
        **bulk.paths(),
        **standby.paths(),
    }


def _status() -> Description:
    accepts = {
        200: response(ref(types.Health), "The broker accepts messages."),
        503: response(ref(types.Health), "The broker does not accept messages, for the given reason."),
    }
    prometheus = {200: {"description": "Prometheus text format.", "content": content(TEXT, "text/plain")}}
    openapi = {200: response({"type": "object"}, "This document.")}
    return {
        "/health": {"get": operation("health", "Check whether the broker accepts messages", accepts)},
        "/health/ready": {"get": operation("ready", "Readiness probe, the same as /health", accepts)},
        "/health/live": {"get": operation("live", "Liveness probe", ok(types.Live, "The process responds."))},
        "/status": {
            "get": operation("status", "Get version, settings and the last recovery", ok(types.Status, "Status."))
        },
        "/metrics": {"get": operation("metrics", "Metrics of the broker, for Prometheus", prometheus)},
        "/metrics/detailed": {"get": operation("metricsDetailed", "Metrics per partition and cursor", prometheus)},
        "/openapi.json": {"get": operation("openapi", "This document", openapi)},
    }


def _topics() -> Description:
    created = response(ref(types.Topic), "Created, durably.", Location=TEXT)
    return {
        "/topics": {
            "get": operation("listTopics", "List all topics, by name", ok(types.Topics, "Topics.")),
            "post": operation(
                "createTopic", "Create a topic", {201: created}, 409, *WRITING, requestBody=body(ref(types.NewTopic))
            ),
        },
        "/topics/{topic}": {
            "parameters": [TOPIC],
            "get": operation("describeTopic", "Get settings and sizes of a topic", ok(types.Topic, "The topic."), 404),
            "patch": operation(
                "configureTopic",
                "Change settings (null restores the broker's default) or add partitions",
                ok(types.Topic, "Changed, durably."),
                404,
                409,
                *WRITING,
                requestBody=body(ref(types.TopicChange)),
            ),
            "delete": operation("deleteTopic", "Delete a topic and its messages", NO_CONTENT, 404, 503),
        },
        "/topics/{topic}/offsets": {
            "parameters": [TOPIC],
            "get": operation(
                "offsets", "Get start offset and durable end of every partition", ok(types.Offsets, "Offsets."), 404
            ),
        },
    }


def _publish() -> Description:
    only_raw = "Only for raw messages."
    return operation(
        "publish",
        "Publish one message (raw or JSON) or many (a JSON array or NDJSON)",
        ok(types.Published, "Stored, in the order of the request."),
        404,
        *WRITING,
        description="Responds after the messages are on stable storage: all of them, or none. An unknown topic is "
        "created, unless auto_create_topics is off. For a raw message, every header `Headrace-Header-NAME` becomes the "
        "message's header `name`. The body may be compressed (Content-Encoding gzip, deflate or zstd).",
        parameters=[
            in_query("key", TEXT, only_raw),
            in_query("partition", PARTITION, only_raw),
            in_query("timestamp", TIMESTAMP, only_raw),
        ],
        requestBody={
            "required": True,
            "content": {
                JSON: {"schema": {"anyOf": [ref(Message), {"type": "array", "items": ref(Message), "minItems": 1}]}},
                NDJSON: {"schema": {"type": "string", "description": "One Message per line."}},
                RAW: {"schema": BINARY},
                "text/plain": {"schema": TEXT},
            },
        },
    )


def _read(max_bytes: Description) -> Description:
    def only_raw(schema: Schema) -> Description:
        return {"description": "Only in raw responses.", "schema": schema}

    return operation(
        "read",
        "Read messages from an offset or a time",
        {
            200: {
                "description": "Messages. A raw response is the value of one message; headers hold the rest.",
                "headers": {
                    "Headrace-Next-Offset": NEXT_OFFSET,
                    "Headrace-Offset": only_raw(OFFSET),
                    "Headrace-Partition": only_raw(PARTITION),
                    "Headrace-Timestamp": only_raw({"type": "integer"}),
                    "Headrace-Key-Base64": only_raw(TEXT),
                    "Headrace-Tombstone": only_raw({"enum": ["true"]}),
                },
                "content": {JSON: {"schema": ref(types.Page)}, NDJSON: {"schema": TEXT}, RAW: {"schema": BINARY}},
            },
            204: {
                "description": "Only for raw responses: there is no message yet.",
                "headers": {"Headrace-Next-Offset": NEXT_OFFSET},
            },
        },
        *(404, 406, 416, 429, 503),
        parameters=[
            in_query("partition", PARTITION, "Required if the topic has more than one partition."),
            FROM_OFFSET,
            FROM_TIME,
            in_query(
                "limit",
                {"type": "integer", "minimum": 1, "maximum": LIMIT_MAX},
                f"Maximum number of messages; default: {LIMIT:,}. A raw response has one.",
            ),
            max_bytes,
            WAIT,
            in_query("format", {"enum": ["json", "ndjson", "raw"]}, "Overrides the Accept header."),
            ENCODING,
        ],
    )


def _keys(max_bytes: Description) -> Description:
    return operation(
        "keys",
        "Get the last messages of a range of keys, from a topic with key_index",
        ok(types.KeyPage, "The messages, in the order of their keys' bytes. A page may be empty and have a next one."),
        *(404, 409, 503),
        parameters=[
            in_query("from", TEXT, "First key: any bytes, percent-encoded. To continue, send `next` of the last page."),
            in_query("to", TEXT, "End of the range; this key is not part of it."),
            in_query("prefix", TEXT, "Only keys with this prefix."),
            in_query("limit", {"type": "integer", "minimum": 1, "maximum": 1000, "default": 100}, "Messages per page."),
            max_bytes,
            ENCODING,
        ],
    )


def _last_of_key() -> Description:
    return operation(
        "lastOfKey",
        "Get the last message of a key, from a topic with key_index",
        ok(ReadMessage, "The message."),
        *(404, 409, 503),
        parameters=[ENCODING],
    )


def _stream() -> Description:
    positions = {"type": "string", "pattern": r"^[0-9]{1,10}:[0-9]{1,19}(,[0-9]{1,10}:[0-9]{1,19})*$"}
    return operation(
        "stream",
        "Follow a topic as server-sent events",
        {200: {"description": "Events.", "content": content(TEXT, EVENTS)}},
        *(404, 406, 416, 503),
        description="Each event is a ReadMessage. Its id contains the next offset of every partition; a client that "
        "sends it back as Last-Event-ID resumes there. An event named `gap` reports messages that could not be read. A "
        "comment is sent every 15 seconds as a heartbeat.",
        parameters=[
            in_query("partition", PARTITION, "Follow only this partition; default: all."),
            FROM_OFFSET,
            FROM_TIME,
            ENCODING,
            in_query("last_event_id", TEXT, "Instead of the header, for clients that cannot set one."),
            {"name": "Last-Event-ID", "in": "header", "schema": positions},
        ],
    )


def _batches(max_bytes: Description) -> Description:
    return operation(
        "batches",
        "Read whole record batches (Kafka's format, version 2) as they are stored",
        {
            200: {
                "description": "Consecutive batches; empty at the end of the partition.",
                "headers": {"Headrace-Next-Offset": NEXT_OFFSET},
                "content": content(BINARY, RAW),
            }
        },
        *(404, 416, 429, 503),
        description="The first batch may begin before the requested offset.",
        parameters=[FROM_OFFSET, FROM_TIME, max_bytes, WAIT, LOG, SEGMENT, GENERATION],
    )


def _queues() -> Description:
    settled = ok(types.Settled, "Settled, durably.")
    errors = (404, 409, 503)
    paths: Description = {}
    for name, summary, answer, kind in (
        ("receive", "Take messages from a queue", ok(types.ReceivedMessages, "Messages."), types.ReceiveRequest),
        ("ack", "Remove received messages", settled, types.Receipt),
        ("nack", "Return received messages to the queue, or dead-letter them", settled, types.Settlement),
        ("extend", "Start the visibility timeout of received messages anew", settled, types.Extension),
    ):
        described = operation(name, summary, answer, *errors, *WRITING, requestBody=body(ref(kind)))
        paths[f"/queues/{{queue}}/{name}"] = {"parameters": [QUEUE, VHOST], "post": described}
    return paths


def _cursors() -> Description:
    return {
        "/cursors": {"get": operation("listCursors", "List all cursors with their lag", ok(types.Cursors, "Cursors."))},
        "/cursors/{cursor}": {
            "parameters": [CURSOR],
            "get": operation("getCursor", "Get the positions of a cursor", ok(types.Cursor, "The cursor."), 404),
            "put": operation(
                "putCursor",
                "Move a cursor, creating it if needed",
                ok(types.Cursor, "Moved, durably."),
                *(404, 409, 416, *WRITING),
                requestBody=body(ref(types.CursorChange)),
            ),
            "delete": operation("deleteCursor", "Delete a cursor and its pin on retention", NO_CONTENT, 404, 503),
        },
    }
