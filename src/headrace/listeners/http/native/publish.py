"""POST /topics/{topic}/messages: publishes one message, raw or as JSON, or many as NDJSON or a JSON array."""

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.streams import publish as publishing
from headrace.broker.streams.streams import Stream, check_topic_name
from headrace.errors import InvalidInput, StreamNotFound
from headrace.listeners.http.native.types import Published
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext, json_response
from headrace.listeners.http.server.requests import Query, in_thread_if, path_name, read_body
from headrace.record.layout import TRACE_HEADERS, TRACEPARENT
from headrace.wire.http import bodies, messages
from headrace.wire.http.messages import Draft, Headers

MESSAGES_MAX = 100_000  # in one request
HEADER_PREFIX = b"headrace-header-"
RAW_PARAMETERS = ("key", "partition", "timestamp")


async def publish(context: HttpContext, request: Request) -> Response:
    """Responds when the messages are durable, with the partition and offset of each in the order of the request."""
    context.broker.pressure.check()  # before the body is read, which would only take more memory
    topic = path_name(request, "topic")
    _check_topic(context, request, topic)
    media = bodies.media_type(request.headers.get("content-type"))
    query = Query(request, *RAW_PARAMETERS)
    body = await read_messages_body(context, request)
    drafts = await _parse(request, query, media, body)
    stream, prepared = await _prepare(context, topic, drafts, len(body))
    places = await context.broker.appender.publish(stream, prepared)
    context.stats.messages_in += len(drafts)
    context.stats.bytes_in += len(body)
    published: Published = {"messages": [{"partition": p, "offset": o} for p, o in places]}
    return json_response(published)


def _check_topic(context: HttpContext, request: Request, topic: str) -> None:
    """Refuses a topic that does not exist and could not be created by this request."""
    if context.broker.streams.find(topic) is None:
        if not context.config.auto_create_topics:
            raise StreamNotFound(topic)
        check_topic_name(topic)
        caller_of(request).configure(topic)


async def read_messages_body(context: HttpContext, request: Request) -> bodies.Body:
    """The body of a request that stores messages."""
    config = context.config
    return await read_body(request, request.state.share, config.request_bytes_max, config.decompressed_bytes_max)


async def _parse(request: Request, query: Query, media: str, body: bodies.Body) -> list[Draft]:
    if not body and "content-type" not in request.headers:
        raise InvalidInput("the request contains no message; to publish an empty one, send a content type")
    if media == bodies.RAW:
        drafts = [_raw(request, query, body)]
    elif any(name in query for name in RAW_PARAMETERS):
        raise InvalidInput("key, partition and timestamp of JSON messages belong in the messages, not in the query")
    else:
        parse = messages.parse_ndjson if media == bodies.NDJSON else messages.parse_json
        drafts = await in_thread_if(len(body), parse, body, MESSAGES_MAX)
    if not drafts:
        raise InvalidInput("the request contains no message")
    if len(drafts) == 1:  # the request's trace belongs to one message; several carry their own
        drafts = [_traced(drafts[0], request)]
    return drafts


async def _prepare(
    context: HttpContext, topic: str, drafts: list[Draft], size: int
) -> tuple[Stream, list[publishing.Prepared]]:
    """The batches to append, and the stream, created if need be.

    The batches for a new topic are built before it is created, so that a request that fails creates no empty topic.
    They are built again only if the stream turns out different, because another request was faster.
    """
    broker, now_ms = context.broker, context.broker.clock.now_ms()
    stream = broker.streams.find(topic)
    if stream is not None:
        shape = publishing.StreamShape.of(stream)
        return stream, await in_thread_if(size, publishing.prepare, shape, drafts, now_ms, stream.next_turn())
    expected = publishing.StreamShape(topic, context.config.auto_create_partitions, context.config.stream)
    expected_turn = 1 % expected.partitions  # the first one of a new stream
    prepared = await in_thread_if(size, publishing.prepare, expected, drafts, now_ms, expected_turn)
    stream = await broker.streams.get_or_create(topic)
    shape, turn = publishing.StreamShape.of(stream), stream.next_turn()
    if (shape, turn) != (expected, expected_turn):
        prepared = await in_thread_if(size, publishing.prepare, shape, drafts, now_ms, turn)
    return stream, prepared


def _raw(request: Request, query: Query, body: bodies.Body) -> Draft:
    key = query.text("key")
    timestamp = query.integer("timestamp", most=messages.TIMESTAMP_MAX)
    return Draft(
        None if key is None else key.encode(),
        bytes(body),
        _headers(request),
        query.integer("partition", most=messages.PARTITION_MAX),
        messages.NOW if timestamp is None else timestamp,
    )


def _headers(request: Request) -> Headers:
    """Headers of a raw message: `Headrace-Header-Trace: abc` becomes the header `trace`."""
    start = len(HEADER_PREFIX)
    return messages.check_headers(
        (name[start:].decode("ascii"), value)
        for name, value in request.headers.raw
        if name.startswith(HEADER_PREFIX) and len(name) > start
    )


def _traced(draft: Draft, request: Request) -> Draft:
    """The message with the request's trace context, unless it has its own."""
    if any(name == TRACEPARENT for name, _ in draft.headers):
        return draft
    trace = [(name, request.headers[name].encode("latin-1")) for name in TRACE_HEADERS if name in request.headers]
    return draft._replace(headers=messages.check_headers([*draft.headers, *trace])) if trace else draft
