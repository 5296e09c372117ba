"""The dashboard's overview, under /api/headrace/overview: current numbers, the last minutes, and a live stream."""

import os
from itertools import pairwise
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.cooperative import YieldEvery
from headrace.broker.metrics.counters import Histogram
from headrace.broker.metrics.history import INTERVAL_S, QUEUES_PER_SECOND, Sample
from headrace.broker.types.vhost_names import DEFAULT
from headrace.broker.vhosts.global_parameters import NODE
from headrace.listeners.http.management.overview import memory_bytes, rates_between, recent_rates, totals_of
from headrace.listeners.http.management.parameters import JsonObject, encode, number, object_response, query_of
from headrace.listeners.http.management.visibility import visible_clients, visible_hosts
from headrace.listeners.http.server.authentication import MONITORING
from headrace.listeners.http.server.authorization import caller_of
from headrace.listeners.http.server.context import HttpContext
from headrace.listeners.http.server.event_stream import EventStreamResponse
from headrace.wire.http import events

STEP_S_MAX = 60
QUANTILES = (0.5, 0.99)
COLUMNS = ("at", "published", "delivered", "acked", "sent", "ready", "unacked", "sync_ms", "bytes_written")


def quantile(histogram: Histogram, share: float) -> float | None:
    """Upper bound of the bucket that contains the quantile; None without observations."""
    total = sum(histogram.counts)
    if not total:
        return None
    running = 0
    for bound, count in zip([*histogram.bounds, histogram.bounds[-1]], histogram.counts, strict=True):
        running += count
        if running >= share * total:
            return float(bound)
    return float(histogram.bounds[-1])


def alarms(context: HttpContext) -> list[JsonObject]:
    broker = context.broker
    found = []
    reason = broker.why_not_ready()
    if reason is not None:
        found.append({"level": "error", "text": reason})
    free = free_bytes(context)
    limit = broker.config.disk_free_limit
    if free is not None and free < 2 * limit:
        text = f"low disk space: {free >> 20:,} MB free; publishers are blocked below {limit >> 20:,} MB"
        found.append({"level": "warning", "text": text})
    damaged = broker.storage.damaged_logs
    if damaged:
        text = f"{damaged} {'log is' if damaged == 1 else 'logs are'} damaged: run headrace log verify for details"
        found.append({"level": "error", "text": text})
    return found


def free_bytes(context: HttpContext) -> int | None:
    try:
        return int(context.broker.disk.free_bytes(context.broker.config.data_dir))
    except OSError:
        return None


def live_json(context: HttpContext) -> JsonObject:
    broker = context.broker
    sample, rates = recent_rates(context)
    sync = broker.storage.counters.sync_s
    return {
        "at": sample.at_ms,
        "rates": {name: round(value, 2) for name, value in rates.items()},
        "ready": sample.ready,
        "unacked": sample.unacked,
        "connections": len(broker.clients.all()),  # listed connections only, without browsers
        "listeners": {
            name: {"connections": listener.connections, "in": listener.messages_in, "out": listener.messages_out}
            for name, listener in broker.stats.listeners.items()
        },
        "memory_bytes": memory_bytes(),
        "disk_free_bytes": free_bytes(context),
        "pending_bytes": broker.storage.pending_bytes,
        "sync_ms": {f"p{share * 100:g}": _ms(quantile(sync, share)) for share in QUANTILES},
        "stalls": sum(broker.stats.loop_stall_s.counts),
        "alarms": alarms(context),
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


async def own_json(context: HttpContext, request: Request) -> JsonObject:
    """The same for the virtual hosts that the caller may see; broker-wide numbers are empty."""
    broker, caller = context.broker, caller_of(request)
    hosts = {host.name: host for host in visible_hosts(context, request)}
    queues = [queue for host in hosts.values() for queue in host.queues.values()]
    depths, stats = await totals_of(context, queues, caller.name)
    names = {"published": "publish", "delivered": "deliver_get", "acked": "ack"}
    groups, cursors, pipelines = broker.coordination.groups.listing(), broker.cursors, broker.pipelines
    return {
        **dict.fromkeys(live_json(context)),
        "at": broker.history.latest().at_ms,
        "rates": {name: stats[f"{counter}_details"]["rate"] for name, counter in names.items()} | {"sent": 0.0},
        "ready": depths["messages_ready"],
        "unacked": depths["messages_unacknowledged"],
        "connections": len(visible_clients(context, request)),
        "listeners": {},
        "sync_ms": {},
        "alarms": alarms(context),
        "counts": {
            "streams": sum(stream.vhost in hosts for stream in broker.streams),
            "queues": len(queues),
            **{
                name: len(there) if DEFAULT in hosts else 0
                for name, there in (("groups", groups), ("cursors", cursors), ("pipelines", pipelines))
            },
        },
    }


async def overview(context: HttpContext, request: Request) -> Response:
    """Current numbers and the history of the last minutes, with one row per step."""
    step = number(query_of(request).get("step"), "step", 1, least=1, most=STEP_S_MAX)
    broker, is_monitor = context.broker, caller_of(request).is_one_of(MONITORING)
    seen = {host.name for host in visible_hosts(context, request)}
    streams = [stream for stream in broker.streams if stream.vhost in seen]
    sizes = await YieldEvery().map(lambda s: sum(p.size_bytes for p in s.partitions), streams)
    shape: JsonObject = {
        "node": NODE,
        "started": broker.stats.started_ms,
        "durability": broker.config.durability,
        "addresses": context.addresses,
        "tls": context.listeners_with_tls,
        "log_size_bytes": sum(sizes),
    }
    if not is_monitor:
        return object_response(request, {**await own_json(context, request), **shape, "history": history([])})
    shape |= {"pid": os.getpid(), "data_dir": broker.config.data_dir, "recovery": broker.report.summary()}
    samples = list(broker.history.samples)[::-step][::-1]
    return object_response(request, {**live_json(context), **shape, "history": history(samples)})


def history(samples: list[Sample]) -> JsonObject:
    """Samples as columns, the form that the charts need."""
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


def last_of(shape: JsonObject) -> JsonObject:
    """Current numbers as one row of the history."""
    row = {**dict.fromkeys(COLUMNS), **shape["rates"], "at": shape["at"] / 1000}
    row |= {"ready": shape["ready"], "unacked": shape["unacked"]}
    return {name: [row[name]] for name in COLUMNS}


class LiveResponse(EventStreamResponse):
    """Sends the current numbers every second."""

    starts_with_heartbeat = False

    def __init__(self, context: HttpContext, request: Request) -> None:
        super().__init__(context, request)
        self._request = request
        self._own: JsonObject = {}
        self._own_due_s = 0.0

    async def send_events(self) -> None:
        content = await self._content()
        await self.send(events.event(encode(content), str(content["at"])))
        await self.wait_for(self._context.broker.history.next())

    def encode(self, content: Any) -> bytes:
        return encode(content)

    async def _content(self) -> JsonObject:
        context = self._context
        if caller_of(self._request).is_one_of(MONITORING):
            return {**live_json(context), "last": history(list(context.broker.history.samples)[-2:])}
        now_s = context.broker.clock.monotonic()
        if now_s >= self._own_due_s:  # with more queues it is computed less often, like the broker's history
            self._own = await own_json(context, self._request)
            self._own_due_s = now_s + self._own["counts"]["queues"] / QUEUES_PER_SECOND - INTERVAL_S / 2
        content = {**self._own, "at": context.broker.history.latest().at_ms}
        return {**content, "last": last_of(content)}


async def live(context: HttpContext, request: Request) -> Response:
    return LiveResponse(context, request)
