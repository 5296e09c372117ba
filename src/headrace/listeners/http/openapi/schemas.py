"""Component schemas of /openapi.json, generated from the types that the handlers decode and encode."""

from typing import Any

import msgspec

from headrace.config import STREAM_SETTINGS, Setting
from headrace.listeners.http.native import types
from headrace.listeners.http.server.problems import Problem
from headrace.wire.http import messages
from headrace.wire.http.amqp import AmqpMessage

Schema = dict[str, Any]

# Bodies of requests and responses; schemas of the types inside them are generated, too.
BODIES = (
    Problem,
    messages.Message,
    messages.ReadMessage,
    types.Published,
    types.Page,
    types.Offsets,
    types.Topics,
    types.Topic,
    types.NewTopic,
    types.TopicChange,
    types.Cursors,
    types.CursorChange,
    types.Live,
    types.Health,
    types.Status,
    types.Logs,
    types.Lease,
    types.Leased,
    types.SegmentSizes,
    types.Compacted,
    types.SegmentReplacement,
    types.SegmentArchive,
    types.Staged,
    types.SinkCommit,
    types.SinkOutcome,
    types.Writers,
    types.PipelineReport,
    types.Pipelines,
    types.StandbyHello,
    types.StandbyPosition,
)
# TypedDicts cannot refuse unknown fields; these have no others.
CLOSED = (
    messages.Encodings,
    messages.Message,
    messages.ReadMessage,
    AmqpMessage,
    types.Published,
    types.PublishedMessage,
    types.Page,
    types.Offsets,
    types.PartitionOffsets,
)


def schema_of(kind: Any) -> Schema:
    """Schema of a parameter or an inline value, such as `Offset`."""
    return msgspec.json.schema(kind)


def ref(kind: type) -> Schema:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def component_schemas() -> dict[str, Schema]:
    _, components = msgspec.json.schema_components(BODIES, ref_template="#/components/schemas/{name}")
    for kind in CLOSED:
        components[kind.__name__]["additionalProperties"] = False
    components["Lease"]["oneOf"] = [{"required": ["slices"]}, {"required": ["ranges"]}]
    components["Config"] = {
        "type": "object",
        "description": "Settings of a topic; all are optional. null restores the broker's default.",
        "properties": {setting.name: _setting(setting) for setting in STREAM_SETTINGS},
        "additionalProperties": False,
    }
    return components


def _setting(setting: Setting) -> Schema:
    """A number, a word, or a number with its unit; null for the broker's default."""
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
