"""Reading a topic from asyncio."""

import time
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Literal

from headrace.client.async_connection import AsyncConnection, AsyncStream
from headrace.client.consumer import EVENTS, ITERATION_WAIT_S, QUIET_S_MAX, Taken
from headrace.client.exchange import DEFAULT_URL, Response, parse_url, path_of
from headrace.client.positions import (
    EventReader,
    Query,
    Start,
    advance,
    chosen,
    event_id,
    fetch_query,
    resolve,
    skip_lost,
)
from headrace.client.shapes import Message, Range, parse_offsets, parse_read, raise_for
from headrace.errors import OffsetOutOfRange


class AsyncConsumer:
    """As Consumer, for asyncio: belongs to one event loop and to one task at a time.

    >>> async with AsyncConsumer("orders", start="earliest") as consumer:
    ...     async for message in consumer:
    ...         print(message.offset, message.value)
    """

    def __init__(
        self,
        topic: str,
        url: str = DEFAULT_URL,
        *,
        partition: int | None = None,
        start: Start = "earliest",
        since_ms: int | None = None,
        on_lost: Literal["raise", "earliest"] = "raise",
        batch_messages: int = 1000,
        batch_bytes: int = 1 << 20,
        timeout_s: float = 30.0,
        retry_s: float = 60.0,
    ) -> None:
        self.topic = topic
        self.positions: dict[int, int] = {}  # partition -> offset of the message to read next
        self._connection = AsyncConnection(parse_url(url), timeout_s=timeout_s, retry_s=retry_s)
        self._partition, self._start, self._since_ms = partition, start, since_ms
        self._on_lost = on_lost
        self._limits = {"limit": batch_messages, "max_bytes": batch_bytes}
        self._rotation: list[int] = []
        self._stream: AsyncStream | None = None
        self._events = EventReader()
        self._followed: dict[int, int] = {}  # where the stream is
        self._heard_at = 0.0

    async def poll(self, wait_s: float = 20.0) -> list[Message]:
        """The next messages; waits for them up to `wait_s`; an empty list when there are none."""
        messages, reached = await self._take(wait_s)
        self.positions.update(reached)
        return messages

    async def __aiter__(self) -> AsyncIterator[Message]:
        while True:
            async for message in self._hand_out(*await self._take(ITERATION_WAIT_S)):
                yield message

    async def until_end(self) -> AsyncIterator[Message]:
        """What is there now, partition by partition, and then no more."""
        await self._begin()
        ends = {r.partition: r.end for r in await self._ranges()}
        for partition in sorted(self.positions):
            while self.positions[partition] != ends[partition]:  # past it: the broker says what is wrong
                before = self.positions[partition]
                messages, reached = await self._fetch(partition, 0.0)
                wanted = [message for message in messages if message.offset < ends[partition]]
                async for message in self._hand_out(wanted, reached if len(wanted) == len(messages) else {}):
                    yield message
                if len(wanted) < len(messages) or self.positions[partition] == before:
                    break

    def seek(self, start: Start) -> None:
        """Goes on from elsewhere."""
        self._unfollow()
        self._start, self._since_ms, self.positions = start, None, {}

    async def close(self) -> None:
        self._unfollow()
        await self._connection.close()

    async def __aenter__(self) -> "AsyncConsumer":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _hand_out(self, messages: list[Message], reached: dict[int, int]) -> AsyncIterator[Message]:
        """Positions move with every message, so that they are right whenever the reader stops."""
        for message in messages:
            self.positions[message.partition] = message.offset + 1
            yield message
        self.positions.update(reached)

    async def _take(self, wait_s: float) -> Taken:
        await self._begin()
        if len(self.positions) == 1:
            return await self._fetch(next(iter(self.positions)), wait_s)
        if self._stream is not None and self._followed != self.positions:
            self._unfollow()  # the reader stopped half-way and comes back for the rest
        if self._stream is None:
            for _ in self.positions:  # every partition gets its turn, however busy another is
                partition = self._rotation.pop(0)
                self._rotation.append(partition)
                taken = await self._fetch(partition, 0.0)
                if taken[0]:
                    return taken
                self.positions.update(taken[1])  # past what was only for the broker, such as transaction ends
            if wait_s <= 0:
                return [], {}
            await self._follow()
        return await self._listen(wait_s)

    async def _begin(self) -> None:
        if self.positions:
            return
        ranges = chosen(self.topic, await self._ranges(), self._partition)
        self.positions = resolve(self._start, ranges)
        self._rotation = sorted(self.positions)
        if self._since_ms is not None:
            for partition in self._rotation:
                query = {"partition": partition, "timestamp": self._since_ms, "limit": 1}
                messages, next_offset = parse_read(await self._get("messages", query))
                self.positions[partition] = messages[0].offset if messages else next_offset

    async def _ranges(self) -> list[Range]:
        return parse_offsets(await self._get("offsets", {}))

    async def _get(self, what: str, query: Query, wait_s: float = 0.0) -> Response:
        path = path_of("topics", self.topic, what)
        return await self._connection.request("GET", path, query=query, wait_s=wait_s)

    async def _fetch(self, partition: int, wait_s: float) -> Taken:
        query = fetch_query(partition, self.positions[partition], self._limits, wait_s)
        try:
            messages, next_offset = parse_read(await self._get("messages", query, wait_s))
        except OffsetOutOfRange as error:
            if self._on_lost == "raise":
                raise
            self.positions[partition] = skip_lost(error, await self._ranges(), partition)
            return [], {}
        return messages, {partition: next_offset}

    # Several partitions at their end: one stream of events tells which one goes on.

    async def _follow(self) -> None:
        path = path_of("topics", self.topic, "stream")
        headers = {"Accept": EVENTS, "Last-Event-ID": event_id(self.positions)}
        self._stream, self._events = await self._connection.stream(path, headers=headers), EventReader()
        self._followed = dict(self.positions)
        self._heard_at = time.monotonic()

    def _unfollow(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    async def _listen(self, wait_s: float) -> Taken:
        deadline = time.monotonic() + wait_s
        while self._stream is not None:
            piece = await self._stream.read(min(deadline - time.monotonic(), QUIET_S_MAX))
            now = time.monotonic()
            if piece:
                self._heard_at = now
                messages = self._events.messages(piece)
                if self._events.has_notice:
                    self._unfollow()
                if messages or self._stream is None:
                    advance(self._followed, messages)
                    return messages, dict(self._followed)
            response = self._stream.response
            if piece is None or response is not None or now - self._heard_at > QUIET_S_MAX:
                self._unfollow()  # the next poll reads from where we are, and tries again if that fails
                if response is not None:
                    raise_for(response)
            if now >= deadline:
                break
        return [], {}
