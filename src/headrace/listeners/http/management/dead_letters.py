"""Dead letters: browse them by reason and origin, and replay them to their queues."""

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.cooperative import YieldEvery
from headrace.broker.queues.dead_letter_browser import Death, Replay, Selection, Unread, death_of
from headrace.broker.queues.queue import Queue
from headrace.broker.streams.browse import READY, SCAN_RECORDS_MAX, Gap, browse, state_of, unserved
from headrace.broker.types.message import from_record
from headrace.errors import InvalidInput
from headrace.listeners.http.management.browse import messages_response, record_json
from headrace.listeners.http.management.parameters import (
    JsonObject,
    body_of,
    encode,
    flag,
    json_response,
    listing,
    name_of,
    number,
    query_of,
)
from headrace.listeners.http.management.queues import queue_of
from headrace.listeners.http.management.streams import Row
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext
from headrace.record.types import Record

PEEK, PEEK_MAX = 20, 200
BYTES_MAX = 2 << 20
RATE_MAX = 1_000_000
SCAN_AT_ONCE = 100  # parsing the long headers of a dead letter takes fifty microseconds


async def list_queues(context: HttpContext, request: Request) -> Response:
    """Queues that receive dead letters of other queues."""
    running = [replay for replay in context.broker.dead_letters.replays() if replay.state == "running"]

    def shape(item: tuple[Queue, list[str]]) -> JsonObject:
        queue, sources = item
        return {
            "name": queue.name,
            "vhost": queue.vhost.name,
            "messages": queue.ready + queue.unacked,
            "ready": queue.ready,
            "sources": sorted(set(sources))[:100],
            "consumers": len(queue.consumers),
            "replaying": any(r.queue == queue.name and r.vhost == queue.vhost.name for r in running),
        }

    caller = caller_of(request)
    found = [item for item in context.broker.dead_letters.queues() if caller.sees(item[0].vhost.name)]
    return await listing(context, request, found, shape, name=lambda item: item[0].name)


async def get(context: HttpContext, request: Request) -> Response:
    queue = queue_of(context, request)
    dead_letters = context.broker.dead_letters
    groups, scanned, unread = await dead_letters.summary(queue)
    return json_response(
        {
            "name": queue.name,
            "vhost": queue.vhost.name,
            "messages": queue.ready + queue.unacked,
            "ready": queue.ready,
            "looked_at": scanned,
            "groups": groups,
            "gaps": gaps_json(unread),
            "replays": [
                replay_json(r) for r in dead_letters.replays() if (r.vhost, r.queue) == (queue.vhost.name, queue.name)
            ],
        }
    )


def gaps_json(unread: list[Unread]) -> list[JsonObject]:
    return [{"partition": one.level, **one.gap._asdict()} for one in unread]


def death_json(death: Death | None) -> JsonObject | None:
    if death is None:
        return None
    shape = death._asdict()
    shape["time"] = shape.pop("time_s") * 1000
    return shape


async def messages(context: HttpContext, request: Request) -> Response:
    """Dead letters that match a filter, with the reason of their death. They are not consumed.

    A request scans a limited number of messages; `next` is the position to continue at, or null at the end.
    """
    queue, query = queue_of(context, request), query_of(request)
    limit = number(query.get("limit"), "limit", PEEK, least=1, most=PEEK_MAX)
    wanted = _selection(query)
    start = number(query.get("offset"), "offset", 0)
    level = number(query["partition"], "partition") if query.get("partition") else None
    row = Row(queue.vhost.name, queue.name, context.broker.streams.find(queue.name, queue.vhost.name), queue)
    found: list[bytes] = []
    unread: list[Unread] = []
    to_scan, size, yielding = SCAN_RECORDS_MAX, 0, YieldEvery()

    def matches(record: Record) -> bool:
        message = from_record(record)
        return wanted.fits(message, death_of(message))

    for view in queue.views:
        if level is not None and view.level > level:
            continue  # higher priorities come first and were scanned already

        def is_ready(record: Record, view: Any = view) -> bool:
            return state_of(view, record.offset) == READY

        offset = max(view.low, start if level in (None, view.level) else 0)
        while offset < view.partition.stable_end:
            if len(found) >= limit or to_scan <= 0 or size >= BYTES_MAX:
                at = {"partition": view.level, "offset": offset}
                return messages_response(found, {"next": at, "gaps": gaps_json(unread)})
            gaps: list[Gap] = []
            page = await browse(
                context.broker.pages.decoder,
                view.partition,
                offset,
                limit=limit - len(found),
                bytes_max=BYTES_MAX - size,
                wanted=is_ready,
                content=matches,
                scan_max=min(to_scan, SCAN_AT_ONCE),
                gaps=gaps,
            )
            unread += (Unread(view.level, gap) for gap in gaps)
            for record in page.records:
                shape = record_json(row, view.level, record)
                shape["death"] = death_json(death_of(from_record(record)))
                found.append(encode(shape))
                size += len(record.value or b"") + len(record.key or b"")
                await yielding.maybe_yield()
            if page.next_offset <= offset:
                break
            offset = page.next_offset
            to_scan -= page.scanned
            await yielding.maybe_yield()  # lets other requests run between the pages of a long scan
        unread += (Unread(view.level, gap) for gap in unserved(view.partition))
    return messages_response(found, {"next": None, "gaps": gaps_json(unread)})


def _selection(fields: Mapping[str, Any]) -> Selection:
    values = {name: fields.get(name) or None for name in ("reason", "origin", "contains")}
    for name, value in values.items():
        if value is not None and not isinstance(value, str):
            raise InvalidInput(f"{name} must be a string")
    return Selection(**values)


async def replay(context: HttpContext, request: Request) -> Response:
    """Returns what a replay would move where; with dry_run=false it starts the replay."""
    queue, fields = queue_of(context, request), await body_of(request)
    caller_of(request).write("", queue.vhost.name)  # messages return to queues by name, through the default exchange
    wanted = _selection(fields)
    to = fields.get("to")
    if to is not None and not isinstance(to, str):
        raise InvalidInput("to must be the name of a queue; omit it to return messages to their original queues")
    count = number(fields["count"], "count", least=1) if fields.get("count") is not None else None
    rate = number(fields.get("rate"), "rate", 0, most=RATE_MAX)
    dead_letters = context.broker.dead_letters
    if flag(fields.get("dry_run"), True):
        plan = await dead_letters.plan(queue, wanted, to=to, count=count)
        facts = {"matched": plan.matched, "targets": plan.targets, "missing": plan.missing}
        return json_response({"dry_run": True, **facts, "gaps": gaps_json(plan.unread)})
    if to is not None:
        context.broker.vhosts.get(queue.vhost.name).queue(to)
    begun = await dead_letters.replay(
        queue, wanted, replay_id=secrets.token_hex(8), to=to, count=count, rate=float(rate)
    )
    return json_response({"dry_run": False, **replay_json(begun)}, 202)


def replay_json(replay_: Replay) -> JsonObject:
    shape: JsonObject = msgspec.to_builtins(replay_)
    del shape["until"]
    shape["started"], shape["ended"] = shape.pop("started_ms"), shape.pop("ended_ms")
    return shape


async def list_replays(context: HttpContext, request: Request) -> Response:
    caller = caller_of(request)
    found = [replay_ for replay_ in context.broker.dead_letters.replays() if caller.sees(replay_.vhost)]
    return await listing(context, request, found, replay_json)


async def get_replay(context: HttpContext, request: Request) -> Response:
    found = context.broker.dead_letters.get(name_of(request, "replay"))
    caller_of(request).must_see(found.vhost)
    return json_response(replay_json(found))


async def stop_replay(context: HttpContext, request: Request) -> Response:
    found = context.broker.dead_letters.get(name_of(request, "replay"))
    caller_of(request).read(found.queue, found.vhost)
    return json_response(replay_json(await context.broker.dead_letters.stop(found.id)))
