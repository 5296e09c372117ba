"""Reading: pages of messages (optionally waiting for the first), whole record batches, the last message of a key."""

import asyncio
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote, quote_from_bytes, unquote_to_bytes

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.streams.key_index_rocksdb import KeyRange
from headrace.broker.streams.partition import Partition, Readable, when_loaded
from headrace.broker.streams.read import UNLIMITED, Page
from headrace.broker.streams.streams import Stream
from headrace.errors import InvalidInput, NotAcceptable, RecordTooLarge, SegmentGone, StreamNotFound
from headrace.listeners.http.native.segments import partition_of
from headrace.listeners.http.native.topics import topic_of
from headrace.listeners.http.server.authorization import Allowance
from headrace.listeners.http.server.context import ChunkedResponse, HttpContext, PiecewiseResponse, pieces_response
from headrace.listeners.http.server.memory_budget import BudgetShare
from headrace.listeners.http.server.rendering import render_messages
from headrace.listeners.http.server.requests import ClientDisconnected, Query, wait_for_disconnect
from headrace.wire.http import bodies, messages

LIMIT = 1_000
RAW_KEY_BYTES_MAX = 4096
LIMIT_MAX = 10_000
KEYS, KEYS_MAX = 100, 1_000  # each message may be in a batch of its own
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
    share: BudgetShare = request.state.share
    share.take(bytes_max)
    largest = UNLIMITED if media == bodies.RAW else context.json_bytes_max
    bounds = {"limit": limit, "bytes_max": bytes_max, "record_bytes_max": largest}
    with other_forms(stream, raw=media != bodies.RAW):
        page = await context.broker.read(stream, partition, offset, **bounds)
        if not page.records and wait_s > 0:
            offset = page.next_offset
            if await wait_for(context, request, stream, [(partition, offset)], wait_s):
                page = await context.broker.read(stream, partition, offset, **bounds)
        answer: ChunkedResponse | PiecewiseResponse
        if media == bodies.RAW:
            answer = _render_raw(context, partition.number, page, bytes_max, share)
        else:
            answer = await _render(context, partition.number, page, media, binary, bytes_max, share)
    context.stats.bytes_out += answer.size
    return answer


@contextmanager
def other_forms(stream: Stream, *, raw: bool) -> Iterator[None]:
    """Adds to RecordTooLarge the forms in which the message can be read; `raw` if it was not requested as such."""
    try:
        yield
    except RecordTooLarge as error:
        partition = error.partition
        path = f"GET /topics/{quote(stream.name, safe='')}"
        stored = f"{path}/partitions/{partition}/batches?offset={error.offset} returns it as it is stored"
        if error.form == "decompressed" or not raw:
            hint = f"Kafka consumers receive it, and {stored}"
        else:
            whole = f"{path}/messages?format=raw&partition={partition}&offset={error.offset}"
            hint = f"{whole} returns its value, Kafka consumers receive it, and {stored}"
        raise error.explained(form=error.form or "as JSON", hint=hint) from None


async def last_of_key(context: HttpContext, request: Request) -> Response:
    """The last message of a key, which is any bytes, percent-encoded."""
    query = Query(request, "encoding")
    binary = query.choice("encoding", "text", "base64") == "base64"
    key, stream = unquote_to_bytes(request.path_params["key"]), topic_of(context, request)
    largest, share = context.json_bytes_max, request.state.share
    share.take(BYTES)
    with other_forms(stream, raw=True):
        found = await context.broker.keys.find(stream, key, record_bytes_max=largest)
        [pieces] = await render_messages(
            found.partition, [found.record], binary=binary, bytes_max=BYTES, json_bytes_max=largest, share=share
        )
    context.stats.messages_out += 1
    answer = pieces_response(pieces, {}, bodies.JSON)
    context.stats.bytes_out += answer.size
    return answer


async def keys(context: HttpContext, request: Request) -> Response:
    """The last messages of a range of keys, in the order of the keys' bytes."""
    query = Query(request, "from", "to", "prefix", "limit", "max_bytes", "encoding", octets=("from", "to", "prefix"))
    binary = query.choice("encoding", "text", "base64") == "base64"
    limit = query.integer("limit", least=1, most=KEYS_MAX) or KEYS
    bytes_max = page_bytes(context, query)
    wanted = KeyRange(query.octets("from") or b"", query.octets("to"))
    prefix = query.octets("prefix")
    if prefix is not None:
        wanted = wanted.within(KeyRange.of_prefix(prefix))
    largest, share = context.json_bytes_max, request.state.share
    share.take(bytes_max)
    stream = topic_of(context, request)
    listed: list[bytes] = []
    with other_forms(stream, raw=True):
        page = await context.broker.keys.scan(
            stream, wanted, limit=limit, bytes_max=bytes_max, record_bytes_max=largest
        )
        for one in page.found:
            [pieces] = await render_messages(
                one.partition, [one.record], binary=binary, bytes_max=bytes_max, json_bytes_max=largest, share=share
            )
            listed += (b",", *pieces)
    context.stats.messages_out += len(page.found)
    next_key = None if page.next_key is None else quote_from_bytes(page.next_key, safe="")
    end = b'],"next":%b}' % msgspec.json.encode(next_key)
    answer = pieces_response([b'{"messages":[', *listed[1:], end], {}, bodies.JSON)
    context.stats.bytes_out += answer.size
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
    return ChunkedResponse(chunk.data, 200, {NEXT_OFFSET: str(chunk.next_offset)}, media_type=bodies.RAW)


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


async def _render(
    context: HttpContext, partition: int, page: Page, media: str, binary: bool, bytes_max: int, share: BudgetShare
) -> ChunkedResponse | PiecewiseResponse:
    rendered = await render_messages(
        partition,
        page.records,
        binary=binary,
        bytes_max=bytes_max,
        json_bytes_max=context.json_bytes_max,
        share=share,
    )
    count = len(rendered)
    next_offset = page.records[count].offset if count < len(page.records) else page.next_offset
    context.stats.messages_out += count
    headers = {NEXT_OFFSET: str(next_offset)}
    if media == bodies.NDJSON:
        return pieces_response([piece for pieces in rendered for piece in (*pieces, b"\n")], headers, bodies.NDJSON)
    listed = [piece for pieces in rendered for piece in (b",", *pieces)][1:]
    end = b'],"next_offset":%d}' % next_offset
    return pieces_response([b'{"messages":[', *listed, end], headers, bodies.JSON)


def _render_raw(
    context: HttpContext, partition: int, page: Page, bytes_max: int, share: BudgetShare
) -> ChunkedResponse:
    headers = {NEXT_OFFSET: str(page.next_offset)}
    if not page.records:
        return ChunkedResponse(None, 204, headers)
    [record] = page.records
    size = messages.record_bytes(record)
    if size > bytes_max:
        share.take_chunk(size - bytes_max)
    context.stats.messages_out += 1
    headers |= {
        "headrace-partition": str(partition),
        "headrace-offset": str(record.offset),
        "headrace-timestamp": str(record.timestamp),
    }
    key = record.key
    if key is not None and len(key) > RAW_KEY_BYTES_MAX:
        headers["headrace-key-bytes"] = str(len(key))  # clients refuse such a long header
    elif key is not None:  # a key is any bytes, and only base64 is safe in a header
        headers["headrace-key-base64"] = b64encode(key).decode("ascii")
    if record.value is None:
        headers["headrace-tombstone"] = "true"
    return ChunkedResponse(record.value or b"", 200, headers, media_type=bodies.RAW)
