"""The part of /openapi.json for standbys."""

from headrace.listeners.http.native.standby import MEDIA
from headrace.listeners.http.native.types import StandbyHello, StandbyPosition, Standbys
from headrace.listeners.http.openapi.operations import TEXT, WRITING, Description, body, content, in_path, ok, operation
from headrace.listeners.http.openapi.schemas import ref


def paths() -> Description:
    stream: Description = {
        "description": "Frames of the change stream, until one side disconnects.",
        "content": content(TEXT, MEDIA),
    }
    return {
        "/standby": {
            "get": operation(
                "listStandbys", "List the connected standbys and how far they are behind", ok(Standbys, "Standbys.")
            ),
        },
        "/standby/stream": {
            "post": operation(
                "follow",
                "Follow the broker as a standby: stream its data folder and every change to it",
                {200: stream},
                409,
                *WRITING,
                requestBody=body(ref(StandbyHello)),
            ),
        },
        "/standby/{standby}": {
            "parameters": [in_path("standby", TEXT, "Id of the standby, from the first frame of the stream.")],
            "put": operation(
                "confirmChanges",
                "Confirm that a standby has the changes up to a position; 0 while it copies",
                ok(StandbyPosition, "Confirmed."),
                404,
                *WRITING,
                requestBody=body(ref(StandbyPosition)),
            ),
        },
    }
