"""GET /topics/{topic}/stream: follows a topic as server-sent events, resuming after Last-Event-ID."""

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from headrace.broker.streams.partition import Partition, Readable
from headrace.broker.streams.streams import Stream
from headrace.errors import (
    InvalidInput,
    NotAcceptable,
    OffsetOutOfRange,
    Overloaded,
    RecordTooLarge,
    UnreadableBatch,
)
from headrace.listeners.http.native.read import other_forms, start_of
from headrace.listeners.http.native.topics import topic_of
from headrace.listeners.http.server.context import HttpContext, in_chunks
from headrace.listeners.http.server.event_stream import EventStreamResponse
from headrace.listeners.http.server.memory_budget import BudgetShare
from headrace.listeners.http.server.rendering import render_messages
from headrace.listeners.http.server.requests import Query
from headrace.wire.http import bodies, events, messages

HEARTBEAT_S = 15.0
PAGE_MESSAGES = 500
PAGE_BYTES = 256 * 1024
RETRY_S = 0.5  # while too many bytes of responses are in memory


async def stream(context: HttpContext, request: Request) -> Response:
    query = Query(request, "partition", "offset", "timestamp", "encoding", "last_event_id")
    if bodies.accepted(request.headers.get("accept"), (bodies.EVENTS,)) is None:
        raise NotAcceptable(f"this endpoint only produces {bodies.EVENTS}")
    topic = topic_of(context, request)
    number = query.integer("partition", most=messages.PARTITION_MAX)
    partitions = topic.partitions if number is None else [topic.partition(number)]
    resume = query.text("last_event_id") or request.headers.get("last-event-id")
    offset = query.text("offset")
    if resume:
        positions = _resumed(topic, partitions, resume)
    elif len(partitions) > 1 and offset is not None and offset not in {"earliest", "latest"}:
        raise InvalidInput("an offset needs a partition; for all partitions use earliest, latest or timestamp")
    else:
        positions = {p.number: await start_of(p, query) for p in partitions}
        for p in partitions:
            if not p.start_offset <= positions[p.number] <= p.end_offset:
                raise OffsetOutOfRange(positions[p.number], p.start_offset, p.end_offset)
    binary = query.choice("encoding", "text", "base64") == "base64"
    return EventStream(context, request, topic, list(partitions), positions, binary, follow_all=number is None)


def _resumed(topic: Stream, partitions: list[Partition], resume: str) -> dict[int, int]:
    """Positions of the last event. Partitions it does not contain were added later and are read from their start."""
    given = events.parse_event_id(resume)
    for number, offset in given.items():
        partition = topic.partition(number)
        if offset > partition.end_offset:
            raise OffsetOutOfRange(offset, partition.start_offset, partition.end_offset)
    return {p.number: given.get(p.number, p.start_offset) for p in partitions}


class EventStream(EventStreamResponse):
    """Follows a topic. Holds one page of messages in memory at a time."""

    def __init__(
        self,
        context: HttpContext,
        request: Request,
        topic: Stream,
        partitions: list[Partition],
        positions: dict[int, int],
        binary: bool,
        *,
        follow_all: bool,
    ) -> None:
        super().__init__(context, request)
        self._topic = topic
        self._partitions = partitions
        self._positions = positions
        self._binary = binary
        self._follow_all = follow_all
        self._share: BudgetShare = request.state.share

    @property
    def is_over(self) -> bool:
        return self._topic.is_deleted

    async def send_events(self) -> None:
        if not await self._send_pages():
            await self._wait()

    def last_event_id(self) -> str:
        return events.event_id(self._positions)

    async def _send_pages(self) -> bool:
        """Sends one page of every partition, so that a backlog in one does not starve the others. False if none had
        messages."""
        sent = False
        if self._follow_all:  # includes partitions that were added; a waiting reader sees them after the next event
            for partition in self._topic.partitions[len(self._partitions) :]:
                self._partitions.append(partition)
                self._positions[partition.number] = partition.start_offset
        for partition in self._partitions:
            if self._positions[partition.number] >= partition.stable_end:
                continue
            for chunk in in_chunks(await self._page(partition)):
                await self.send(chunk)
            self._share.release()  # holds something only for a large message
            await asyncio.sleep(0)  # a client that keeps up must not monopolise the event loop
            sent = True
        return sent

    async def _page(self, partition: Partition) -> list[bytes]:
        """Events in pieces. Messages that cannot be read are skipped, and reported in a `gap` event."""
        number = partition.number
        at, largest = self._positions[number], self._context.json_bytes_max
        try:
            with other_forms(self._topic, raw=True):
                page = await self._context.broker.read(
                    self._topic, partition, at, limit=PAGE_MESSAGES, bytes_max=PAGE_BYTES, record_bytes_max=largest
                )
                rendered = await render_messages(
                    number,
                    page.records,
                    binary=self._binary,
                    bytes_max=PAGE_BYTES,
                    json_bytes_max=largest,
                    share=self._share,
                )
        except Overloaded:
            self._share.release()
            await asyncio.wait({self._gone, self._context.stopping}, timeout=RETRY_S)
            return []
        except OffsetOutOfRange as error:
            if error.offset >= error.start:
                raise
            return [self._skip(number, error.offset, error.start, "removed by retention")]
        except (RecordTooLarge, UnreadableBatch) as error:
            return [self._skip(number, error.offset, error.next_offset, str(error))]
        before, after = self._around(number)
        pieces: list[bytes] = []
        for record, data in zip(page.records, rendered, strict=False):
            pieces += (events.begin(f"{before}{number}:{record.offset + 1}{after}"), *data, events.END)
        count = len(rendered)
        self._positions[number] = page.records[count].offset if count < len(page.records) else page.next_offset
        self._context.stats.messages_out += count
        return pieces

    def _around(self, number: int) -> tuple[str, str]:
        """Text before and after one partition in an event id; the other partitions do not move within a page."""
        at = list(self._positions).index(number)
        others = [f"{n}:{offset}" for n, offset in self._positions.items()]
        return "".join(f"{o}," for o in others[:at]), "".join(f",{o}" for o in others[at + 1 :])

    def _skip(self, number: int, start: int, end: int, reason: str) -> bytes:
        self._positions[number] = end
        gap = {"partition": number, "from": start, "to": end, "reason": reason}
        return events.event(self.encode(gap), self.last_event_id(), "gap")

    async def _wait(self) -> None:
        readable = Readable((p, self._positions[p.number]) for p in self._partitions)
        try:
            if not await self.wait_for(readable.future, HEARTBEAT_S):
                await self.send(events.HEARTBEAT)
        finally:
            readable.cancel()

    async def send(self, data: bytes) -> None:
        self._context.stats.bytes_out += len(data)
        await super().send(data)
