"""Reading: pages of messages (optionally waiting for the first), whole record batches, the last message of a key."""

import asyncio
from base64 import b64encode
from urllib.parse import unquote_to_bytes

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.streams.partition import Partition, Readable, when_loaded
from headrace.broker.streams.read import Page
from headrace.broker.streams.streams import Stream
from headrace.errors import InvalidInput, NotAcceptable, SegmentGone, StreamNotFound
from headrace.listeners.http.native.segments import partition_of
from headrace.listeners.http.native.topics import topic_of
from headrace.listeners.http.native.types import Page as PageBody
from headrace.listeners.http.server.authorization import Allowance
from headrace.listeners.http.server.context import ChunkedResponse, HttpContext, json_response
from headrace.listeners.http.server.memory_budget import BudgetShare
from headrace.listeners.http.server.requests import ClientDisconnected, Query, wait_for_disconnect
from headrace.record.types import Record
from headrace.wire.http import bodies, messages

LIMIT = 1_000
LIMIT_MAX = 10_000
BYTES = 1 << 20
NEXT_OFFSET = "headrace-next-offset"
FORMATS = {"json": bodies.JSON, "ndjson": bodies.NDJSON, "raw": bodies.RAW}


async def read(context: HttpContext, request: Request) -> Response:
    query = Query(request, "partition", "offset", "timestamp", "limit", "max_bytes", "wait", "format", "encoding")
    stream = topic_of(context, request)
    partition = stream.partition(query.integer("partition", most=messages.PARTITION_MAX))
    media = _media(request, query)
    limit = query.integer("limit", least=1, most=LIMIT_MAX)
    if media == bodies.RAW and limit not in (None, 1):
        raise InvalidInput("a raw response contains one message: omit limit, or request JSON or NDJSON")
    limit = 1 if media == bodies.RAW else limit or LIMIT
    bytes_max = page_bytes(context, query)
    binary = query.choice("encoding", "text", "base64") == "base64"
    wait_s = min(query.seconds("wait"), context.config.read_wait_ms_max / 1000)
    offset = await start_of(partition, query)
    request.state.share.take(bytes_max)
    page = await context.broker.read(stream, partition, offset, limit=limit, bytes_max=bytes_max)
    if not page.records and wait_s > 0:
        offset = page.next_offset
        if await wait_for(context, request, stream, [(partition, offset)], wait_s):
            page = await context.broker.read(stream, partition, offset, limit=limit, bytes_max=bytes_max)
    context.stats.messages_out += len(page.records)
    answer = _render(partition.number, page, media, binary)
    context.stats.bytes_out += len(answer.body)
    return answer


async def last_of_key(context: HttpContext, request: Request) -> Response:
    """The last message of a key, which is any bytes, percent-encoded."""
    query = Query(request, "encoding")
    binary = query.choice("encoding", "text", "base64") == "base64"
    key = unquote_to_bytes(request.path_params["key"])
    found = await context.broker.keys.find(topic_of(context, request), key)
    context.stats.messages_out += 1
    answer = json_response(messages.render(found.partition, found.record, binary=binary))
    context.stats.bytes_out += len(answer.body)
    return answer


async def batches(context: HttpContext, request: Request) -> Response:
    """Whole record batches as they are stored. The first may begin before the requested offset."""
    query = Query(request, "offset", "timestamp", "max_bytes", "wait", "log", "segment", "generation")
    stream = topic_of(context, request)
    partition = partition_of(context, request)
    if query.integer("log") not in (None, partition.log_id):
        raise SegmentGone(f"topic {stream.name!r} was deleted and made anew: this is another log")
    bytes_max = page_bytes(context, query)
    wait_s = min(query.seconds("wait"), context.config.read_wait_ms_max / 1000)
    segment, generation = query.integer("segment"), query.integer("generation")
    if (segment is None) != (generation is None) or (segment is not None and "wait" in query):
        raise InvalidInput("segment and generation must be given together, and without wait")
    offset = await start_of(partition, query)
    request.state.share.take(bytes_max)
    if segment is not None and generation is not None:
        chunk = await when_loaded(lambda: partition.read_planned_now(segment, generation, offset, bytes_max))
    else:
        chunk = await when_loaded(lambda: partition.read_now(offset, bytes_max))
    if not chunk.data and wait_s > 0 and await wait_for(context, request, stream, [(partition, offset)], wait_s):
        chunk = await when_loaded(lambda: partition.read_now(offset, bytes_max))
    context.stats.bytes_out += len(chunk.data)
    return ChunkedResponse(bytes(chunk.data), 200, {NEXT_OFFSET: str(chunk.next_offset)}, media_type=bodies.RAW)


def page_bytes(context: HttpContext, query: Query) -> int:
    most = context.config.read_bytes_max
    return query.integer("max_bytes", least=1, most=most) or min(BYTES, most)


async def start_of(partition: Partition, query: Query) -> int:
    """The offset to read from: the given one, that of the given time, or the partition's start."""
    if "offset" in query and "timestamp" in query:
        raise InvalidInput("offset and timestamp exclude each other")
    word = query.text("offset")
    if word in {"earliest", "latest"}:
        return partition.start_offset if word == "earliest" else partition.stable_end
    offset = query.integer("offset")
    if offset is not None:
        return offset
    timestamp = query.integer("timestamp", most=messages.TIMESTAMP_MAX)
    return partition.start_offset if timestamp is None else await partition.offset_at(timestamp)


async def wait_for(
    context: HttpContext, request: Request, stream: Stream, wanted: list[tuple[Partition, int]], wait_s: float
) -> bool:
    """Waits until there is something to read; False after the timeout or when the broker stops.

    While it waits, the request holds nothing of the memory budget."""
    readable, allowance = Readable(wanted), Allowance(context, request)
    share: BudgetShare = request.state.share
    size = share.release()
    gone = asyncio.ensure_future(wait_for_disconnect(request.receive))
    try:
        await asyncio.wait(
            {readable.future, gone, context.stopping}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED
        )
        if gone.done():
            raise ClientDisconnected
        if stream.is_deleted:
            raise StreamNotFound(stream.name)
        allowance.check()
        if not readable.future.done():
            return False
        share.take(size)
        return True
    finally:
        readable.cancel()
        gone.cancel()


def _media(request: Request, query: Query) -> str:
    chosen = query.choice("format", *FORMATS)
    if chosen is not None:
        return FORMATS[chosen]
    media = bodies.accepted(request.headers.get("accept"), (bodies.JSON, bodies.NDJSON, bodies.RAW))
    if media is None:
        raise NotAcceptable(f"messages are available as {bodies.JSON}, {bodies.NDJSON} or {bodies.RAW}")
    return media


def _render(partition: int, page: Page, media: str, binary: bool) -> ChunkedResponse:
    headers = {NEXT_OFFSET: str(page.next_offset)}
    if media == bodies.RAW:
        return _render_raw(partition, page.records[0], headers) if page.records else ChunkedResponse(None, 204, headers)
    rendered = [messages.render(partition, record, binary=binary) for record in page.records]
    if media == bodies.JSON:
        content: PageBody = {"messages": rendered, "next_offset": page.next_offset}
        return json_response(content, headers=headers)
    lines = msgspec.json.Encoder().encode_lines(rendered)
    return ChunkedResponse(lines, 200, headers, media_type=bodies.NDJSON)


def _render_raw(partition: int, record: Record, headers: dict[str, str]) -> ChunkedResponse:
    headers |= {
        "headrace-partition": str(partition),
        "headrace-offset": str(record.offset),
        "headrace-timestamp": str(record.timestamp),
    }
    if record.key is not None:  # a key is any bytes, and only base64 is safe in a header
        headers["headrace-key-base64"] = b64encode(record.key).decode("ascii")
    if record.value is None:
        headers["headrace-tombstone"] = "true"
    return ChunkedResponse(record.value or b"", 200, headers, media_type=bodies.RAW)
