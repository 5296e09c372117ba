"""The HTTP listener as an ASGI application: routes of the native API, and checks that apply to all requests."""

import asyncio
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headrace.errors import CrossOrigin, NotFound
from headrace.listeners.common.addresses import source_of
from headrace.listeners.http.management.routes import Api
from headrace.listeners.http.metrics import metrics
from headrace.listeners.http.native import (
    bulk_read,
    cursors,
    event_stream,
    pipelines,
    publish,
    queues,
    read,
    segments,
    sinks,
    standby,
    status,
    topics,
)
from headrace.listeners.http.openapi import document
from headrace.listeners.http.registry import PREFIX as REGISTRY
from headrace.listeners.http.server.authorization import (
    Handler,
    Need,
    configures,
    enters,
    follows,
    known,
    monitors,
    public,
    reads,
    rewrites,
    router,
    stages,
    writes,
)
from headrace.listeners.http.server.context import HttpContext
from headrace.listeners.http.server.problems import error_response, problem
from headrace.listeners.http.server.requests import ClientDisconnected
from headrace.listeners.http.ui import files

ROUTES: tuple[tuple[str, str, Handler, Need], ...] = (
    ("GET", "/health", status.health, public),
    ("GET", "/health/live", status.live, public),
    ("GET", "/health/ready", status.health, public),
    ("GET", "/status", status.status, known),
    ("GET", "/metrics", metrics.metrics, public),
    ("GET", "/metrics/detailed", metrics.detailed, monitors),
    ("GET", "/openapi.json", document.serve, known),
    ("GET", "/topics", topics.list_topics, enters),
    ("POST", "/topics", topics.create_topic, known),
    ("GET", "/topics/{topic}", topics.describe_topic, enters),
    ("PATCH", "/topics/{topic}", topics.configure_topic, configures("topic")),
    ("DELETE", "/topics/{topic}", topics.delete_topic, configures("topic")),
    ("GET", "/topics/{topic}/offsets", topics.offsets, enters),
    ("POST", "/topics/{topic}/messages", publish.publish, writes("topic")),
    ("GET", "/topics/{topic}/messages", read.read, reads("topic")),
    ("GET", "/topics/{topic}/keys", read.keys, reads("topic")),
    ("GET", "/topics/{topic}/keys/{key}", read.last_of_key, reads("topic")),
    ("GET", "/topics/{topic}/stream", event_stream.stream, reads("topic")),
    ("GET", "/topics/{topic}/partitions/{partition}/batches", read.batches, reads("topic")),
    ("GET", "/cursors", cursors.list_cursors, enters),
    ("GET", "/cursors/{cursor}", cursors.get_cursor, enters),
    ("PUT", "/cursors/{cursor}", cursors.put_cursor, enters),
    ("DELETE", "/cursors/{cursor}", cursors.delete_cursor, enters),
    ("POST", "/queues/{queue}/receive", queues.receive, queues.consumes),
    ("POST", "/queues/{queue}/ack", queues.ack, queues.consumes),
    ("POST", "/queues/{queue}/nack", queues.nack, queues.consumes),
    ("POST", "/queues/{queue}/extend", queues.extend, queues.consumes),
    ("GET", "/topics/{topic}/log", bulk_read.logs, reads("topic")),
    ("POST", "/topics/{topic}/compact", segments.compact, configures("topic")),
    ("DELETE", "/topics/{topic}/partitions/{partition}/records", segments.delete_records, configures("topic")),
    ("POST", "/topics/{topic}/partitions/{partition}/segments/{segment}", segments.replace_segment, rewrites("topic")),
    (
        "POST",
        "/topics/{topic}/partitions/{partition}/segments/{segment}/archive",
        segments.archive_segment,
        configures("topic"),
    ),
    ("POST", "/leases", bulk_read.lease, enters),
    ("PUT", "/staging/{staged}", sinks.stage, stages),
    ("DELETE", "/staging/{staged}", sinks.discard, stages),
    ("GET", "/sinks", sinks.list_writers, enters),
    ("GET", "/sinks/{writer}", sinks.get_writer, enters),
    ("PUT", "/sinks/{writer}/batches/{batch}", sinks.commit, enters),
    ("GET", "/standby", standby.list_standbys, monitors),
    ("POST", "/standby/stream", standby.follow, follows),
    ("PUT", "/standby/{standby}", standby.confirm, follows),
    ("GET", "/pipelines", pipelines.list_pipelines, enters),
    ("GET", "/pipelines/{pipeline}", pipelines.get_pipeline, enters),
    ("PUT", "/pipelines/{pipeline}", pipelines.put_pipeline, configures("pipeline")),
    ("DELETE", "/pipelines/{pipeline}", pipelines.delete_pipeline, configures("pipeline")),
    ("POST", "/pipelines/{pipeline}/stop", pipelines.stop_pipeline, configures("pipeline")),
)
PAGES: tuple[tuple[str, Handler], ...] = (
    ("/", files.index),
    ("/favicon.ico", files.icon),
    ("/ui/{path:path}", files.file),
    ("/cli", files.cli_help),
    ("/cli/", files.cli_help),
    ("/cli/rabbitmqadmin", files.rabbitmqadmin),
)
PAGE_PATHS = frozenset(path for path, _ in PAGES)
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
SAME_ORIGIN = b"same-origin"
SAME_SITE = frozenset({None, b"none", SAME_ORIGIN})
CROSS_ORIGIN = "requests from pages of other origins are refused"


class App:
    """Dispatches every request to its API, and turns every exception into a response."""

    def __init__(self, context: HttpContext) -> None:
        self._context = context
        self._router = router(context, ROUTES)
        self._api = Api(context)
        self._registry: ASGIApp | None = None  # loaded when it is first used
        self._pages = router(context, (("GET", path, handler, public) for path, handler in PAGES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Match routes before decoding: an encoded slash (%2F) is part of a name, not a separator.
        scope["path"] = scope["raw_path"].decode("ascii")
        scope["app"] = self  # makes the router raise for 404 and 405 instead of responding in plain text
        started = False

        async def count_and_send(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._context.stats.count(str(message["status"]))
            await send(message)

        client = scope.get("client")
        with self._context.budget.share(source_of(client[0] if client else None)) as share:
            scope.setdefault("state", {})["share"] = share
            try:
                _refuse_other_origins(scope)
                if scope["path"] in PAGE_PATHS or scope["path"].startswith("/ui/"):
                    await self._pages(scope, receive, count_and_send)
                elif scope["path"].startswith("/api/") or scope["path"] == "/api":
                    await self._api(scope, receive, count_and_send)
                elif scope["path"].startswith(f"{REGISTRY}/") or scope["path"] == REGISTRY:
                    registry = self._registry
                    if registry is None:
                        registry = self._registry = await asyncio.to_thread(_load_registry, self._context)
                    await registry(scope, receive, count_and_send)
                else:
                    await self._router(scope, receive, count_and_send)
            except (ClientDisconnected, asyncio.CancelledError):
                # The client disconnected, or the connection cancelled the request and has responded itself.
                # Raising would make uvicorn log a crash.
                return
            except Exception as error:  # noqa: BLE001 - the outermost handler of the listener
                response = _error_response(error, scope)
                if not started:
                    await response(scope, receive, count_and_send)


def _load_registry(context: HttpContext) -> ASGIApp:
    """The schema registry. Its modules take some ten milliseconds to import, so this runs in a thread."""
    from headrace.listeners.http.registry.routes import Registry

    return Registry(context)


def _error_response(error: Exception, scope: Scope) -> Response:
    if isinstance(error, HTTPException):
        if error.status_code == 405:
            headers = dict(error.headers or {})
            detail = f"{scope['method']} is not supported for this path; allowed: {headers.get('Allow', '')}"
            return problem(405, "method_not_allowed", detail, headers)
        return error_response(NotFound("unknown path; see /openapi.json for all paths"))
    return error_response(error)


def _refuse_other_origins(scope: Scope) -> None:
    """Refuses cross-site requests: a page of another site must not act with the permissions of its visitor.

    Only browsers send these headers. Images have no Origin but a Sec-Fetch-Site; following a link is allowed. A request
    that the browser calls same-origin is trusted even if a proxy has changed the Host. Without TLS some browsers do not
    send Sec-Fetch-Site, so Origin is compared with Host.
    """
    origin = host = site = None
    mode = b""
    for name, value in scope["headers"]:
        if name == b"origin":
            origin = value.decode("latin-1")
        elif name == b"host":
            host = value.decode("latin-1")
        elif name == b"sec-fetch-site":
            site = value
        elif name == b"sec-fetch-mode":
            mode = value
    if site not in SAME_SITE and mode != b"navigate":
        raise CrossOrigin(CROSS_ORIGIN)
    if site == SAME_ORIGIN:
        return
    if origin is None or (scope["method"] in SAFE and not scope["path"].endswith("/stream")):
        return
    try:
        same = urlsplit(origin).netloc.lower() == (host or "").lower()
    except ValueError:
        same = False
    if not same:
        raise CrossOrigin(CROSS_ORIGIN)
