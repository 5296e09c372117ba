"""Reading a topic without I/O: which requests to make, and what the answers mean.

Every method that needs an answer is a conversation; the blocking and the asyncio consumer only perform its requests.
"""

import time
from collections.abc import Iterator, Mapping
from typing import Literal, Protocol

from headrace.client.conversation import Conversation, Follow, Get, Listen, Pause
from headrace.client.exchange import Response, path_of
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
from headrace.client.retry import backoff_s, retry_after_s
from headrace.client.shapes import Message, Range, parse_offsets, parse_read, raise_for
from headrace.errors import OffsetOutOfRange

QUIET_S_MAX = 60.0  # the broker sends at least a comment every few seconds: longer silence means a lost connection
ITERATION_WAIT_S = 20.0
EVENTS = "text/event-stream"


class Followed(Protocol):
    """A stream of server-sent events, blocking or asyncio. close() never waits."""

    @property
    def response(self) -> Response | None: ...
    def close(self) -> None: ...


Taken = tuple[list[Message], dict[int, int]]  # messages, and the positions after them


class Reading:
    """A consumer's position and how it advances. `positions` holds the next offset to read of every partition."""

    def __init__(
        self,
        topic: str,
        *,
        partition: int | None,
        start: Start,
        since_ms: int | None,
        on_lost: Literal["raise", "earliest"],
        limits: Mapping[str, int],
    ) -> None:
        self.topic = topic
        self.positions: dict[int, int] = {}  # partition -> next offset to read
        self._partition, self._start, self._since_ms = partition, start, since_ms
        self._on_lost = on_lost
        self._limits = limits
        self._rotation: list[int] = []
        self._stream: Followed | None = None
        self._events = EventReader()
        self._followed: dict[int, int] = {}  # the positions that the event stream has reached
        self._heard_at = 0.0
        self._ended = 0  # consecutive streams that ended without a message

    def seek(self, start: Start) -> None:
        """Continue from another position, even during an iteration. An until_end() in progress stops."""
        self._unfollow()
        self._start, self._since_ms, self.positions = start, None, {}

    def _hand_out(self, messages: list[Message], reached: dict[int, int]) -> Iterator[Message]:
        """Positions advance with every message, so they are correct wherever the caller stops."""
        positions = self.positions
        for message in messages:
            positions[message.partition] = message.offset + 1
            yield message
            if self.positions is not positions:
                return  # the caller has called seek()
        positions.update(reached)

    def _take(self, wait_s: float) -> Conversation[Taken]:
        """The next messages of any partition; an empty list only after `wait_s`. The broker may answer earlier without
        messages: when it stops, when it limits the wait, or when only transaction markers arrived."""
        deadline = time.monotonic() + wait_s
        while True:
            taken = yield from self._look(deadline - time.monotonic())
            if taken[0] or time.monotonic() >= deadline:
                return taken
            self.positions.update(taken[1])

    def _look(self, wait_s: float) -> Conversation[Taken]:
        yield from self._begin()
        if len(self.positions) == 1:
            return (yield from self._fetch(next(iter(self.positions)), wait_s))
        if self._stream is not None and self._followed != self.positions:
            self._unfollow()  # the caller stopped in the middle of a batch and now wants the rest
        if self._stream is None:
            for _ in self.positions:  # round-robin: a busy partition must not starve the others
                partition = self._rotation.pop(0)
                self._rotation.append(partition)
                taken = yield from self._fetch(partition, 0.0)
                if taken[0]:
                    return taken
                self.positions.update(taken[1])  # past records that readers never see, such as transaction markers
            if wait_s <= 0:
                return [], {}
            yield from self._follow()
        return (yield from self._listen(wait_s))

    def _ends(self) -> Conversation[dict[int, int]]:
        """The current end offset of every partition."""
        yield from self._begin()
        return {r.partition: r.end for r in (yield from self._ranges())}

    def _up_to(self, partition: int, end: int) -> Conversation[tuple[Taken, bool]]:
        """The next messages before `end`, and whether messages at or after `end` exist."""
        messages, reached = yield from self._fetch(partition, 0.0)
        wanted = [message for message in messages if message.offset < end]
        is_last = len(wanted) < len(messages)
        return (wanted, {} if is_last else reached), is_last

    def _begin(self) -> Conversation[None]:
        if self.positions:
            return
        ranges = chosen(self.topic, (yield from self._ranges()), self._partition)
        positions = resolve(self._start, ranges)
        if self._since_ms is not None:
            for partition in positions:
                query = {"partition": partition, "timestamp": self._since_ms, "limit": 1}
                messages, next_offset = parse_read((yield self._get("messages", query)))
                positions[partition] = messages[0].offset if messages else next_offset
        # Assigned together at the end: if a request above fails, the next call starts over.
        self.positions, self._rotation = positions, sorted(positions)

    def _ranges(self) -> Conversation[list[Range]]:
        return parse_offsets((yield self._get("offsets", {})))

    def _get(self, what: str, query: Query, wait_s: float = 0.0) -> Get:
        return Get(path_of("topics", self.topic, what), query, wait_s)

    def _fetch(self, partition: int, wait_s: float) -> Conversation[Taken]:
        query = fetch_query(partition, self.positions[partition], self._limits, wait_s)
        try:
            messages, next_offset = parse_read((yield self._get("messages", query, wait_s)))
        except OffsetOutOfRange as error:
            if self._on_lost == "raise":
                raise
            self.positions[partition] = skip_lost(error, (yield from self._ranges()), partition)
            return [], {}
        return messages, {partition: next_offset}

    # All partitions are at their end: one event stream reports which of them grows.

    def _follow(self) -> Conversation[None]:
        path = path_of("topics", self.topic, "stream")
        self._stream = yield Follow(path, {"Accept": EVENTS, "Last-Event-ID": event_id(self.positions)})
        self._events = EventReader()
        self._followed = dict(self.positions)
        self._heard_at = time.monotonic()

    def _unfollow(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _listen(self, wait_s: float) -> Conversation[Taken]:
        deadline = time.monotonic() + wait_s
        while self._stream is not None:
            piece = yield Listen(self._stream, min(deadline - time.monotonic(), QUIET_S_MAX))
            now = time.monotonic()
            response = self._stream.response
            if piece:
                self._heard_at = now
                self._ended = 0
                messages = self._events.messages(piece)
                if self._events.has_notice:
                    self._unfollow()
                if messages or self._stream is None:
                    advance(self._followed, messages)
                    return messages, dict(self._followed)
            if piece is None or response is not None or now - self._heard_at > QUIET_S_MAX:
                self._unfollow()  # the next read continues from `positions` and retries if it fails
                if response is not None and retry_after_s(response) is None:
                    raise_for(response)
                self._ended += 1
                yield Pause(min(backoff_s(self._ended - 1), max(deadline - now, 0.0)))
            if now >= deadline:
                break
        return [], {}
