"""GET /topics/{topic}/stream: messages as server-sent events, from where the reader left off."""

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.broker.streams.partition import Partition, Readable
from headrace.broker.streams.streams import Stream
from headrace.errors import HeadraceError, InvalidInput, NotAcceptable, OffsetOutOfRange, UnreadableBatch
from headrace.listeners.http.native.read import start_of
from headrace.listeners.http.native.topics import topic_of
from headrace.listeners.http.server.authorization import Allowance
from headrace.listeners.http.server.context import HttpContext
from headrace.listeners.http.server.requests import Query, hung_up
from headrace.wire.http import bodies, events, messages

HEARTBEAT_S = 15.0
PAGE_MESSAGES = 500
PAGE_BYTES = 256 * 1024


async def stream(site: HttpContext, request: Request) -> Response:
    query = Query(request, "partition", "offset", "timestamp", "encoding", "last_event_id")
    if bodies.accepted(request.headers.get("accept"), (bodies.EVENTS,)) is None:
        raise NotAcceptable(f"a stream comes as {bodies.EVENTS}")
    topic = topic_of(site, request)
    number = query.integer("partition", most=messages.PARTITION_MAX)
    partitions = topic.partitions if number is None else [topic.partition(number)]
    resume = query.text("last_event_id") or request.headers.get("last-event-id")
    offset = query.text("offset")
    if resume:
        positions = _resumed(topic, partitions, resume)
    elif len(partitions) > 1 and offset is not None and offset not in {"earliest", "latest"}:
        raise InvalidInput("an offset belongs to one partition: say which, or use earliest, latest or timestamp")
    else:
        positions = {p.number: await start_of(p, query) for p in partitions}
        for p in partitions:
            if not p.start_offset <= positions[p.number] <= p.end_offset:
                raise OffsetOutOfRange(positions[p.number], p.start_offset, p.end_offset)
    binary = query.choice("encoding", "text", "base64") == "base64"
    return EventStream(site, request, topic, list(partitions), positions, binary, follow_all=number is None)


def _resumed(topic: Stream, partitions: list[Partition], resume: str) -> dict[int, int]:
    """Partitions that the id does not name are new since then: they are read from their start."""
    given = events.parse_event_id(resume)
    for number, offset in given.items():
        partition = topic.partition(number)
        if offset > partition.end_offset:
            raise OffsetOutOfRange(offset, partition.start_offset, partition.end_offset)
    return {p.number: given.get(p.number, p.start_offset) for p in partitions}


class EventStream(Response):
    """An answer that goes on until somebody hangs up. Holds one page of messages at a time."""

    def __init__(
        self,
        site: HttpContext,
        request: Request,
        topic: Stream,
        partitions: list[Partition],
        positions: dict[int, int],
        binary: bool,
        *,
        follow_all: bool,
    ) -> None:
        super().__init__(None, 200, {"cache-control": "no-store"}, media_type=bodies.EVENTS)
        del self.headers["content-length"]
        self._site = site
        self._allowance = Allowance(site, request)
        self._topic = topic
        self._partitions = partitions
        self._positions = positions
        self._binary = binary
        self._follow_all = follow_all

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body"})
            return
        gone = asyncio.ensure_future(hung_up(receive))
        try:
            # At once, so that the client knows that it is connected before the first message comes.
            await self._send(send, events.HEARTBEAT)
            while not (gone.done() or self._site.stopping.done() or self._topic.is_deleted):
                self._allowance.check()
                if not await self._send_page(send):
                    await self._wait(send, gone)
        except HeadraceError as error:
            await self._send(send, self._notice("error", {"detail": str(error)}))
        finally:
            gone.cancel()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_page(self, send: Send) -> bool:
        """One page of every partition, so that a long backlog in one does not starve the others."""
        sent = False
        if self._follow_all:  # partitions may have been added; a waiting reader sees them with the next event
            for partition in self._topic.partitions[len(self._partitions) :]:
                self._partitions.append(partition)
                self._positions[partition.number] = partition.start_offset
        for partition in self._partitions:
            if self._positions[partition.number] >= partition.stable_end:
                continue
            data = await self._page(partition)
            if data:
                await self._send(send, data)
            await asyncio.sleep(0)  # a client that keeps up must not keep the loop to itself
            sent = True
        return sent

    async def _page(self, partition: Partition) -> bytes:
        number = partition.number
        try:
            page = await self._site.broker.read(
                self._topic, partition, self._positions[number], limit=PAGE_MESSAGES, bytes_max=PAGE_BYTES
            )
        except OffsetOutOfRange as error:
            if error.offset >= error.start:
                raise
            return self._skip(number, error.offset, error.start, "removed by retention")
        except UnreadableBatch as error:
            return self._skip(number, error.offset, error.next_offset, str(error))
        before, after = self._around(number)
        lines = []
        for record in page.records:
            data = msgspec.json.encode(messages.render(number, record, binary=self._binary))
            lines.append(events.event(data, f"{before}{number}:{record.offset + 1}{after}"))
        self._positions[number] = page.next_offset
        self._site.stats.messages_out += len(lines)
        return b"".join(lines)

    def _around(self, number: int) -> tuple[str, str]:
        """What stands before and after one partition in the id of an event: the others do not move now."""
        at = list(self._positions).index(number)
        others = [f"{n}:{offset}" for n, offset in self._positions.items()]
        return "".join(f"{o}," for o in others[:at]), "".join(f",{o}" for o in others[at + 1 :])

    def _skip(self, number: int, start: int, end: int, reason: str) -> bytes:
        """What cannot be had is said, not skipped in silence."""
        self._positions[number] = end
        return self._notice("gap", {"partition": number, "from": start, "to": end, "reason": reason})

    def _notice(self, name: str, content: dict[str, object]) -> bytes:
        return events.event(msgspec.json.encode(content), events.event_id(self._positions), name)

    async def _wait(self, send: Send, gone: "asyncio.Future[None]") -> None:
        readable = Readable((p, self._positions[p.number]) for p in self._partitions)
        try:
            done, _ = await asyncio.wait(
                {readable.future, gone, self._site.stopping},
                timeout=HEARTBEAT_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            if not done:
                await self._send(send, events.HEARTBEAT)
        finally:
            readable.cancel()

    async def _send(self, send: Send, data: bytes) -> None:
        self._site.stats.bytes_out += len(data)
        await send({"type": "http.response.body", "body": data, "more_body": True})
