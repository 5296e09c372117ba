"""Consumer groups and cursors: members, positions and lag, and resetting of offsets with a dry run."""

import asyncio
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.groups.coordinator import Listed
from headrace.broker.groups.offsets import CommittedOffset
from headrace.broker.streams.streams import Stream
from headrace.errors import Conflict, GroupNotFound, HeadraceError, InvalidInput
from headrace.listeners.http.management.parameters import (
    JsonObject,
    body_of,
    flag,
    json_response,
    listing,
    name_of,
    no_content,
    number,
    object_response,
)
from headrace.listeners.http.native.cursors import check_read
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext

TARGETS = ("earliest", "latest", "timestamp", "offset", "shift")


def group_summary(context: HttpContext, group_id: str, state: str, kind: str) -> JsonObject:
    positions = _positions(context, group_id)
    group = context.broker.coordination.groups.find(group_id)
    return {
        "name": group_id,
        "kind": "group",
        "protocol": kind,
        "state": state,
        "members": len(group.members) if group is not None else 0,
        "topics": sorted({position["topic"] for position in positions}),
        "lag": sum(position["lag"] for position in positions),
        "pin": False,
    }


def cursor_summary(context: HttpContext, name: str) -> JsonObject:
    cursors = context.broker.cursors
    state, positions = cursors.get(name), cursors.positions(name)
    return {
        "name": name,
        "kind": "cursor",
        "protocol": "cursor",
        "state": "Stable",
        "members": 0,
        "topics": sorted({p.stream.name for p in positions}),
        "lag": sum(p.lag for p in positions),
        "pin": state.pin,
        "updated": state.updated_ms,
    }


def _positions(context: HttpContext, group_id: str) -> list[JsonObject]:
    broker = context.broker
    found = []
    for (topic, number_), committed in sorted(broker.coordination.groups.offsets.of(group_id).items()):
        stream = broker.streams.find(topic)
        if stream is None or number_ >= len(stream.partitions):
            continue
        partition = stream.partitions[number_]
        found.append(
            {
                "topic": topic,
                "partition": number_,
                "offset": committed.offset,
                "start": partition.start_offset,
                "end": partition.end_offset,
                "lag": max(0, partition.end_offset - max(committed.offset, partition.start_offset)),
                "committed": committed.commit_ms,
            }
        )
    return found


async def list_all(context: HttpContext, request: Request) -> Response:
    found = [
        *((g.group_id, g.state, g.kind) for g in context.broker.coordination.groups.listing()),
        *((name, "", "cursor") for name in context.broker.cursors.names()),
    ]

    def shape(item: tuple[str, str, str]) -> JsonObject:
        return cursor_summary(context, item[0]) if item[2] == "cursor" else group_summary(context, *item)

    return await listing(
        context, request, sorted(found), shape, name=lambda item: item[0], quick={"name": lambda item: item[0]}
    )


async def get(context: HttpContext, request: Request) -> Response:
    name = name_of(request, "group")
    if request.path_params["kind"] == "cursor":
        positions = [
            {
                "topic": p.stream.name,
                "partition": p.partition.number,
                "offset": p.offset,
                "start": p.partition.start_offset,
                "end": p.partition.end_offset,
                "lag": p.lag,
            }
            for p in context.broker.cursors.positions(name)
        ]
        return object_response(request, {**cursor_summary(context, name), "positions": positions, "member_details": []})
    listed = _listed(context, name)
    group = context.broker.coordination.groups.find(name)
    members = [
        {"id": member_id, "client": getattr(member, "client_id", ""), "host": getattr(member, "client_host", "")}
        for member_id, member in (group.members.items() if group is not None else ())
    ]
    summary = group_summary(context, name, listed.state, listed.kind)
    return object_response(request, {**summary, "positions": _positions(context, name), "member_details": members})


def _listed(context: HttpContext, name: str) -> Listed:
    for listed in context.broker.coordination.groups.listing():
        if listed.group_id == name:
            return listed
    raise GroupNotFound(name)


async def reset(context: HttpContext, request: Request) -> Response:
    """Returns the offsets after a reset; with dry_run=false it also commits them."""
    name, kind = name_of(request, "group"), request.path_params["kind"]
    fields = await body_of(request)
    topic = fields.get("topic")
    if not isinstance(topic, str):
        raise InvalidInput("topic is required: the topic whose offsets are reset")
    caller_of(request).read(topic)  # the permission that reading and committing needs
    if kind == "cursor":
        check_read(context, request, name)
    else:
        caller_of(request).read(name)  # groups have permissions by name, as at the Kafka listener
    stream = context.broker.streams.get(topic)
    now = _current(context, name, kind, topic)
    partitions = fields.get("partitions")
    if partitions is None:
        chosen = sorted(now) or [p.number for p in stream.partitions]
    elif isinstance(partitions, list) and all(type(p) is int for p in partitions):
        chosen = partitions
    else:
        raise InvalidInput("partitions must be a list of integers")
    moves = [await _move(stream, number_, now.get(number_), fields) for number_ in chosen]
    dry_run = flag(fields.get("dry_run"), True)
    if not dry_run:
        offsets = {move["partition"]: move["to"] for move in moves}
        if kind == "cursor":
            await context.broker.cursors.commit(name, stream, offsets)
        else:
            await _commit(context, name, stream, offsets)
    return json_response({"name": name, "topic": topic, "dry_run": dry_run, "moves": moves})


def _current(context: HttpContext, name: str, kind: str, topic: str) -> dict[int, int]:
    if kind == "cursor":
        return {p.partition.number: p.offset for p in context.broker.cursors.positions(name) if p.stream.name == topic}
    _listed(context, name)
    committed = context.broker.coordination.groups.offsets.of(name)
    return {number_: one_.offset for (t, number_), one_ in committed.items() if t == topic}


async def _move(stream: Stream, number_: int, now: int | None, fields: Mapping[str, Any]) -> JsonObject:
    partition = stream.partition(number_)
    start, end = partition.start_offset, partition.end_offset
    target = fields.get("to", "earliest")
    if target == "earliest":
        to = start
    elif target == "latest":
        to = end
    elif target == "timestamp":
        to = await partition.offset_at(number(fields.get("timestamp"), "timestamp"))
    elif target == "offset":
        to = number(fields.get("offset"), "offset")
    elif target == "shift":
        to = (now if now is not None else start) + number(fields.get("shift"), "shift", least=-(2**53))
    else:
        raise InvalidInput(f"to must be one of {', '.join(TARGETS)}")
    to = min(max(to, start), end)
    return {
        "partition": number_,
        "from": now,
        "to": to,
        "start": start,
        "end": end,
        "again": max(0, (now if now is not None else to) - to),
        "skipped": max(0, to - now) if now is not None else 0,
    }


async def _commit(context: HttpContext, name: str, stream: Stream, offsets: Mapping[int, int]) -> None:
    groups = context.broker.coordination.groups
    group = groups.find(name)
    if group is not None and group.members:
        raise Conflict(f"group {name!r} has {len(group.members)} members: stop them first, they would overwrite this")
    now_ms = context.broker.clock.now_ms()
    entries = [
        CommittedOffset(name, stream.name, number_, stream.partition(number_).log_id, offset, -1, "", now_ms)
        for number_, offset in offsets.items()
    ]
    done: asyncio.Future[HeadraceError | None] = asyncio.get_running_loop().create_future()
    groups.commit(entries, lambda error: None if done.done() else done.set_result(error))
    error = await done
    if error is not None:
        raise error


def _topics(context: HttpContext, name: str, kind: str) -> set[str]:
    if kind == "cursor":
        return {position.stream.name for position in context.broker.cursors.positions(name)}
    return {topic for topic, _ in context.broker.coordination.groups.offsets.of(name)}


async def delete(context: HttpContext, request: Request) -> Response:
    name, kind = name_of(request, "group"), request.path_params["kind"]
    if kind != "cursor":
        caller_of(request).read(name)
    for topic in _topics(context, name, kind):
        caller_of(request).read(topic)
    if kind == "cursor":
        await context.broker.cursors.delete(name)
        return no_content()
    done: asyncio.Future[HeadraceError | None] = asyncio.get_running_loop().create_future()
    context.broker.coordination.groups.delete(name, lambda error: None if done.done() else done.set_result(error))
    error = await done
    if error is not None:
        raise error
    return no_content()
