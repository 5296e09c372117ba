"""Shared by all handlers of the HTTP listener: broker, statistics, authentication and memory budget; and responses."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.broker.access.protected_mode import ProtectedMode
from headrace.broker.broker import Broker
from headrace.broker.metrics.counters import ListenerStats
from headrace.config import Config
from headrace.listeners.http.management.rates import Rates
from headrace.listeners.http.server.authentication import HttpGate
from headrace.listeners.http.server.memory_budget import Budget
from headrace.wire.http.bodies import JSON

CHUNK_BYTES = 256 * 1024
# Request and response bodies in memory: enough for two of the largest requests, or many usual ones.
BUDGET_BYTES_MIN = 256 << 20
BUDGET_PART = 4  # at most one part in 4 of the memory limit


class HttpContext:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.config: Config = broker.config
        self.stats: ListenerStats = broker.stats.listener("http")
        protected_mode = ProtectedMode(broker.users, is_enabled=self.config.protected_mode)
        self.gate = HttpGate(broker.users, protected_mode, broker.clock.monotonic)
        self.rates = Rates()
        wanted = max(BUDGET_BYTES_MIN, 2 * self.config.request_bytes_max)
        self.budget = Budget(min(wanted, broker.pressure.limits.memory_bytes // BUDGET_PART))
        self.stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.addresses: dict[str, list[str]] = {}  # of every listener, for GET /status

    @property
    def listeners_with_tls(self) -> list[str]:
        return [listener for listener in self.addresses if self.config.has_tls(listener)]

    def stop(self) -> None:
        """Ends long polls and event streams; other requests continue."""
        if not self.stopping.done():
            self.stopping.set_result(None)


class ChunkedResponse(Response):
    """A response that is sent in chunks, each after the client has read most of the previous one."""

    @property
    def size(self) -> int:
        return len(self.body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if len(self.body) <= CHUNK_BYTES:
            await super().__call__(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        view = memoryview(self.body)
        for at in range(0, len(view), CHUNK_BYTES):
            last = at + CHUNK_BYTES >= len(view)
            piece = bytes(view[at : at + CHUNK_BYTES])
            await send({"type": "http.response.body", "body": piece, "more_body": not last})


class PiecewiseResponse(Response):
    """A response made of pieces that are never joined: copying ten million bytes would block the event loop."""

    def __init__(self, pieces: Sequence[bytes], headers: Mapping[str, str], media_type: str) -> None:
        super().__init__(None, 200, headers, media_type)
        self._pieces = pieces
        self.size = sum(map(len, pieces))
        self.headers["content-length"] = str(self.size)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        waiting: list[bytes] = []
        size = 0
        for piece in self._pieces if scope["method"] != "HEAD" else ():
            waiting.append(piece)
            size += len(piece)
            if size >= CHUNK_BYTES:
                await send({"type": "http.response.body", "body": b"".join(waiting), "more_body": True})
                waiting, size = [], 0
        await send({"type": "http.response.body", "body": b"".join(waiting), "more_body": False})


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> ChunkedResponse:
    return ChunkedResponse(msgspec.json.encode(content), status, headers, media_type=JSON)
