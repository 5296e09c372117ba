"""The part of /openapi.json for standbys."""

from typing import Any

from headrace.listeners.http.native.standby import MEDIA, NAME_CHARS_MAX
from headrace.listeners.http.openapi.schemas import INT64, TEXT, Schema, array, record, ref

CLOSED = {"additionalProperties": False}


def schemas() -> dict[str, Schema]:
    standby = {
        "id": TEXT,
        "name": TEXT,
        "address": TEXT,
        "state": {"enum": ["copying", "in step"]},
        "copied_bytes": INT64,
        "copy_bytes": INT64,
        "bytes_behind": INT64,
        "seconds_behind": {"type": "number"},
        "silent_seconds": {"type": "number"},
    }
    standbys = {
        "standby_confirms": INT64,
        "in_step": INT64,
        "waiting": {"type": "boolean"},
        "standbys": array(record(standby)),
    }
    return {
        "Standbys": record(standbys),
        "StandbyHello": record(
            {
                "name": {"type": "string", "minLength": 1, "maxLength": NAME_CHARS_MAX},
                "copy": {"type": "string", "minLength": 1, "maxLength": NAME_CHARS_MAX},
                "format": INT64,
                "kept": {"type": "object", "additionalProperties": array(INT64, minItems=2, maxItems=2)},
            },
            **CLOSED,
        ),
        "StandbyPosition": record({"position": INT64}, **CLOSED),
    }


def paths(kit: Any) -> dict[str, Any]:
    """`kit` is openapi.py, whose vocabulary this speaks."""
    stream = {"description": "Frames, until somebody hangs up.", "content": kit.content({"type": "string"}, MEDIA)}
    return {
        "/standby": {
            "get": {
                "operationId": "listStandbys",
                "summary": "Every standby that is connected, and how far behind it is",
                "responses": kit.answers({200: kit.json_of(ref("Standbys"), "The standbys.")}),
            },
        },
        "/standby/stream": {
            "post": {
                "operationId": "follow",
                "summary": "Follow the broker as a standby: its data folder, and every change of it",
                "requestBody": {"required": True, "content": kit.content(ref("StandbyHello"), kit.JSON)},
                "responses": kit.answers({200: stream}, 409, *kit.WRITING),
            },
        },
        "/standby/{standby}": {
            "parameters": [kit.in_path("standby", TEXT, "Id of the standby, as the stream's first frame says.")],
            "put": {
                "operationId": "confirmChanges",
                "summary": "How far a standby is; 0 while it copies",
                "requestBody": {"required": True, "content": kit.content(ref("StandbyPosition"), kit.JSON)},
                "responses": kit.answers({200: kit.json_of(ref("StandbyPosition"), "Heard.")}, 404, *kit.WRITING),
            },
        },
    }
