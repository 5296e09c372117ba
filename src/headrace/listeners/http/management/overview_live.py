"""Live numbers, under /api/headrace/overview: of now, of the last minutes, and as they change."""

import asyncio
import os
from itertools import pairwise
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.broker.cooperative import YieldEvery
from headrace.broker.metrics.history import INTERVAL_S, QUEUES_PER_SECOND, Sample
from headrace.broker.types.vhost_names import DEFAULT
from headrace.errors import HeadraceError
from headrace.listeners.http.management import representations
from headrace.listeners.http.management.overview import memory_bytes, rates_between, recent_rates, totals_of
from headrace.listeners.http.management.parameters import Shape, encode, number, one, query_of
from headrace.listeners.http.management.visibility import clients_seen, hosts_seen
from headrace.listeners.http.server.authentication import MONITORING
from headrace.listeners.http.server.authorization import Allowance, caller_of
from headrace.listeners.http.server.context import HttpContext
from headrace.listeners.http.server.requests import hung_up
from headrace.wire.http import bodies, events

STEP_S_MAX = 60
QUANTILES = (0.5, 0.99)
COLUMNS = ("at", "published", "delivered", "acked", "sent", "ready", "unacked", "sync_ms", "bytes_written")


def quantile(histogram: Any, share: float) -> float | None:
    """The bound below which that share of all observations lies; None without any."""
    total = sum(histogram.counts)
    if not total:
        return None
    running = 0
    for bound, count in zip([*histogram.bounds, histogram.bounds[-1]], histogram.counts, strict=True):
        running += count
        if running >= share * total:
            return float(bound)
    return float(histogram.bounds[-1])


def alarms(site: HttpContext) -> list[Shape]:
    broker = site.broker
    found = []
    reason = broker.why_not_ready()
    if reason is not None:
        found.append({"level": "error", "text": reason})
    free = free_bytes(site)
    limit = broker.config.disk_free_limit
    if free is not None and free < 2 * limit:
        text = f"{free >> 20:,} MB of disk are free; below {limit >> 20:,} MB publishers wait"
        found.append({"level": "warning", "text": text})
    damaged = sum(1 for log in broker.shard.logs.values() if getattr(log, "has_damage", False))
    if damaged:
        text = f"{damaged} {'log is' if damaged == 1 else 'logs are'} damaged: headrace log verify says where"
        found.append({"level": "error", "text": text})
    return found


def free_bytes(site: HttpContext) -> int | None:
    try:
        return int(site.broker.disk.free_bytes(site.broker.config.data_dir))
    except OSError:
        return None


def live_shape(site: HttpContext) -> Shape:
    broker = site.broker
    sample, rates = recent_rates(site)
    sync = broker.shard.counters.sync_s
    return {
        "at": sample.at_ms,
        "rates": {name: round(value, 2) for name, value in rates.items()},
        "ready": sample.ready,
        "unacked": sample.unacked,
        "connections": len(broker.clients.all()),  # those that are listed: a browser that looks is not among them
        "listeners": {
            name: {"connections": listener.connections, "in": listener.messages_in, "out": listener.messages_out}
            for name, listener in broker.stats.listeners.items()
        },
        "memory_bytes": memory_bytes(),
        "disk_free_bytes": free_bytes(site),
        "pending_bytes": broker.shard.pending_bytes,
        "sync_ms": {f"p{share * 100:g}": _ms(quantile(sync, share)) for share in QUANTILES},
        "stalls": sum(broker.stats.loop_stall_s.counts),
        "alarms": alarms(site),
        "counts": {
            "streams": len(broker.streams),
            "queues": sum(len(host.queues) for host in broker.vhosts),
            "groups": len(broker.coordination.groups.listing()),
            "cursors": len(broker.cursors),
            "pipelines": len(broker.pipelines),
        },
        "standby": broker.standbys.describe(),
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


async def own_shape(site: HttpContext, request: Request) -> Shape:
    """The same of the virtual hosts that the caller sees. What is the whole broker's is empty."""
    broker, caller = site.broker, caller_of(request)
    hosts = {host.name: host for host in hosts_seen(site, request)}
    queues = [queue for host in hosts.values() for queue in host.queues.values()]
    depths, stats = await totals_of(site, queues, caller.name)
    names = {"published": "publish", "delivered": "deliver_get", "acked": "ack"}
    groups, cursors, pipelines = broker.coordination.groups.listing(), broker.cursors, broker.pipelines
    return {
        **dict.fromkeys(live_shape(site)),
        "at": broker.history.latest().at_ms,
        "rates": {name: stats[f"{counter}_details"]["rate"] for name, counter in names.items()} | {"sent": 0.0},
        "ready": depths["messages_ready"],
        "unacked": depths["messages_unacknowledged"],
        "connections": len(clients_seen(site, request)),
        "listeners": {},
        "sync_ms": {},
        "alarms": alarms(site),
        "counts": {
            "streams": sum(stream.vhost in hosts for stream in broker.streams),
            "queues": len(queues),
            **{
                name: len(there) if DEFAULT in hosts else 0
                for name, there in (("groups", groups), ("cursors", cursors), ("pipelines", pipelines))
            },
        },
    }


async def overview(site: HttpContext, request: Request) -> Response:
    """The numbers of now and the last minutes, one row for each step."""
    step = number(query_of(request).get("step"), "step", 1, least=1, most=STEP_S_MAX)
    broker, sees_all = site.broker, caller_of(request).is_one_of(MONITORING)
    seen = {host.name for host in hosts_seen(site, request)}
    streams = [stream for stream in broker.streams if stream.vhost in seen]
    sizes = await YieldEvery().map(lambda s: sum(p.log.size_bytes for p in s.partitions), streams)
    shape: Shape = {
        "node": representations.NODE,
        "started": broker.stats.started_ms,
        "durability": broker.config.durability,
        "addresses": site.addresses,
        "tls": site.listeners_with_tls,
        "log_size_bytes": sum(sizes),
    }
    if not sees_all:
        return one(request, {**await own_shape(site, request), **shape, "history": history([])})
    shape |= {"pid": os.getpid(), "data_dir": broker.config.data_dir, "recovery": broker.report.summary()}
    samples = list(broker.history.samples)[::-step][::-1]
    return one(request, {**live_shape(site), **shape, "history": history(samples)})


def history(samples: list[Sample]) -> Shape:
    """Columns, as plots want them."""
    columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
    for old, new in pairwise(samples):
        rates = rates_between(new, old)
        columns["at"].append(new.at_ms / 1000)
        for name in ("published", "delivered", "acked", "sent", "bytes_written"):
            columns[name].append(round(rates[name], 2))
        columns["ready"].append(new.ready)
        columns["unacked"].append(new.unacked)
        syncs = new.sync_count - old.sync_count
        columns["sync_ms"].append(round((new.sync_total_s - old.sync_total_s) / syncs * 1000, 3) if syncs else None)
    return columns


def last_of(shape: Shape) -> Shape:
    """A row of the history, out of what is so now."""
    row = {**dict.fromkeys(COLUMNS), **shape["rates"], "at": shape["at"] / 1000}
    row |= {"ready": shape["ready"], "unacked": shape["unacked"]}
    return {name: [row[name]] for name in COLUMNS}


class Live(Response):
    """The numbers of every second as server-sent events."""

    def __init__(self, site: HttpContext, request: Request) -> None:
        super().__init__(None, 200, {"cache-control": "no-store"}, media_type=bodies.EVENTS)
        del self.headers["content-length"]
        self._site = site
        self._request = request
        self._allowance = Allowance(site, request)
        self._own: Shape = {}
        self._own_due_s = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body"})
            return
        gone = asyncio.ensure_future(hung_up(receive))
        stopping = self._site.stopping
        history_ = self._site.broker.history
        try:
            while not (gone.done() or stopping.done()):
                self._allowance.check()
                content = await self._content()
                data = events.event(encode(content), str(content["at"]))
                await send({"type": "http.response.body", "body": data, "more_body": True})
                await asyncio.wait({history_.next(), gone, stopping}, return_when=asyncio.FIRST_COMPLETED)
        except HeadraceError as error:
            data = events.event(encode({"detail": str(error)}), "", "error")
            await send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            gone.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _content(self) -> Shape:
        site = self._site
        if caller_of(self._request).is_one_of(MONITORING):
            return {**live_shape(site), "last": history(list(site.broker.history.samples)[-2:])}
        now_s = site.broker.clock.monotonic()
        if now_s >= self._own_due_s:  # the more queues, the older it may be, as in the broker's own history
            self._own = await own_shape(site, self._request)
            self._own_due_s = now_s + self._own["counts"]["queues"] / QUEUES_PER_SECOND - INTERVAL_S / 2
        content = {**self._own, "at": site.broker.history.latest().at_ms}
        return {**content, "last": last_of(content)}


async def live(site: HttpContext, request: Request) -> Response:
    return Live(site, request)
