"""Maintenance of segments, for `headrace log compact`, `recompress` and `tier`: the broker swaps in rewritten files."""

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.streams.partition import Partition
from headrace.broker.upkeep.segments import Gain
from headrace.errors import Conflict, InvalidInput
from headrace.listeners.http.native.topics import topic_of
from headrace.listeners.http.native.types import Compacted, SegmentArchive, SegmentReplacement, SegmentSizes
from headrace.listeners.http.server.context import HttpContext, json_response
from headrace.listeners.http.server.requests import Query, decode, read_json, whole_number


async def replace_segment(context: HttpContext, request: Request) -> Response:
    """Replaces a sealed segment by an uploaded file, as its next generation."""
    Query(request)
    partition, base = partition_of(context, request), _base(request)
    wanted = decode(await read_json(request, request.state.share), SegmentReplacement)
    generation = wanted.generation
    gain = await context.broker.segments.replace(partition, base, generation, wanted.staged)
    return json_response(_sizes(gain))


async def archive_segment(context: HttpContext, request: Request) -> Response:
    """Replaces a sealed segment by the Parquet file that was written for it."""
    Query(request)
    partition, base = partition_of(context, request), _base(request)
    generation = decode(await read_json(request, request.state.share), SegmentArchive).generation
    gain = await context.broker.segments.archive(partition, base, generation)
    return json_response(_sizes(gain))


async def compact(context: HttpContext, request: Request) -> Response:
    """Keeps only the latest record of each key in the sealed segments of every partition."""
    Query(request)
    stream = topic_of(context, request)
    if stream.kind == "queue":
        raise Conflict(f"{stream.name!r} is a queue: compaction would delete messages that are not acknowledged")
    gains = [await context.broker.segments.compact(partition) for partition in stream.partitions]
    compacted: Compacted = {"partitions": [{"partition": n, **_sizes(gain)} for n, gain in enumerate(gains)]}
    return json_response(compacted)


async def delete_records(context: HttpContext, request: Request) -> Response:
    """Deletes all records before an offset, which becomes the partition's start offset."""
    query = Query(request, "before")
    before = query.integer("before")
    if before is None:
        raise InvalidInput("the query parameter before is required: records before this offset are deleted")
    partition = partition_of(context, request)
    await context.broker.segments.delete_before(partition, before)
    return Response(status_code=204)


def _sizes(gain: Gain) -> SegmentSizes:
    return {
        "bytes_before": gain.bytes_before,
        "bytes_after": gain.bytes_after,
        "records_before": gain.records_before,
        "records_after": gain.records_after,
    }


def _base(request: Request) -> int:
    text = str(request.path_params["segment"])
    base = whole_number(text)
    if base is None:
        raise InvalidInput(f"the segment in the path must be its first offset, not {text[:80]!r}")
    return base


def partition_of(context: HttpContext, request: Request) -> Partition:
    """The partition that the path names."""
    text = request.path_params["partition"]
    if not text.isdecimal() or len(text) > 10:
        raise InvalidInput(f"the partition in the path must be a number, not {text[:80]!r}")
    return topic_of(context, request).partition(int(text))
