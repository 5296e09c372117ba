"""POST /topics/{topic}/messages: one message raw or as JSON, many as NDJSON or a JSON array."""

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.streams import publish as publishing
from headrace.broker.streams.streams import check_topic_name
from headrace.errors import InvalidInput, StreamNotFound
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext, json_answer
from headrace.listeners.http.server.requests import Query, in_thread_if, path_name, read_body
from headrace.record.layout import TRACE_HEADERS, TRACEPARENT
from headrace.wire.http import bodies, messages
from headrace.wire.http.messages import Draft, Headers

MESSAGES_MAX = 100_000  # in one request
HEADER_PREFIX = b"headrace-header-"


async def publish(site: HttpContext, request: Request) -> Response:
    """Answers after the sync, with the partition and offset of each message in the order sent."""
    broker = site.broker
    broker.pressure.check()  # before the body is read: it would only make it worse
    topic = path_name(request, "topic")
    if broker.streams.find(topic) is None:
        if not site.config.auto_create_topics:
            raise StreamNotFound(topic)
        check_topic_name(topic)
        caller_of(request).configure(topic)  # it is made by the first message
    media = bodies.media_type(request.headers.get("content-type"))
    query = Query(request, "key", "partition", "timestamp")
    body = await read_body(
        request, request.state.share, site.config.request_bytes_max, site.config.decompressed_bytes_max
    )
    if not body and "content-type" not in request.headers:
        raise InvalidInput("there is no message in the request; an empty one needs a content type")
    if media == bodies.RAW:
        drafts = [_raw(request, query, body)]
    elif any(name in query for name in ("key", "partition", "timestamp")):
        raise InvalidInput("key, partition and timestamp of JSON messages are in the messages themselves")
    else:
        parse = messages.parse_ndjson if media == bodies.NDJSON else messages.parse_json
        drafts = await in_thread_if(len(body), parse, body, MESSAGES_MAX)
    if not drafts:
        raise InvalidInput("there is no message in the request")
    if len(drafts) == 1:  # of several, each has one of its own or none
        drafts = [_traced(drafts[0], request)]
    now_ms = broker.clock.now_ms()
    if broker.streams.find(topic) is None:
        # What a new topic could not take must not leave an empty topic behind.
        shape = publishing.Shape(topic, site.config.auto_create_partitions, site.config.stream)
        await in_thread_if(len(body), publishing.prepare, shape, drafts, now_ms, 0)
    stream = await broker.streams.get_or_create(topic)
    shape = publishing.Shape.of(stream)
    prepared = await in_thread_if(len(body), publishing.prepare, shape, drafts, now_ms, stream.next_turn())
    places = await broker.appender.publish(stream, prepared)
    site.stats.messages_in += len(drafts)
    site.stats.bytes_in += len(body)
    return json_answer({"messages": [{"partition": p, "offset": o} for p, o in places]})


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
    """`Headrace-Header-Trace: abc` becomes the header `trace` of a raw message."""
    start = len(HEADER_PREFIX)
    return messages.checked(
        (name[start:].decode("ascii"), value)
        for name, value in request.headers.raw
        if name.startswith(HEADER_PREFIX) and len(name) > start
    )


def _traced(draft: Draft, request: Request) -> Draft:
    """The message goes on with the trace of its request, unless it brings one of its own."""
    if any(name == TRACEPARENT for name, _ in draft.headers):
        return draft
    trace = [(name, request.headers[name].encode("latin-1")) for name in TRACE_HEADERS if name in request.headers]
    return draft._replace(headers=messages.checked([*draft.headers, *trace])) if trace else draft
