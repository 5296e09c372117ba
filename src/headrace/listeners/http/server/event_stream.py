"""Base of responses that are server-sent events."""

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.errors import HeadraceError
from headrace.listeners.http.server.authorization import Allowance
from headrace.listeners.http.server.context import HttpContext
from headrace.listeners.http.server.requests import wait_for_disconnect
from headrace.wire.http import bodies, events


class EventStreamResponse(Response):
    """Sends events until the client disconnects, the broker stops, the caller loses its permission, or `is_over`.

    A subclass implements `send_events`, which sends the events there are and then waits for more. A HeadraceError ends
    the stream with an `error` event.
    """

    starts_with_heartbeat = True  # tells the client that it is connected before the first event

    def __init__(self, context: HttpContext, request: Request) -> None:
        super().__init__(None, 200, {"cache-control": "no-store"}, media_type=bodies.EVENTS)
        del self.headers["content-length"]
        self._context = context
        self._allowance = Allowance(context, request)
        self._gone: asyncio.Future[None]
        self._send_message: Send

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body"})
            return
        self._send_message = send
        self._gone = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            if self.starts_with_heartbeat:
                await self.send(events.HEARTBEAT)
            while not (self._gone.done() or self._context.stopping.done() or self.is_over):
                self._allowance.check()
                await self.send_events()
        except HeadraceError as error:
            await self.send(events.event(self.encode({"detail": str(error)}), self.last_event_id(), "error"))
        finally:
            self._gone.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @property
    def is_over(self) -> bool:
        return False

    async def send_events(self) -> None:
        raise NotImplementedError

    def last_event_id(self) -> str:
        """The id of an event that stands for all events sent so far."""
        return ""

    def encode(self, content: Any) -> bytes:
        return msgspec.json.encode(content)

    async def send(self, data: bytes) -> None:
        await self._send_message({"type": "http.response.body", "body": data, "more_body": True})

    async def wait_for(self, news: "asyncio.Future[Any]", timeout_s: float | None = None) -> bool:
        """Waits for news, the end of the stream, or the timeout; False after the timeout."""
        done, _ = await asyncio.wait(
            {news, self._gone, self._context.stopping}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        return bool(done)
