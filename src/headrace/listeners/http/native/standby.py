"""Standbys: the stream of changes to the data folder, and the standbys' confirmations. See docs/standby.md."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.broker.standbys import FORMAT, Follower, RetainedChange
from headrace.errors import HeadraceError, InvalidInput
from headrace.listeners.common.addresses import source_of
from headrace.listeners.http.native.types import STANDBY_NAME_CHARS_MAX, StandbyHello, StandbyPosition
from headrace.listeners.http.server.authorization import Allowance, follows, keep_checking
from headrace.listeners.http.server.context import HttpContext, json_response
from headrace.listeners.http.server.memory_budget import Budget, BudgetShare
from headrace.listeners.http.server.requests import Query, decode, path_name, read_json, wait_for_disconnect
from headrace.version import __version__

MEDIA = "application/vnd.headrace.changes"
HEARTBEAT_S = 2.0
LAST_CHANGES_S = 0.3  # how long a stopping broker waits for the last changes
HELLO_BYTES_MAX = 64 << 20


async def list_standbys(context: HttpContext, request: Request) -> Response:
    Query(request)
    return json_response(context.broker.standbys.describe())


async def follow(context: HttpContext, request: Request) -> Response:
    """Streams the data folder and every change to it until the standby disconnects."""
    Query(request)
    fields = await read_json(request, _own_budget(), HELLO_BYTES_MAX)
    _check_names(fields)
    hello = decode(fields, StandbyHello)
    if hello.format != FORMAT:
        raise InvalidInput(
            f"this broker sends format {FORMAT} of the change stream: a leader and its standbys must run one version"
        )
    folder = await asyncio.get_running_loop().run_in_executor(None, context.broker.standbys.folder_id)
    client = request.client
    address = source_of(client.host if client else None)
    kept = {path: RetainedChange(size, crc) for path, (size, crc) in hello.kept.items()}
    follower = context.broker.standbys.attach(hello.name, address, hello.copy, kept)
    keep_checking(context, follows, request)
    return ChangesResponse(context, request, follower, folder)


def _own_budget() -> BudgetShare:
    """Not of the listener's budget: publishers that wait for a standby's confirmation may hold all of that."""
    return BudgetShare(Budget(HELLO_BYTES_MAX), "")


def _check_names(fields: dict[str, Any]) -> None:
    name, copy = fields.get("name", "-"), fields.get("copy", "-")
    if type(name) is not str or not 0 < len(name) <= STANDBY_NAME_CHARS_MAX or not name.isprintable():
        raise InvalidInput(f"the name of a standby must have 1 to {STANDBY_NAME_CHARS_MAX} printable characters")
    if type(copy) is not str or not 0 < len(copy) <= STANDBY_NAME_CHARS_MAX:
        raise InvalidInput(f"the id of a copy must have 1 to {STANDBY_NAME_CHARS_MAX} characters")


async def confirm(context: HttpContext, request: Request) -> Response:
    """Confirms changes up to a position, 0 while the standby copies. Also the standby's sign of life."""
    Query(request)
    confirmed = decode(await read_json(request, _own_budget()), StandbyPosition)
    context.broker.standbys.confirm(path_name(request, "standby"), confirmed.position)
    return json_response(confirmed)


class ChangesResponse(Response):
    """The change stream of one standby."""

    def __init__(self, context: HttpContext, request: Request, follower: Follower, folder: str) -> None:
        super().__init__(None, 200, {"cache-control": "no-store"}, media_type=MEDIA)
        del self.headers["content-length"]
        self._context = context
        self._standbys = context.broker.standbys
        self._allowance = Allowance(context, request)
        self._follower = follower
        self._hello = follower.hello(__version__, folder=folder, waits=context.broker.standbys.wanted > 0)
        self._reason = "it disconnected"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(send, self._hello)
            await self._send_changes(send, gone)
        except HeadraceError as error:
            self._reason = str(error)
        finally:
            gone.cancel()
            self._standbys.leave(self._follower, self._reason)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_changes(self, send: Send, gone: "asyncio.Future[None]") -> None:
        feed, loop = self._follower.feed, asyncio.get_running_loop()
        while not gone.done():
            self._allowance.check()
            if feed.lost is not None or self._standbys.is_silent(self._follower):
                self._reason = feed.lost or "it has not confirmed anything for too long"
                return
            if self._context.stopping.done() and feed.is_copying:
                self._reason = "the broker is stopping"
                return
            data = feed.take()
            if data:
                await self._send(send, data)
            if feed.wants_reading:
                try:
                    data = await loop.run_in_executor(None, feed.read)
                except OSError as error:
                    feed.lose(f"a file cannot be read: {error}")
                    continue
                if data:
                    await self._send(send, data)
            elif not data and not await self._wait(send, gone):
                self._reason = "the broker is stopping"
                return

    async def _wait(self, send: Send, gone: "asyncio.Future[None]") -> bool:
        """Waits for changes to send. False when the broker is stopping and no more changes come: other requests get a
        moment to finish first, so that a planned switch to the standby loses nothing."""
        news, is_stopping = self._follower.news, self._context.stopping.done()
        news.clear()
        if not self._follower.feed.wait():
            return True
        waiting = asyncio.ensure_future(news.wait())
        wanted: set[asyncio.Future[Any]] = {waiting, gone} if is_stopping else {waiting, gone, self._context.stopping}
        try:
            timeout_s = LAST_CHANGES_S if is_stopping else HEARTBEAT_S
            done, _ = await asyncio.wait(wanted, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not done and not is_stopping:
            await self._send(send, self._follower.heartbeat())
        return bool(done) or not is_stopping

    async def _send(self, send: Send, data: bytes) -> None:
        self._context.stats.bytes_out += len(data)
        await send({"type": "http.response.body", "body": data, "more_body": True})
        await asyncio.sleep(0)  # a standby that keeps up must not monopolise the event loop
