"""Named cursors over HTTP: where a reader stands, its lag, and whether it holds retention back."""

from itertools import groupby
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.streams.cursors import FOREVER
from headrace.errors import InvalidInput, MalformedJson
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext, json_answer
from headrace.listeners.http.server.requests import OFFSET_MAX, Query, path_name, read_json
from headrace.wire.http.messages import PARTITION_MAX, integer

AGE_MS_MAX = 100 * 366 * 24 * 3600 * 1000
FIELDS = ("topic", "partitions", "pin", "max_age_ms")


async def list_cursors(site: HttpContext, request: Request) -> Response:
    Query(request)
    return json_answer({"cursors": [describe(site, name) for name in site.broker.cursors.names()]})


async def get_cursor(site: HttpContext, request: Request) -> Response:
    Query(request)
    return json_answer(describe(site, path_name(request, "cursor")))


async def put_cursor(site: HttpContext, request: Request) -> Response:
    """Moves the cursor in one topic; durable when answered."""
    Query(request)
    name = path_name(request, "cursor")
    fields = await read_json(request, request.state.share)
    for field in fields:
        if field not in FIELDS:
            raise InvalidInput(f"no such field: {field[:80]!r}; there are {', '.join(FIELDS)}")
    topic, pin = fields.get("topic"), fields.get("pin")
    if type(topic) is not str:
        raise MalformedJson("topic is a string")
    if pin is not None and type(pin) is not bool:
        raise MalformedJson("pin is true or false")
    caller_of(request).read(topic)
    if name in site.broker.cursors:  # pin and max_age_ms hold wherever it stands
        check_read(site, request, name)
    max_age_ms = integer(fields.get("max_age_ms"), "max_age_ms", least=FOREVER, most=AGE_MS_MAX)
    offsets = _offsets(fields.get("partitions"))
    stream = site.broker.streams.get(topic)
    await site.broker.cursors.commit(name, stream, offsets, pin=pin, max_age_ms=max_age_ms)
    return json_answer(describe(site, name))


async def delete_cursor(site: HttpContext, request: Request) -> Response:
    Query(request)
    name = path_name(request, "cursor")
    check_read(site, request, name)
    await site.broker.cursors.delete(name)
    return Response(status_code=204)


def check_read(site: HttpContext, request: Request, name: str) -> None:
    """Forbidden unless the caller may read every topic that the cursor stands in."""
    for topic in {position.stream.name for position in site.broker.cursors.positions(name)}:
        caller_of(request).read(topic)


def _offsets(given: Any) -> dict[int, int]:
    if type(given) is not list or not given:
        raise MalformedJson('partitions is a list of {"partition", "offset"}')
    offsets: dict[int, int] = {}
    for entry in given:
        if type(entry) is not dict or entry.keys() != {"partition", "offset"}:
            raise MalformedJson('partitions is a list of {"partition", "offset"}')
        partition = integer(entry["partition"], "partition", most=PARTITION_MAX)
        offset = integer(entry["offset"], "offset", most=OFFSET_MAX)
        if partition is None or offset is None:
            raise MalformedJson("partition and offset are numbers")
        if partition in offsets:
            raise MalformedJson(f"partition {partition} is named twice")
        offsets[partition] = offset
    return offsets


def describe(site: HttpContext, name: str) -> dict[str, Any]:
    state = site.broker.cursors.get(name)
    positions = site.broker.cursors.positions(name)
    return {
        "name": name,
        "pin": state.pin,
        "max_age_ms": state.max_age_ms,
        "updated": state.updated_ms,
        "lag": sum(position.lag for position in positions),
        "topics": [
            {
                "topic": topic,
                "partitions": [
                    {
                        "partition": p.partition.number,
                        "offset": p.offset,
                        "start": p.partition.start_offset,
                        "end": p.partition.end_offset,
                        "lag": p.lag,
                    }
                    for p in group
                ],
            }
            for topic, group in groupby(positions, key=lambda p: p.stream.name)
        ],
    }
