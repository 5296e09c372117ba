"""GET /openapi.json: the interface, described for programs. Tests hold it against routes and answers."""

import sys
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.config import Config
from headrace.listeners.http.native.read import BYTES, LIMIT, LIMIT_MAX
from headrace.listeners.http.openapi import pipelines, standby
from headrace.listeners.http.openapi.schemas import (
    ENCODING_NAME,
    INT32,
    INT64,
    TEXT,
    TIMESTAMP,
    Schema,
    array,
    record,
    ref,
    schemas,
)
from headrace.listeners.http.server.context import HttpContext, json_answer
from headrace.listeners.http.server.requests import Query
from headrace.version import __version__
from headrace.wire.http.bodies import EVENTS, JSON, NDJSON, PROBLEM, RAW

REFUSALS = {
    400: "Something in the request makes no sense; the detail says what.",
    401: "Users exist, and the request does not say who sends it, or says it wrongly.",
    403: "The user has no right to this, or the request comes from a page of another site.",
    404: "There is no such topic, partition, cursor or address.",
    406: "The answer does not come in the form asked for.",
    408: "The request came too slowly.",
    409: "It contradicts what is there.",
    413: "The body, or a message in it, is too large.",
    415: "The content type or content encoding is not understood.",
    416: "The offset is outside what the partition holds; start and end say what it holds.",
    429: "Too much is on its way, or too many logins from there failed; Retry-After says when to come back. "
    "Nothing of the request was kept.",
    503: "Messages are not taken: the disk is full (with Retry-After) or has failed, or the broker stops. Or an index "
    "is behind (with Retry-After).",
}
EVERYWHERE = (400, 401, 403, 408, 429)
WRITING = (413, 415, 429, 503)


async def serve(site: HttpContext, request: Request) -> Response:
    Query(request)
    return json_answer(document(site.config))


def document(config: Config) -> dict[str, Any]:
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Headrace",
            "version": __version__,
            "description": "Publish, read and follow messages; look after topics and cursors. An answer to a "
            "publish means that the messages are on stable storage.",
            "license": {"name": "Apache 2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths(config),
        # {}: while guest is the only user, nobody is asked.
        "security": [{"basic": []}, {}],
        "components": {
            "schemas": {**schemas(), **pipelines.schemas(), **standby.schemas()},
            "securitySchemes": {"basic": {"type": "http", "scheme": "basic"}},
        },
    }


def content(schema: Schema, media: str = JSON) -> dict[str, Any]:
    return {media: {"schema": schema}}


def answers(good: dict[int, dict[str, Any]], *refusals: int) -> dict[str, Any]:
    found: dict[str, Any] = {str(status): answer for status, answer in good.items()}
    for status in sorted({*EVERYWHERE, *refusals}):
        if str(status) not in found:
            found[str(status)] = {
                "description": REFUSALS[status],
                "content": content(ref("Problem"), PROBLEM),
            }
    return found


def json_of(schema: Schema, description: str, **headers: Schema) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": description, "content": content(schema)}
    if headers:
        answer["headers"] = {name: {"schema": schema} for name, schema in headers.items()}
    return answer


def in_path(name: str, schema: Schema, description: str) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": schema, "description": description}


def in_query(name: str, schema: Schema, description: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "schema": schema, "description": description}


TOPIC = in_path("topic", {"type": "string", "minLength": 1}, "Name of the topic, percent-encoded.")
CURSOR = in_path(
    "cursor", {"type": "string", "minLength": 1, "maxLength": 255}, "Name of the cursor, at most 255 bytes."
)
KEY = in_path("key", {"type": "string", "minLength": 1}, "The key: any bytes, percent-encoded.")
OFFSET = in_query(
    "offset",
    {"anyOf": [INT64, {"enum": ["earliest", "latest"]}]},
    "First offset to read; the default is the earliest there is. Not together with timestamp.",
)
SINCE = in_query("timestamp", TIMESTAMP, "Read from the first message at or after this time, in ms since 1970.")
TEXT_FORM = in_query("encoding", ENCODING_NAME, "base64: every key, value and header value as base64.")
WAIT = in_query(
    "wait",
    {"type": "string", "pattern": r"^[0-9]{1,9}(\.[0-9]{1,9})?(ms|s|m)?$"},
    "How long to wait when there is nothing yet: seconds, or with a unit (500ms). Capped by read_wait_max.",
)
LOG = in_query("log", INT64, "The log that was planned on: 404 when the topic was deleted and made anew since then.")
SEGMENT = in_query("segment", INT64, "First offset of a segment: read that one alone. Together with generation.")
GENERATION = in_query("generation", INT64, "The generation of the segment that was planned on, as a lease answered it.")
NEXT_OFFSET: Schema = {"description": "The offset to go on from.", "schema": INT64}


def paths(config: Config) -> dict[str, Any]:
    max_bytes = in_query(
        "max_bytes",
        {"type": "integer", "minimum": 1, "maximum": config.read_bytes_max},
        f"About how many bytes of messages to answer with; {min(BYTES, config.read_bytes_max):,} if not "
        "said. A larger single message still comes.",
    )
    return {
        "/health": {"get": _health("Whether the broker takes messages")},
        "/health/ready": {"get": _health("The same, for orchestrators")},
        "/health/live": {
            "get": {
                "operationId": "live",
                "summary": "Whether the broker is there at all",
                "responses": answers({200: json_of(ref("Live"), "It is.")}),
            }
        },
        "/status": {
            "get": {
                "operationId": "status",
                "summary": "What runs, since when, with which settings, and what the last start found",
                "responses": answers({200: json_of(ref("Status"), "The status.")}),
            }
        },
        "/metrics": {"get": _metrics("metrics", "Counters of the broker, for Prometheus")},
        "/metrics/detailed": {"get": _metrics("metricsDetailed", "Counters per partition and cursor")},
        "/openapi.json": {
            "get": {
                "operationId": "openapi",
                "summary": "This document",
                "responses": answers({200: json_of({"type": "object"}, "This document.")}),
            }
        },
        "/topics": _topics(),
        "/topics/{topic}": _topic(),
        "/topics/{topic}/offsets": {
            "parameters": [TOPIC],
            "get": {
                "operationId": "offsets",
                "summary": "First offset, and first offset not yet durable, of every partition",
                "responses": answers({200: json_of(ref("Offsets"), "The offsets.")}, 404),
            },
        },
        "/topics/{topic}/messages": {"parameters": [TOPIC], "post": _publish(), "get": _read(max_bytes)},
        "/topics/{topic}/keys/{key}": {"parameters": [TOPIC, KEY], "get": _last_of_key()},
        "/topics/{topic}/stream": {"parameters": [TOPIC], "get": _stream()},
        "/topics/{topic}/partitions/{partition}/batches": {
            "parameters": [TOPIC, in_path("partition", INT32, "Number of the partition.")],
            "get": _batches(max_bytes),
        },
        "/cursors": {
            "get": {
                "operationId": "listCursors",
                "summary": "Every cursor with its lag",
                "responses": answers({200: json_of(record({"cursors": array(ref("Cursor"))}), "The cursors.")}),
            }
        },
        "/cursors/{cursor}": _cursor(),
        **pipelines.paths(sys.modules[__name__]),
        **standby.paths(sys.modules[__name__]),
    }


def _health(summary: str) -> dict[str, Any]:
    return {
        "operationId": "health" if "takes" in summary else "ready",
        "summary": summary,
        "responses": answers(
            {
                200: json_of(ref("Health"), "It does."),
                503: json_of(ref("Health"), "It does not; the reason says why."),
            }
        ),
    }


def _metrics(name: str, summary: str) -> dict[str, Any]:
    return {
        "operationId": name,
        "summary": summary,
        "responses": answers(
            {200: {"description": "Prometheus' text format.", "content": content(TEXT, "text/plain")}}
        ),
    }


def _topics() -> dict[str, Any]:
    return {
        "get": {
            "operationId": "listTopics",
            "summary": "Every topic, by name",
            "responses": answers({200: json_of(record({"topics": array(ref("Summary"))}), "The topics.")}),
        },
        "post": {
            "operationId": "createTopic",
            "summary": "Create a topic",
            "requestBody": {"required": True, "content": content(ref("NewTopic"))},
            "responses": answers({201: json_of(ref("Topic"), "Created, durably.", Location=TEXT)}, 409, *WRITING),
        },
    }


def _topic() -> dict[str, Any]:
    return {
        "parameters": [TOPIC],
        "get": {
            "operationId": "describeTopic",
            "summary": "One topic with its settings and sizes",
            "responses": answers({200: json_of(ref("Topic"), "The topic.")}, 404),
        },
        "patch": {
            "operationId": "configureTopic",
            "summary": "Change settings (null takes one back to the broker's) or add partitions",
            "requestBody": {"required": True, "content": content(ref("TopicChange"))},
            "responses": answers({200: json_of(ref("Topic"), "Changed, durably.")}, 404, 409, *WRITING),
        },
        "delete": {
            "operationId": "deleteTopic",
            "summary": "Delete a topic and its messages",
            "responses": answers({204: {"description": "Gone, durably."}}, 404, 503),
        },
    }


def _publish() -> dict[str, Any]:
    only_raw = "Of a raw message only."
    return {
        "operationId": "publish",
        "summary": "Publish one message (raw or JSON) or many (a JSON array or NDJSON)",
        "description": "Answered after the messages are on stable storage: all of them, or none. An unknown "
        "topic is created, unless that is switched off. For a raw message every header "
        "`Headrace-Header-NAME` becomes the message's header `name`. The body may be compressed "
        "(Content-Encoding gzip, deflate or zstd).",
        "parameters": [
            in_query("key", TEXT, only_raw),
            in_query("partition", INT32, only_raw),
            in_query("timestamp", TIMESTAMP, only_raw),
        ],
        "requestBody": {
            "required": True,
            "content": {
                JSON: {"schema": {"anyOf": [ref("Message"), array(ref("Message"), minItems=1)]}},
                NDJSON: {"schema": {"type": "string", "description": "One Message per line."}},
                RAW: {"schema": {"type": "string", "format": "binary"}},
                "text/plain": {"schema": TEXT},
            },
        },
        "responses": answers({200: json_of(ref("Published"), "Stored, in the order sent.")}, 404, *WRITING),
    }


def _read(max_bytes: dict[str, Any]) -> dict[str, Any]:
    return {
        "operationId": "read",
        "summary": "Read messages from an offset or a time on",
        "parameters": [
            in_query("partition", INT32, "Needed when the topic has more than one."),
            OFFSET,
            SINCE,
            in_query(
                "limit",
                {"type": "integer", "minimum": 1, "maximum": LIMIT_MAX},
                f"At most this many; {LIMIT:,} if not said. A raw answer is always one.",
            ),
            max_bytes,
            WAIT,
            in_query("format", {"enum": ["json", "ndjson", "raw"]}, "Instead of the Accept header."),
            TEXT_FORM,
        ],
        "responses": answers(
            {
                200: {
                    "description": "The messages. Raw: the value of one message, the rest in headers.",
                    "headers": {
                        "Headrace-Next-Offset": NEXT_OFFSET,
                        "Headrace-Offset": {"description": "Raw only.", "schema": INT64},
                        "Headrace-Partition": {"description": "Raw only.", "schema": INT32},
                        "Headrace-Timestamp": {"description": "Raw only.", "schema": {"type": "integer"}},
                        "Headrace-Key-Base64": {"description": "Raw only.", "schema": TEXT},
                        "Headrace-Tombstone": {"description": "Raw only.", "schema": {"enum": ["true"]}},
                    },
                    "content": {
                        JSON: {"schema": ref("Page")},
                        NDJSON: {"schema": TEXT},
                        RAW: {"schema": {"type": "string", "format": "binary"}},
                    },
                },
                204: {
                    "description": "Raw only: there is no message yet.",
                    "headers": {"Headrace-Next-Offset": NEXT_OFFSET},
                },
            },
            404,
            406,
            416,
            429,
            503,
        ),
    }


def _last_of_key() -> dict[str, Any]:
    return {
        "operationId": "lastOfKey",
        "summary": "The last message of a key, of a topic with key_index",
        "parameters": [TEXT_FORM],
        "responses": answers({200: json_of(ref("ReadMessage"), "The message.")}, 404, 409, 503),
    }


def _stream() -> dict[str, Any]:
    return {
        "operationId": "stream",
        "summary": "Follow a topic as server-sent events",
        "description": "Each event is a ReadMessage; its id carries the next offset of every partition, and "
        "goes on from there when it comes back as Last-Event-ID. An event named `gap` says what "
        "could not be had. A comment comes every 15 seconds.",
        "parameters": [
            in_query("partition", INT32, "Only this one; all if not said."),
            OFFSET,
            SINCE,
            TEXT_FORM,
            in_query("last_event_id", TEXT, "Instead of the header, for clients that cannot set one."),
            {
                "name": "Last-Event-ID",
                "in": "header",
                "schema": {
                    "type": "string",
                    "pattern": r"^[0-9]{1,10}:[0-9]{1,19}(,[0-9]{1,10}:[0-9]{1,19})*$",
                },
            },
        ],
        "responses": answers(
            {200: {"description": "The events.", "content": content(TEXT, EVENTS)}}, 404, 406, 416, 503
        ),
    }


def _batches(max_bytes: dict[str, Any]) -> dict[str, Any]:
    return {
        "operationId": "batches",
        "summary": "Read whole record batches (Kafka's format, version 2) as they are stored",
        "description": "The first batch may begin before the offset asked for.",
        "parameters": [OFFSET, SINCE, max_bytes, WAIT, LOG, SEGMENT, GENERATION],
        "responses": answers(
            {
                200: {
                    "description": "Batches, one after the other; nothing at the end of the partition.",
                    "headers": {"Headrace-Next-Offset": NEXT_OFFSET},
                    "content": content({"type": "string", "format": "binary"}, RAW),
                }
            },
            404,
            416,
            429,
            503,
        ),
    }


def _cursor() -> dict[str, Any]:
    return {
        "parameters": [CURSOR],
        "get": {
            "operationId": "getCursor",
            "summary": "Where a cursor stands",
            "responses": answers({200: json_of(ref("Cursor"), "The cursor.")}, 404),
        },
        "put": {
            "operationId": "putCursor",
            "summary": "Move a cursor, or make it",
            "requestBody": {"required": True, "content": content(ref("CursorChange"))},
            "responses": answers({200: json_of(ref("Cursor"), "Moved, durably.")}, 404, 409, 416, *WRITING),
        },
        "delete": {
            "operationId": "deleteCursor",
            "summary": "Delete a cursor and its hold on retention",
            "responses": answers({204: {"description": "Gone, durably."}}, 404, 503),
        },
    }
