"""What standbys ask for: the stream of changes of the data folder, and to be heard. See docs/standby.md."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.broker.standbys import FORMAT, Follower, RetainedChange
from headrace.errors import HeadraceError, InvalidInput, MalformedJson
from headrace.listeners.common.addresses import source_of
from headrace.listeners.http.server.authorization import Allowance, follows, goes_on
from headrace.listeners.http.server.context import HttpContext, json_answer
from headrace.listeners.http.server.requests import (
    OFFSET_MAX,
    Budget,
    BudgetShare,
    Query,
    hung_up,
    path_name,
    read_json,
)
from headrace.version import __version__
from headrace.wire.http.messages import integer

MEDIA = "application/vnd.headrace.changes"
HEARTBEAT_S = 2.0
LAST_S = 0.3
KEPT_BYTES_MAX = 64 << 20
NAME_CHARS_MAX = 100


async def list_standbys(site: HttpContext, request: Request) -> Response:
    Query(request)
    return json_answer(site.broker.standbys.describe())


async def follow(site: HttpContext, request: Request) -> Response:
    """The data folder and everything that changes in it, for as long as somebody takes it."""
    Query(request)
    fields = await read_json(request, _share(), KEPT_BYTES_MAX)
    if fields.keys() != {"name", "copy", "format", "kept"}:
        raise MalformedJson('a standby says {"name": "it", "copy": "id", "format": 1, "kept": {"path": [size, crc]}}')
    name, copy, kept = fields["name"], fields["copy"], fields["kept"]
    if type(name) is not str or not 0 < len(name) <= NAME_CHARS_MAX or not name.isprintable():
        raise InvalidInput(f"the name of a standby has 1 to {NAME_CHARS_MAX} characters")
    if type(copy) is not str or not 0 < len(copy) <= NAME_CHARS_MAX:
        raise InvalidInput(f"the id of a copy has 1 to {NAME_CHARS_MAX} characters")
    if fields["format"] != FORMAT:
        raise InvalidInput(f"this broker sends format {FORMAT} of the stream: it and its standbys run one version")
    if type(kept) is not dict:
        raise MalformedJson("kept is an object of paths")
    folder = await asyncio.get_running_loop().run_in_executor(None, site.broker.standbys.folder_id)
    client = request.client
    address = source_of(client.host if client else None)
    known = {path: _kept(facts) for path, facts in kept.items()}
    follower = site.broker.standbys.attach(name, address, copy, known)
    goes_on(site, follows, request)
    return Changes(site, request, follower, folder)


def _share() -> BudgetShare:
    """Not of the room that all requests have: those who wait for standbys may hold all of it until one is heard."""
    return BudgetShare(Budget(KEPT_BYTES_MAX), "")


def _kept(facts: Any) -> RetainedChange:
    if type(facts) is not list or len(facts) != 2:
        raise MalformedJson("what a standby has of a file is its size and its checksum")
    size, crc = (integer(fact, "kept", most=OFFSET_MAX) for fact in facts)
    return RetainedChange(size or 0, crc or 0)


async def confirm(site: HttpContext, request: Request) -> Response:
    """How far a standby is: 0 while it copies. Also how the broker knows that it is there."""
    Query(request)
    fields = await read_json(request, _share())
    if fields.keys() != {"position"}:
        raise MalformedJson('a standby says {"position": 1}')
    position = integer(fields["position"], "position", most=OFFSET_MAX)
    site.broker.standbys.confirm(path_name(request, "standby"), position or 0)
    return json_answer({"position": position or 0})


class Changes(Response):
    def __init__(self, site: HttpContext, request: Request, follower: Follower, folder: str) -> None:
        super().__init__(None, 200, {"cache-control": "no-store"}, media_type=MEDIA)
        del self.headers["content-length"]
        self._site = site
        self._standbys = site.broker.standbys
        self._allowance = Allowance(site, request)
        self._follower = follower
        self._hello = follower.hello(__version__, folder=folder, waits=site.broker.standbys.wanted > 0)
        self._reason = "it has hung up"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.ensure_future(hung_up(receive))
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await self._send(send, self._hello)
            await self._go_on(send, gone)
        except HeadraceError as error:
            self._reason = str(error)
        finally:
            gone.cancel()
            self._standbys.leave(self._follower, self._reason)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _go_on(self, send: Send, gone: "asyncio.Future[None]") -> None:
        feed, loop = self._follower.feed, asyncio.get_running_loop()
        while not gone.done():
            self._allowance.check()
            if feed.lost is not None or self._standbys.is_silent(self._follower):
                self._reason = feed.lost or "it has not been heard of for too long"
                return
            if self._site.stopping.done() and feed.is_copying:
                self._reason = "the broker stops"
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
                self._reason = "the broker stops"
                return

    async def _wait(self, send: Send, gone: "asyncio.Future[None]") -> bool:
        """For something to send. False when nothing comes any more, as the broker stops: not before other requests
        have had a moment to end, so that whoever stops a leader and takes over with its standby loses nothing."""
        news, is_stopping = self._follower.news, self._site.stopping.done()
        news.clear()
        if not self._follower.feed.wait():
            return True
        waiting = asyncio.ensure_future(news.wait())
        wanted: set[asyncio.Future[Any]] = {waiting, gone} if is_stopping else {waiting, gone, self._site.stopping}
        try:
            timeout_s = LAST_S if is_stopping else HEARTBEAT_S
            done, _ = await asyncio.wait(wanted, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if not done and not is_stopping:
            await self._send(send, self._follower.heartbeat())
        return bool(done) or not is_stopping

    async def _send(self, send: Send, data: bytes) -> None:
        self._site.stats.bytes_out += len(data)
        await send({"type": "http.response.body", "body": data, "more_body": True})
        await asyncio.sleep(0)  # a standby that keeps up must not keep the loop to itself
