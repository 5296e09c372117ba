"""Shared by all handlers of the HTTP listener: broker, statistics, authentication and memory budget; and responses."""

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.broker.access.protected_mode import ProtectedMode
from headrace.broker.broker import Broker
from headrace.broker.metrics.counters import ListenerStats
from headrace.broker.queues.queue import Queue
from headrace.broker.queues.receipts import Receipts
from headrace.config import Config
from headrace.listeners.http.management.rates import Rates
from headrace.listeners.http.server.authentication import HttpGate
from headrace.listeners.http.server.memory_budget import Budget
from headrace.wire.http.bodies import JSON

CHUNK_BYTES = 256 * 1024
# Request and response bodies in memory: enough for two of the largest requests, or many usual ones.
BUDGET_BYTES_MIN = 256 << 20
BUDGET_PART = 4  # at most one part in 4 of the memory limit
JSON_PART = 4  # and a message as JSON one part in 4 of that


class HttpContext:
    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.stats: ListenerStats = broker.stats.listener("http")
        protected_mode = ProtectedMode(broker.users, is_enabled=self.config.protected_mode)
        self.gate = HttpGate(broker.users, protected_mode, broker.clock.monotonic)
        self.rates = Rates()
        self.receipts = Receipts(asyncio.get_running_loop())
        # The timestamp of each queue's oldest message, with the offsets it was read for.
        self.heads: WeakKeyDictionary[Queue, tuple[tuple[int, ...], int | None]] = WeakKeyDictionary()
        wanted = max(BUDGET_BYTES_MIN, 2 * self.config.request_bytes_max)
        self.budget = Budget(min(wanted, broker.pressure.limits.memory_bytes // BUDGET_PART))
        self.stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.addresses: dict[str, list[str]] = {}  # of every listener, for GET /status

    @property
    def config(self) -> Config:
        """The present configuration: some settings can change at run time."""
        return self.broker.config

    @property
    def json_bytes_max(self) -> int:
        """The largest message that is returned as JSON. Several of them must fit the budget."""
        largest = min(self.config.decompressed_bytes_max, self.budget.bytes_max // JSON_PART)
        return max(self.config.read_bytes_max, largest)

    @property
    def listeners_with_tls(self) -> list[str]:
        return [listener for listener in self.addresses if self.config.has_tls(listener)]

    def stop(self) -> None:
        """Ends long polls and event streams; other requests continue."""
        self.receipts.close()
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
        for chunk in in_chunks(self._pieces if scope["method"] != "HEAD" else ()):
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def in_chunks(pieces: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes in chunks of about CHUNK_BYTES: small pieces are joined, large ones cut."""
    waiting: list[bytes] = []
    size = 0
    for piece in pieces:
        if len(piece) > CHUNK_BYTES:
            if waiting:
                yield b"".join(waiting)
                waiting, size = [], 0
            view = memoryview(piece)
            for at in range(0, len(view), CHUNK_BYTES):
                yield bytes(view[at : at + CHUNK_BYTES])
            continue
        waiting.append(piece)
        size += len(piece)
        if size >= CHUNK_BYTES:
            yield b"".join(waiting)
            waiting, size = [], 0
    if waiting:
        yield b"".join(waiting)


def pieces_response(
    pieces: Sequence[bytes], headers: Mapping[str, str], media_type: str
) -> ChunkedResponse | PiecewiseResponse:
    """A response of pieces, joined if they are small."""
    if sum(map(len, pieces)) <= CHUNK_BYTES:
        return ChunkedResponse(b"".join(pieces), 200, headers, media_type=media_type)
    return PiecewiseResponse(pieces, headers, media_type)


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> ChunkedResponse:
    return ChunkedResponse(msgspec.json.encode(content), status, headers, media_type=JSON)
