"""Dead letters: what died, of what, where, and the way back."""

import secrets
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
from headrace.listeners.http.management.browse import record_shape
from headrace.listeners.http.management.parameters import (
    Shape,
    answer,
    body_of,
    flag,
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
SCAN_AT_ONCE = 100  # headers of dead letters are long: each takes fifty microseconds


async def list_queues(site: HttpContext, request: Request) -> Response:
    """Queues that others send their dead letters to."""
    running = [replay for replay in site.broker.dead_letters.replays() if replay.state == "running"]

    def shape(item: tuple[Queue, list[str]]) -> Shape:
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
    found = [item for item in site.broker.dead_letters.queues() if caller.sees(item[0].vhost.name)]
    return await listing(site, request, found, shape, name=lambda item: item[0].name)


async def get(site: HttpContext, request: Request) -> Response:
    queue = queue_of(site, request)
    office = site.broker.dead_letters
    groups, looked, unread = await office.summary(queue)
    return answer(
        {
            "name": queue.name,
            "vhost": queue.vhost.name,
            "messages": queue.ready + queue.unacked,
            "ready": queue.ready,
            "looked_at": looked,
            "groups": groups,
            "gaps": gaps_shape(unread),
            "replays": [
                replay_shape(r) for r in office.replays() if (r.vhost, r.queue) == (queue.vhost.name, queue.name)
            ],
        }
    )


def gaps_shape(unread: list[Unread]) -> list[Shape]:
    return [{"partition": one.level, **one.gap._asdict()} for one in unread]


def death_shape(death: Death | None) -> Shape | None:
    if death is None:
        return None
    shape = death._asdict()
    shape["time"] = shape.pop("time_s") * 1000
    return shape


async def messages(site: HttpContext, request: Request) -> Response:
    """The dead letters that a filter finds, with how they died. They stay where they are.

    One question goes through so many at most; `next` says where the next one goes on, if there is more.
    """
    queue, query = queue_of(site, request), query_of(request)
    limit = number(query.get("limit"), "limit", PEEK, least=1, most=PEEK_MAX)
    wanted = _wanted(query)
    start = number(query.get("offset"), "offset", 0)
    level = number(query["partition"], "partition") if query.get("partition") else None
    row = Row(queue.vhost.name, queue.name, site.broker.streams.find(queue.name, queue.vhost.name), queue)
    found: list[Shape] = []
    unread: list[Unread] = []
    left, size, turns = SCAN_RECORDS_MAX, 0, YieldEvery()
    for view in queue.views:
        if level is not None and view.level > level:
            continue  # the highest come first: they were looked at

        def fits(record: Record, view: Any = view) -> bool:
            message = from_record(record)
            return state_of(view, record.offset) == READY and wanted.fits(message, death_of(message))

        offset = max(view.low, start if level in (None, view.level) else 0)
        while offset < view.log.stable_end:
            if len(found) >= limit or left <= 0 or size >= BYTES_MAX:
                at = {"partition": view.level, "offset": offset}
                return answer({"messages": found, "next": at, "gaps": gaps_shape(unread)})
            gaps: list[Gap] = []
            page = await browse(
                view.log,
                offset,
                limit=limit - len(found),
                bytes_max=BYTES_MAX - size,
                decompressed_bytes_max=site.config.decompressed_bytes_max,
                wanted=fits,
                scan_max=min(left, SCAN_AT_ONCE),
                gaps=gaps,
            )
            unread += (Unread(view.level, gap) for gap in gaps)
            for record in page.records:
                shape = record_shape(row, view.level, record)
                shape["death"] = death_shape(death_of(from_record(record)))
                found.append(shape)
                size += len(record.value or b"") + len(record.key or b"")
            if page.next_offset <= offset:
                break
            offset = page.next_offset
            left -= page.scanned
            await turns.rest()  # large letters, and many, take several looks: others are served in between
        unread += (Unread(view.level, gap) for gap in unserved(view.log))
    return answer({"messages": found, "next": None, "gaps": gaps_shape(unread)})


def _wanted(fields: Any) -> Selection:
    values = {name: fields.get(name) or None for name in ("reason", "origin", "contains")}
    for name, value in values.items():
        if value is not None and not isinstance(value, str):
            raise InvalidInput(f"{name} is a string")
    return Selection(**values)


async def replay(site: HttpContext, request: Request) -> Response:
    """Says what would go where; with dry_run=false it goes."""
    queue, fields = queue_of(site, request), await body_of(request)
    caller_of(request).write("", queue.vhost.name)  # messages go back to queues by name, through the default exchange
    wanted = _wanted(fields)
    to = fields.get("to")
    if to is not None and not isinstance(to, str):
        raise InvalidInput("to is the name of a queue; without it messages go where they came from")
    count = number(fields["count"], "count", least=1) if fields.get("count") is not None else None
    rate = number(fields.get("rate"), "rate", 0, most=RATE_MAX)
    office = site.broker.dead_letters
    if flag(fields.get("dry_run"), True):
        plan = await office.plan(queue, wanted, to=to, count=count)
        facts = {"matched": plan.matched, "targets": plan.targets, "missing": plan.missing}
        return answer({"dry_run": True, **facts, "gaps": gaps_shape(plan.unread)})
    if to is not None:
        site.broker.vhosts.get(queue.vhost.name).queue(to)
    begun = await office.replay(queue, wanted, replay_id=secrets.token_hex(8), to=to, count=count, rate=float(rate))
    return answer({"dry_run": False, **replay_shape(begun)}, 202)


def replay_shape(replay_: Replay) -> Shape:
    shape: Shape = msgspec.to_builtins(replay_)
    del shape["until"]
    shape["started"], shape["ended"] = shape.pop("started_ms"), shape.pop("ended_ms")
    return shape


async def list_replays(site: HttpContext, request: Request) -> Response:
    caller = caller_of(request)
    found = [replay_ for replay_ in site.broker.dead_letters.replays() if caller.sees(replay_.vhost)]
    return await listing(site, request, found, replay_shape)


async def get_replay(site: HttpContext, request: Request) -> Response:
    found = site.broker.dead_letters.get(name_of(request, "replay"))
    caller_of(request).must_see(found.vhost)
    return answer(replay_shape(found))


async def stop_replay(site: HttpContext, request: Request) -> Response:
    found = site.broker.dead_letters.get(name_of(request, "replay"))
    caller_of(request).read(found.queue, found.vhost)
    return answer(replay_shape(await site.broker.dead_letters.stop(found.id)))
