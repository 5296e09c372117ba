"""The HTTP listener as an ASGI application: the routes, and what holds for all of them."""

import asyncio
from collections.abc import MutableMapping
from typing import Any
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

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
    read,
    segments,
    sinks,
    standby,
    status,
    topics,
)
from headrace.listeners.http.openapi import document
from headrace.listeners.http.registry.routes import PREFIX as REGISTRY
from headrace.listeners.http.registry.routes import Registry
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
from headrace.listeners.http.server.problems import answer_for, problem
from headrace.listeners.http.server.requests import Gone
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
    ("GET", "/topics/{topic}/keys/{key}", read.last_of_key, reads("topic")),
    ("GET", "/topics/{topic}/stream", event_stream.stream, reads("topic")),
    ("GET", "/topics/{topic}/partitions/{partition}/batches", read.batches, reads("topic")),
    ("GET", "/cursors", cursors.list_cursors, enters),
    ("GET", "/cursors/{cursor}", cursors.get_cursor, enters),
    ("PUT", "/cursors/{cursor}", cursors.put_cursor, enters),
    ("DELETE", "/cursors/{cursor}", cursors.delete_cursor, enters),
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
)
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
SAME_ORIGIN = b"same-origin"
OUR_SITE = frozenset({None, b"none", SAME_ORIGIN})
CROSS_ORIGIN = "this request comes from a page of another site"


class App:
    """Answers every request, whatever happens inside: a bug of ours is a 500 that says nothing more."""

    def __init__(self, site: HttpContext) -> None:
        self._site = site
        self._router = router(site, ROUTES)
        self._api = Api(site)
        self._registry = Registry(site)
        self._pages = router(site, (("GET", path, handler, public) for path, handler in PAGES))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Routes are matched before %2F and the like are decoded: they are part of a name, not borders.
        scope["path"] = scope["raw_path"].decode("ascii")
        scope["app"] = self  # the router then raises for 404 and 405 instead of answering in plain text
        started = False

        async def counted(message: MutableMapping[str, Any]) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                self._site.stats.count(str(message["status"]))
            await send(message)

        client = scope.get("client")
        with self._site.budget.share(source_of(client[0] if client else None)) as share:
            scope.setdefault("state", {})["share"] = share
            try:
                _refuse_other_origins(scope)
                if scope["path"] == "/" or scope["path"].startswith("/ui/") or scope["path"] == "/favicon.ico":
                    await self._pages(scope, receive, counted)
                elif scope["path"].startswith("/api/") or scope["path"] == "/api":
                    await self._api(scope, receive, counted)
                elif scope["path"].startswith(f"{REGISTRY}/") or scope["path"] == REGISTRY:
                    await self._registry(scope, receive, counted)
                else:
                    await self._router(scope, receive, counted)
            except (Gone, asyncio.CancelledError):
                # Nobody is left to answer: the client hung up, or the connection gave up on it. Whoever
                # cancels has said so to the connection, and the server would take it for a crash of ours.
                return
            except Exception as error:  # noqa: BLE001 - the outermost loop of the listener
                answer = _answer_for(error, scope)
                if not started:
                    await answer(scope, receive, counted)


def _answer_for(error: Exception, scope: Scope) -> Response:
    if isinstance(error, HTTPException):
        if error.status_code == 405:
            headers = dict(error.headers or {})
            detail = f"{scope['method']} is not for this address; there is {headers.get('Allow', '')}"
            return problem(405, "method_not_allowed", detail, headers)
        return answer_for(NotFound("there is nothing at this address; /openapi.json lists what there is"))
    return answer_for(error)


def _refuse_other_origins(scope: Scope) -> None:
    """A page of another site may not act with the reach of whoever is looking at it: browsers say where a
    request comes from, and only they do. An image has no origin, but a site; a link may be followed. What the browser
    calls the same origin is, whatever a proxy has made of the Host since; without TLS some do not say."""
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
    if site not in OUR_SITE and mode != b"navigate":
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
