"""Health probes and the status of the broker."""

import os
from typing import cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.broker import Broker
from headrace.config import in_force
from headrace.listeners.http.native.types import Health, Live, Standbys, Status
from headrace.listeners.http.server.context import HttpContext, json_response
from headrace.listeners.http.server.requests import Query
from headrace.version import __version__


def archived_segments(broker: Broker) -> list[int]:
    """File sizes of all segments in the tier."""
    partitions = (partition for stream in broker.streams for partition in stream.partitions)
    return [size for partition in partitions for size in partition.archived_sizes]


async def health(context: HttpContext, request: Request) -> Response:
    """Readiness probe: 200 while the broker accepts messages, 503 with the reason otherwise."""
    Query(request)
    reason = context.broker.why_not_ready()
    state: Health = {"status": "ok" if reason is None else "unavailable", "live": True, "ready": reason is None}
    if reason is not None:
        state["reason"] = reason
    return json_response(state, 200 if reason is None else 503)


async def live(context: HttpContext, request: Request) -> Response:
    """Liveness probe: 200 while the process responds. A full disk is no reason to restart it."""
    Query(request)
    state: Live = {"status": "ok", "live": True}
    return json_response(state)


async def status(context: HttpContext, request: Request) -> Response:
    Query(request)
    broker = context.broker
    archived = archived_segments(broker)
    found: Status = {
        "version": __version__,
        "pid": os.getpid(),
        "started": broker.stats.started_ms,
        "uptime_ms": broker.clock.now_ms() - broker.stats.started_ms,
        "ready": broker.why_not_ready() is None,
        "reason": broker.why_not_ready(),
        "data_dir": broker.config.data_dir,
        "tier_dir": broker.storage.tier_dir,
        "archived_segments": len(archived),
        "archived_bytes": sum(archived),
        "listeners": context.addresses,
        "tls": context.listeners_with_tls,
        "topics": len(broker.streams),
        "partitions": sum(len(stream.partitions) for stream in broker.streams),
        "cursors": len(broker.cursors),
        "standbys": cast(Standbys, broker.standbys.describe()),
        "recovery": msgspec.to_builtins(broker.report),
        "settings": [msgspec.to_builtins(setting) for setting in in_force(broker.config)],
    }
    return json_response(found)
