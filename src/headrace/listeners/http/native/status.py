"""How the broker is: alive, ready, and with what it runs."""

import os
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.broker import Broker
from headrace.config import in_force
from headrace.listeners.http.server.context import HttpContext, json_answer
from headrace.listeners.http.server.requests import Query
from headrace.version import __version__


def archived_segments(broker: Broker) -> list[int]:
    """The sizes of the files of all segments in the tier."""
    logs = (partition.log for stream in broker.streams for partition in stream.partitions)
    return [segment.stored_bytes for log in logs for segment in log.segments if segment.is_archived]


async def health(site: HttpContext, request: Request) -> Response:
    """200 when messages are taken, 503 with the reason when not."""
    Query(request)
    reason = site.broker.why_not_ready()
    state: dict[str, Any] = {"status": "ok" if reason is None else "unavailable", "live": True}
    state["ready"] = reason is None
    if reason is not None:
        state["reason"] = reason
    return json_answer(state, 200 if reason is None else 503)


async def live(site: HttpContext, request: Request) -> Response:
    """200 as long as there is somebody to answer: a full disk is no reason to be restarted."""
    Query(request)
    return json_answer({"status": "ok", "live": True})


async def status(site: HttpContext, request: Request) -> Response:
    Query(request)
    broker = site.broker
    archived = archived_segments(broker)
    return json_answer(
        {
            "version": __version__,
            "pid": os.getpid(),
            "started": broker.stats.started_ms,
            "uptime_ms": broker.clock.now_ms() - broker.stats.started_ms,
            "ready": broker.why_not_ready() is None,
            "reason": broker.why_not_ready(),
            "data_dir": broker.config.data_dir,
            "tier_dir": broker.shard.tier_root,
            "archived_segments": len(archived),
            "archived_bytes": sum(archived),
            "listeners": site.addresses,
            "tls": site.listeners_with_tls,
            "topics": len(broker.streams),
            "partitions": sum(len(stream.partitions) for stream in broker.streams),
            "cursors": len(broker.cursors),
            "standbys": broker.standbys.describe(),
            "recovery": msgspec.to_builtins(broker.report),
            "settings": [msgspec.to_builtins(setting) for setting in in_force(broker.config)],
        }
    )
