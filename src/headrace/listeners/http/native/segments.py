"""Upkeep over HTTP, for `headrace log compact|recompress|tier`: the broker swaps what others have rewritten."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.streams.partition import Partition
from headrace.errors import Conflict, InvalidInput, MalformedJson
from headrace.listeners.http.native.topics import topic_of
from headrace.listeners.http.server.context import HttpContext, json_answer
from headrace.listeners.http.server.requests import OFFSET_MAX, Query, read_json, whole_number
from headrace.wire.http.messages import integer


async def replace_segment(site: HttpContext, request: Request) -> Response:
    """A staged file becomes the next generation of a sealed segment."""
    Query(request)
    partition, base = _partition(site, request), _base(request)
    fields = await read_json(request, request.state.share)
    generation = integer(fields.get("generation"), "generation", most=OFFSET_MAX)
    if fields.keys() != {"generation", "staged"} or generation is None or type(fields["staged"]) is not str:
        raise MalformedJson('a replacement is {"generation": 0, "staged": "..."}')
    gain = await site.broker.segments.replace(partition, base, generation, fields["staged"])
    return json_answer(gain._asdict())


async def archive_segment(site: HttpContext, request: Request) -> Response:
    """The Parquet file written for a sealed segment takes its place."""
    Query(request)
    partition, base = _partition(site, request), _base(request)
    fields = await read_json(request, request.state.share)
    generation = integer(fields.get("generation"), "generation", most=OFFSET_MAX)
    if fields.keys() != {"generation"} or generation is None:
        raise MalformedJson('what is to be archived is {"generation": 0}')
    gain = await site.broker.segments.archive(partition, base, generation)
    return json_answer(gain._asdict())


async def compact(site: HttpContext, request: Request) -> Response:
    """The latest record of each key stays, in the sealed segments of every partition."""
    Query(request)
    stream = topic_of(site, request)
    if stream.kind == "queue":
        raise Conflict(f"{stream.name!r} is a queue: its messages stay until they are settled, not by key")
    gains = [await site.broker.segments.compact(partition) for partition in stream.partitions]
    return json_answer({"partitions": [{"partition": n, **gain._asdict()} for n, gain in enumerate(gains)]})


async def delete_records(site: HttpContext, request: Request) -> Response:
    """Everything before an offset goes; the offset is the partition's new start."""
    query = Query(request, "before")
    before = query.integer("before")
    if before is None:
        raise InvalidInput("before says up to which offset records go")
    partition = _partition(site, request)
    await site.broker.segments.delete_before(partition, before)
    return Response(status_code=204)


def _base(request: Request) -> int:
    text = str(request.path_params["segment"])
    base = whole_number(text)
    if base is None:
        raise InvalidInput(f"a segment is named by its first offset, not {text[:80]!r}")
    return base


def _partition(site: HttpContext, request: Request) -> Partition:
    text = request.path_params["partition"]
    if not text.isdecimal() or len(text) > 10:
        raise InvalidInput(f"a partition is a number, not {text[:80]!r}")
    return topic_of(site, request).partition(int(text))


GAIN: dict[str, Any] = {
    "bytes_before": {"type": "integer"},
    "bytes_after": {"type": "integer"},
    "records_before": {"type": "integer"},
    "records_after": {"type": "integer"},
}
