"""Topics: create, list, describe, configure, delete, and the offsets of their partitions."""

from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.cooperative import YieldEvery
from headrace.broker.streams.streams import Stream, check_topic_name
from headrace.config import stream_settings_text
from headrace.listeners.http.native.types import NewTopic, Offsets, Summary, Topic, TopicChange, Topics
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext, json_response
from headrace.listeners.http.server.requests import Query, decode, path_name, read_json, refuse_unknown


async def list_topics(context: HttpContext, request: Request) -> Response:
    Query(request)
    topics: Topics = {"topics": await YieldEvery().map(summary, context.broker.streams.list())}
    return json_response(topics)


async def create_topic(context: HttpContext, request: Request) -> Response:
    Query(request)
    fields = await read_json(request, request.state.share)
    refuse_unknown(fields, NewTopic)
    wanted = decode(fields, NewTopic)
    check_topic_name(wanted.name)
    caller_of(request).configure(wanted.name)
    partitions = context.config.auto_create_partitions if wanted.partitions is None else wanted.partitions
    stream = await context.broker.streams.create(wanted.name, partitions, wanted.config or {})
    return json_response(describe(stream), 201, {"location": f"/topics/{quote(wanted.name, safe='')}"})


async def describe_topic(context: HttpContext, request: Request) -> Response:
    Query(request)
    return json_response(describe(topic_of(context, request)))


async def configure_topic(context: HttpContext, request: Request) -> Response:
    Query(request)
    name = topic_of(context, request).name
    fields = await read_json(request, request.state.share)
    refuse_unknown(fields, TopicChange)
    change = decode(fields, TopicChange)
    stream = await context.broker.streams.configure(name, change.config or {}, partitions=change.partitions)
    return json_response(describe(stream))


async def delete_topic(context: HttpContext, request: Request) -> Response:
    Query(request)
    await context.broker.streams.delete(topic_of(context, request).name)
    return Response(status_code=204)


async def offsets(context: HttpContext, request: Request) -> Response:
    Query(request)
    stream = topic_of(context, request)
    found: Offsets = {
        "topic": stream.name,
        "partitions": [
            {"partition": p.number, "start": p.start_offset, "end": p.durable_end} for p in stream.partitions
        ],
    }
    return json_response(found)


def topic_of(context: HttpContext, request: Request) -> Stream:
    return context.broker.streams.get(path_name(request, "topic"))


def summary(stream: Stream) -> Summary:
    return {"name": stream.name, "kind": stream.kind, "partitions": len(stream.partitions)}


def describe(stream: Stream) -> Topic:
    return {
        "name": stream.name,
        "kind": stream.kind,
        "partitions": len(stream.partitions),
        "created": stream.document.created_ms,
        "config": stream_settings_text(stream.settings),
        "overrides": stream.document.config,
        "logs": [
            {
                "partition": p.number,
                "start": p.start_offset,
                "end": p.durable_end,
                "size_bytes": p.size_bytes,
                "segments": p.segment_count,
            }
            for p in stream.partitions
        ],
    }
