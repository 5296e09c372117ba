"""Topics over HTTP: create, list, describe, configure, delete, and where they begin and end."""

from typing import Any
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.cooperative import YieldEvery
from headrace.broker.streams.streams import Stream, check_topic_name
from headrace.config import stream_settings_text
from headrace.errors import InvalidInput, MalformedJson
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext, json_answer
from headrace.listeners.http.server.requests import Query, path_name, read_json
from headrace.wire.http.messages import integer

PARTITIONS_MAX = 2**31 - 1


async def list_topics(site: HttpContext, request: Request) -> Response:
    Query(request)
    return json_answer({"topics": await YieldEvery().map(summary, site.broker.streams.list())})


async def create_topic(site: HttpContext, request: Request) -> Response:
    Query(request)
    fields = await read_json(request, request.state.share)
    _refuse_unknown(fields, "name", "partitions", "config")
    name = fields.get("name")
    if type(name) is not str:
        raise MalformedJson("name is a string")
    check_topic_name(name)
    caller_of(request).configure(name)
    partitions = integer(fields.get("partitions"), "partitions", least=1, most=PARTITIONS_MAX)
    stream = await site.broker.streams.create(
        name, site.config.auto_create_partitions if partitions is None else partitions, _config(fields)
    )
    return json_answer(describe(stream), 201, {"location": f"/topics/{quote(name, safe='')}"})


async def describe_topic(site: HttpContext, request: Request) -> Response:
    Query(request)
    return json_answer(describe(topic_of(site, request)))


async def configure_topic(site: HttpContext, request: Request) -> Response:
    Query(request)
    name = topic_of(site, request).name
    fields = await read_json(request, request.state.share)
    _refuse_unknown(fields, "partitions", "config")
    partitions = integer(fields.get("partitions"), "partitions", least=1, most=PARTITIONS_MAX)
    stream = await site.broker.streams.configure(name, _config(fields), partitions=partitions)
    return json_answer(describe(stream))


async def delete_topic(site: HttpContext, request: Request) -> Response:
    Query(request)
    await site.broker.streams.delete(topic_of(site, request).name)
    return Response(status_code=204)


async def offsets(site: HttpContext, request: Request) -> Response:
    Query(request)
    stream = topic_of(site, request)
    partitions = [{"partition": p.number, "start": p.start_offset, "end": p.durable_end} for p in stream.partitions]
    return json_answer({"topic": stream.name, "partitions": partitions})


def topic_of(site: HttpContext, request: Request) -> Stream:
    return site.broker.streams.get(path_name(request, "topic"))


def summary(stream: Stream) -> dict[str, Any]:
    return {"name": stream.name, "kind": stream.kind, "partitions": len(stream.partitions)}


def describe(stream: Stream) -> dict[str, Any]:
    return {
        **summary(stream),
        "created": stream.document.created_ms,
        "config": stream_settings_text(stream.settings),
        "overrides": stream.document.config,
        "logs": [
            {
                "partition": p.number,
                "start": p.start_offset,
                "end": p.durable_end,
                "size_bytes": p.log.size_bytes,
                "segments": len(p.log.segments),
            }
            for p in stream.partitions
        ],
    }


def _config(fields: dict[str, Any]) -> dict[str, object]:
    given = fields.get("config")
    if given is None:
        return {}
    if type(given) is not dict:
        raise MalformedJson("config is an object of settings")
    return given


def _refuse_unknown(fields: dict[str, Any], *known: str) -> None:
    for name in fields:
        if name not in known:
            raise InvalidInput(f"no such field: {name[:80]!r}; there are {', '.join(known)}")
