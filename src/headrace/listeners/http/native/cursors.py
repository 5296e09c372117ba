"""Named cursors: positions of a reader, its lag, and whether it keeps retention from deleting."""

from itertools import groupby

from starlette.requests import Request
from starlette.responses import Response

from headrace.errors import MalformedJson
from headrace.listeners.http.native.types import Cursor, CursorChange, Cursors, NewCursorPosition
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext, json_response
from headrace.listeners.http.server.requests import Query, decode, path_name, read_json, refuse_unknown


async def list_cursors(context: HttpContext, request: Request) -> Response:
    Query(request)
    cursors: Cursors = {"cursors": [describe(context, name) for name in context.broker.cursors.names()]}
    return json_response(cursors)


async def get_cursor(context: HttpContext, request: Request) -> Response:
    Query(request)
    return json_response(describe(context, path_name(request, "cursor")))


async def put_cursor(context: HttpContext, request: Request) -> Response:
    """Moves the cursor in one topic; the move is durable when the response is sent."""
    Query(request)
    name = path_name(request, "cursor")
    fields = await read_json(request, request.state.share)
    refuse_unknown(fields, CursorChange)
    change = decode(fields, CursorChange)
    caller_of(request).read(change.topic)
    if name in context.broker.cursors:  # pin and max_age_ms apply to all topics of the cursor
        check_read(context, request, name)
    offsets = _offsets(change.partitions)
    stream = context.broker.streams.get(change.topic)
    await context.broker.cursors.commit(name, stream, offsets, pin=change.pin, max_age_ms=change.max_age_ms)
    return json_response(describe(context, name))


async def delete_cursor(context: HttpContext, request: Request) -> Response:
    Query(request)
    name = path_name(request, "cursor")
    check_read(context, request, name)
    await context.broker.cursors.delete(name)
    return Response(status_code=204)


def check_read(context: HttpContext, request: Request, name: str) -> None:
    """Forbidden unless the caller may read every topic in which the cursor has a position."""
    for topic in {position.stream.name for position in context.broker.cursors.positions(name)}:
        caller_of(request).read(topic)


def _offsets(positions: list[NewCursorPosition]) -> dict[int, int]:
    offsets: dict[int, int] = {}
    for position in positions:
        if position.partition in offsets:
            raise MalformedJson(f"partition {position.partition} is listed twice")
        offsets[position.partition] = position.offset
    return offsets


def describe(context: HttpContext, name: str) -> Cursor:
    state = context.broker.cursors.get(name)
    positions = context.broker.cursors.positions(name)
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
