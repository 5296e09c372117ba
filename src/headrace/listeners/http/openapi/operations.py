"""Building blocks of /openapi.json: operations, parameters, request bodies and responses."""

from typing import Any

from headrace.listeners.http.openapi.schemas import Schema, ref, schema_of
from headrace.listeners.http.server.problems import Problem
from headrace.wire.http.bodies import JSON, PROBLEM
from headrace.wire.http.messages import EncodingName, Offset, PartitionNumber, TimestampMs

Description = dict[str, Any]

OFFSET = schema_of(Offset)
PARTITION = schema_of(PartitionNumber)
TIMESTAMP = schema_of(TimestampMs)
TEXT: Schema = {"type": "string"}
BINARY: Schema = {"type": "string", "format": "binary"}
NAME: Schema = {"type": "string", "minLength": 1}
NAME_OF_255: Schema = {**NAME, "maxLength": 255}

PROBLEMS = {
    400: "The request is malformed; detail says how.",
    401: "Authentication is required, or the credentials are wrong.",
    403: "The user lacks the permission, or the request comes from a page of another origin.",
    404: "The topic, partition, cursor or path does not exist.",
    406: "The response is not available in any accepted media type.",
    408: "The request arrived too slowly.",
    409: "The request conflicts with the current state.",
    413: "The body, or a message in it, is too large.",
    415: "The content type or content encoding is not supported.",
    416: "The offset is outside the partition; start and end are its bounds.",
    429: "The broker is overloaded, or too many logins from this address failed. Nothing was stored; retry after the "
    "seconds in Retry-After.",
    503: "The broker cannot do this now: the disk is full or an index is behind (retry after the seconds in "
    "Retry-After), storage has failed, or the broker is stopping.",
}
ALWAYS = (400, 401, 403, 408, 429)
WRITING = (413, 415, 429, 503)
NO_CONTENT: dict[int, Description] = {204: {"description": "Deleted, durably."}}


def operation(name: str, summary: str, good: dict[int, Description], *problems: int, **more: Any) -> Description:
    """An operation with its successful responses and, by status, the problems that only some operations have."""
    responses = {str(status): response for status, response in good.items()}
    for status in sorted({*ALWAYS, *problems} - good.keys()):
        responses[str(status)] = {"description": PROBLEMS[status], "content": content(ref(Problem), PROBLEM)}
    return {"operationId": name, "summary": summary, "responses": responses, **more}


def content(schema: Schema, media: str = JSON) -> Description:
    return {media: {"schema": schema}}


def body(schema: Schema, media: str = JSON) -> Description:
    """A required request body."""
    return {"required": True, "content": content(schema, media)}


def ok(kind: type, description: str) -> dict[int, Description]:
    return {200: response(ref(kind), description)}


def response(schema: Schema, description: str, **headers: Schema) -> Description:
    described: Description = {"description": description, "content": content(schema)}
    if headers:
        described["headers"] = {name: {"schema": schema} for name, schema in headers.items()}
    return described


def in_path(name: str, schema: Schema, description: str) -> Description:
    return {"name": name, "in": "path", "required": True, "schema": schema, "description": description}


def in_query(name: str, schema: Schema, description: str) -> Description:
    return {"name": name, "in": "query", "schema": schema, "description": description}


TOPIC = in_path("topic", NAME, "Name of the topic, percent-encoded.")
PARTITION_IN_PATH = in_path("partition", PARTITION, "Number of the partition.")
FROM_OFFSET = in_query(
    "offset",
    {"anyOf": [OFFSET, {"enum": ["earliest", "latest"]}]},
    "First offset to read; default: earliest. Cannot be combined with timestamp.",
)
FROM_TIME = in_query("timestamp", TIMESTAMP, "Read from the first message at or after this time, in ms since 1970.")
ENCODING = in_query("encoding", schema_of(EncodingName), "base64: return all keys, values and header values as base64.")
