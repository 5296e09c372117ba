"""Reading a topic, blocking: from anywhere, to the end or for ever, over one or two connections."""

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Literal

from headrace.client.connection import Connection, Stream
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

QUIET_S_MAX = 60.0  # the broker says something every few seconds, be it nothing: silence is a lost connection
ITERATION_WAIT_S = 20.0
EVENTS = "text/event-stream"

Taken = tuple[list[Message], dict[int, int]]  # messages, and the positions reached with them


class Consumer:
    """Reads one topic, all partitions or one. For one thread at a time.

    >>> with Consumer("orders", start="earliest") as consumer:
    ...     for message in consumer:      # for ever; until_end() stops where the topic ends now
    ...         print(message.offset, message.value)
    ...         save(consumer.positions)  # Consumer(start=positions) goes on from there

    Within a partition messages come in the order of their offsets, none twice. A lost connection is made
    again and reading goes on where it was, for up to `retry_s`. If the messages at a position are gone
    (retention), OffsetOutOfRange is raised, unless `on_lost` is "earliest".
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
        self._connection = Connection(parse_url(url), timeout_s=timeout_s, retry_s=retry_s)
        self._partition, self._start, self._since_ms = partition, start, since_ms
        self._on_lost = on_lost
        self._limits = {"limit": batch_messages, "max_bytes": batch_bytes}
        self._rotation: list[int] = []
        self._stream: Stream | None = None
        self._events = EventReader()
        self._followed: dict[int, int] = {}  # where the stream is
        self._heard_at = 0.0

    def poll(self, wait_s: float = 20.0) -> list[Message]:
        """The next messages; waits for them up to `wait_s`; an empty list when there are none."""
        messages, reached = self._take(wait_s)
        self.positions.update(reached)
        return messages

    def __iter__(self) -> Iterator[Message]:
        while True:
            yield from self._hand_out(*self._take(ITERATION_WAIT_S))

    def until_end(self) -> Iterator[Message]:
        """What is there now, partition by partition, and then no more."""
        self._begin()
        ends = {r.partition: r.end for r in self._ranges()}
        for partition in sorted(self.positions):
            while self.positions[partition] != ends[partition]:  # past it: the broker says what is wrong
                before = self.positions[partition]
                messages, reached = self._fetch(partition, 0.0)
                wanted = [message for message in messages if message.offset < ends[partition]]
                yield from self._hand_out(wanted, reached if len(wanted) == len(messages) else {})
                if len(wanted) < len(messages) or self.positions[partition] == before:
                    break

    def seek(self, start: Start) -> None:
        """Goes on from elsewhere."""
        self._unfollow()
        self._start, self._since_ms, self.positions = start, None, {}

    def close(self) -> None:
        self._unfollow()
        self._connection.close()

    def __enter__(self) -> "Consumer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _hand_out(self, messages: list[Message], reached: dict[int, int]) -> Iterator[Message]:
        """Positions move with every message, so that they are right whenever the reader stops."""
        for message in messages:
            self.positions[message.partition] = message.offset + 1
            yield message
        self.positions.update(reached)

    def _take(self, wait_s: float) -> Taken:
        self._begin()
        if len(self.positions) == 1:
            return self._fetch(next(iter(self.positions)), wait_s)
        if self._stream is not None and self._followed != self.positions:
            self._unfollow()  # the reader stopped half-way and comes back for the rest
        if self._stream is None:
            for _ in self.positions:  # every partition gets its turn, however busy another is
                partition = self._rotation.pop(0)
                self._rotation.append(partition)
                taken = self._fetch(partition, 0.0)
                if taken[0]:
                    return taken
                self.positions.update(taken[1])  # past what was only for the broker, such as transaction ends
            if wait_s <= 0:
                return [], {}
            self._follow()
        return self._listen(wait_s)

    def _begin(self) -> None:
        if self.positions:
            return
        ranges = chosen(self.topic, self._ranges(), self._partition)
        self.positions = resolve(self._start, ranges)
        self._rotation = sorted(self.positions)
        if self._since_ms is not None:
            for partition in self._rotation:
                query = {"partition": partition, "timestamp": self._since_ms, "limit": 1}
                messages, next_offset = parse_read(self._get("messages", query))
                self.positions[partition] = messages[0].offset if messages else next_offset

    def _ranges(self) -> list[Range]:
        return parse_offsets(self._get("offsets", {}))

    def _get(self, what: str, query: Query, wait_s: float = 0.0) -> Response:
        path = path_of("topics", self.topic, what)
        return self._connection.request("GET", path, query=query, wait_s=wait_s)

    def _fetch(self, partition: int, wait_s: float) -> Taken:
        query = fetch_query(partition, self.positions[partition], self._limits, wait_s)
        try:
            messages, next_offset = parse_read(self._get("messages", query, wait_s))
        except OffsetOutOfRange as error:
            if self._on_lost == "raise":
                raise
            self.positions[partition] = skip_lost(error, self._ranges(), partition)
            return [], {}
        return messages, {partition: next_offset}

    # Several partitions at their end: one stream of events tells which one goes on.

    def _follow(self) -> None:
        path = path_of("topics", self.topic, "stream")
        headers = {"Accept": EVENTS, "Last-Event-ID": event_id(self.positions)}
        self._stream, self._events = self._connection.stream(path, headers=headers), EventReader()
        self._followed = dict(self.positions)
        self._heard_at = time.monotonic()

    def _unfollow(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _listen(self, wait_s: float) -> Taken:
        deadline = time.monotonic() + wait_s
        while self._stream is not None:
            piece = self._stream.read(min(deadline - time.monotonic(), QUIET_S_MAX))
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
