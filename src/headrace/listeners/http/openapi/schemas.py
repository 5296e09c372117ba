"""The shapes that /openapi.json describes: messages, topics, cursors, problems."""

from typing import Any

from headrace.broker.streams.streams import TOPIC_NAME
from headrace.config import STREAM_SETTINGS, Setting
from headrace.listeners.http.native.cursors import AGE_MS_MAX
from headrace.listeners.http.server.problems import CODES, CONNECTION_CODES
from headrace.listeners.http.server.requests import OFFSET_MAX
from headrace.wire.http.messages import PARTITION_MAX, TIMESTAMP_MAX

Schema = dict[str, Any]

INT64: Schema = {"type": "integer", "format": "int64", "minimum": 0, "maximum": OFFSET_MAX}
INT32: Schema = {"type": "integer", "format": "int32", "minimum": 0, "maximum": PARTITION_MAX}
TIMESTAMP: Schema = {"type": "integer", "format": "int64", "minimum": 0, "maximum": TIMESTAMP_MAX}
TEXT: Schema = {"type": "string"}
TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
ENCODING_NAME: Schema = {"enum": ["text", "base64"]}
ENCODING: Schema = {
    "description": "How key and value are written; an object names key, value and headers apart.",
    "anyOf": [
        ENCODING_NAME,
        {
            "type": "object",
            "properties": {"key": ENCODING_NAME, "value": ENCODING_NAME, "headers": ENCODING_NAME},
            "additionalProperties": False,
        },
    ],
}


def ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def array(items: Schema, **more: Any) -> Schema:
    return {"type": "array", "items": items, **more}


def record(properties: dict[str, Schema], *optional: str, **more: Any) -> Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, **more}


def schemas() -> dict[str, Schema]:
    place = {"partition": INT32, "offset": INT64}
    headers = {"anyOf": [{"type": "object"}, array(array({}, minItems=2, maxItems=2))]}
    overrides = {"type": "object", "additionalProperties": TEXT}
    span = {"partition": INT32, "start": INT64, "end": INT64}
    closed = {"additionalProperties": False}
    partitions = {"type": "integer", "minimum": 1}
    return {
        "Problem": record(
            {
                "type": TEXT,
                "title": TEXT,
                "status": {"type": "integer"},
                "code": {"enum": sorted({*CODES, *CONNECTION_CODES})},
                "detail": TEXT,
                **dict.fromkeys(("offset", "start", "end", "index", "next_offset"), INT64),
                "partitions": array(INT32),
            },
            *("offset", "start", "end", "index", "next_offset", "partitions"),
        ),
        "Message": record(
            {
                "value": {"description": "A string as it is; null is a tombstone; else kept as JSON text."},
                "key": {"description": "As value; null is no key."},
                "headers": {
                    "description": "An object, or a list of [name, value] pairs where names repeat.",
                    "anyOf": [{"type": "object"}, {"type": "null"}, array(_PAIR)],
                },
                "partition": {"anyOf": [INT32, {"type": "null"}]},
                "timestamp": {"anyOf": [TIMESTAMP, {"type": "null"}]},
                "encoding": {"anyOf": [*ENCODING["anyOf"], {"type": "null"}]},
                "offset": {"description": "Taken and not used, so that what was read can be sent again."},
                "amqp": {"description": "Taken and not used: the headers hold it, too."},
            },
            *("key", "headers", "partition", "timestamp", "encoding", "offset", "amqp"),
            **closed,
        ),
        "ReadMessage": record(
            {
                **place,
                "timestamp": {"type": "integer", "format": "int64"},
                "key": TEXT_OR_NULL,
                "value": TEXT_OR_NULL,
                "headers": headers,
                "encoding": ENCODING,
                "amqp": {
                    "description": "For a message published over AMQP: its exchange and its properties by name.",
                    **record({"exchange": TEXT, "properties": {"type": "object"}}, **closed),
                },
            },
            *("encoding", "amqp"),
            **closed,
        ),
        "Published": record({"messages": array(record(place, **closed))}, **closed),
        "Page": record({"messages": array(ref("ReadMessage")), "next_offset": INT64}, **closed),
        "Offsets": record({"topic": TEXT, "partitions": array(record(span, **closed))}, **closed),
        "Summary": record({"name": TEXT, "kind": {"enum": ["topic", "queue"]}, "partitions": partitions}),
        "Topic": record(
            {
                "name": TEXT,
                "kind": {"enum": ["topic", "queue"]},
                "partitions": partitions,
                "created": INT64,
                "config": overrides,
                "overrides": overrides,
                "logs": array(record({**span, "size_bytes": INT64, "segments": INT64})),
            }
        ),
        "NewTopic": record(
            {
                "name": {
                    "type": "string",
                    "pattern": f"^{TOPIC_NAME.pattern}$",
                    "not": {"enum": [".", ".."]},
                },
                "partitions": {"anyOf": [{**partitions, "maximum": PARTITION_MAX}, {"type": "null"}]},
                "config": {"anyOf": [ref("Config"), {"type": "null"}]},
            },
            *("partitions", "config"),
            **closed,
        ),
        "TopicChange": record(
            {
                "partitions": {"anyOf": [{**partitions, "maximum": PARTITION_MAX}, {"type": "null"}]},
                "config": {"anyOf": [ref("Config"), {"type": "null"}]},
            },
            *("partitions", "config"),
            **closed,
        ),
        "Config": {
            "type": "object",
            "description": "Settings of this topic; each may be left out.",
            "properties": {setting.name: _setting(setting) for setting in STREAM_SETTINGS},
            "additionalProperties": False,
        },
        "Cursor": record(
            {
                "name": TEXT,
                "pin": {"type": "boolean"},
                "max_age_ms": {"type": "integer", "minimum": -1},
                "updated": INT64,
                "lag": INT64,
                "topics": array(
                    record({"topic": TEXT, "partitions": array(record({**span, "offset": INT64, "lag": INT64}))})
                ),
            }
        ),
        "CursorChange": record(
            {
                "topic": TEXT,
                "partitions": array(record(place, **closed), minItems=1),
                "pin": {"type": ["boolean", "null"]},
                "max_age_ms": {
                    "anyOf": [
                        {"type": "integer", "minimum": -1, "maximum": AGE_MS_MAX},
                        {"type": "null"},
                    ],
                    "description": "Dropped when not moved for so long; -1 is never.",
                },
            },
            *("pin", "max_age_ms"),
            **closed,
        ),
        "Live": record({"status": {"const": "ok"}, "live": {"const": True}}),
        "Health": record(
            {
                "status": {"enum": ["ok", "unavailable"]},
                "live": {"type": "boolean"},
                "ready": {"type": "boolean"},
                "reason": TEXT,
            },
            "reason",
        ),
        "Status": record(
            {
                "version": TEXT,
                "pid": INT64,
                "started": INT64,
                "uptime_ms": {"type": "integer"},
                "ready": {"type": "boolean"},
                "reason": TEXT_OR_NULL,
                "data_dir": TEXT,
                "tier_dir": TEXT,
                "archived_segments": INT64,
                "archived_bytes": INT64,
                "listeners": {"type": "object", "additionalProperties": array(TEXT)},
                "tls": array(TEXT),
                "topics": INT64,
                "partitions": INT64,
                "cursors": INT64,
                "standbys": ref("Standbys"),
                "recovery": {"type": "object"},
                "settings": array(record({"name": TEXT, "value": TEXT, "default": TEXT, "origin": TEXT})),
            }
        ),
    }


_PAIR: Schema = {
    "type": "array",
    "prefixItems": [{"type": "string"}, {}],
    "minItems": 2,
    "maxItems": 2,
}


def _setting(setting: Setting) -> Schema:
    """A number, a word, or a number with its unit, as people write it; null is the broker's own value."""
    schema: Schema
    if setting.choices:
        schema = {"enum": list(setting.choices)}
    elif setting.kind in {"size", "duration", "count"}:
        number = {"type": "integer", "minimum": setting.least, "maximum": setting.most or 2**53}
        schema = {"anyOf": [number, {"enum": [*setting.words, *setting.words.values()]}, {"type": "string"}]}
    elif setting.kind == "bool":
        schema = {"anyOf": [{"type": "boolean"}, {"enum": ["true", "false", "yes", "no", "on", "off", "1", "0", 1, 0]}]}
    else:
        schema = {"type": "string"}
    return {"description": setting.help, "anyOf": [schema, {"type": "null"}]}
