"""Reading a topic, without a connection: what to ask the broker for, and what its answers mean.

What needs an answer is a generator: it yields what to ask, is sent the answer, and returns its result. The blocking and
the asyncio consumer differ only in how they ask.
"""

import time
from collections.abc import Generator, Iterator, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

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

QUIET_S_MAX = 60.0  # the broker says something every few seconds, be it nothing: silence is a lost connection
ITERATION_WAIT_S = 20.0
EVENTS = "text/event-stream"


class Followed(Protocol):
    """A stream of events, blocking or not: closing never waits."""

    @property
    def response(self) -> Response | None: ...
    def close(self) -> None: ...


class Get(NamedTuple):
    """Answered by a Response."""

    path: str
    query: Query
    wait_s: float


class Follow(NamedTuple):
    """Answered by an open stream of events."""

    path: str
    headers: Mapping[str, str]


class Listen(NamedTuple):
    """Answered by what came within the time, b"" when nothing did, None when the stream has ended."""

    stream: Any
    wait_s: float


class Pause(NamedTuple):
    """Answered by nothing, after the time."""

    wait_s: float


T = TypeVar("T")
Ask = Get | Follow | Listen | Pause
EagerTask = Generator[Ask, Any, T]
Taken = tuple[list[Message], dict[int, int]]  # messages, and the positions reached with them


class Reading:
    """Where a consumer is and how it goes on. `positions` has the offset of the message to read next."""

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
        self.positions: dict[int, int] = {}  # partition -> offset of the message to read next
        self._partition, self._start, self._since_ms = partition, start, since_ms
        self._on_lost = on_lost
        self._limits = limits
        self._rotation: list[int] = []
        self._stream: Followed | None = None
        self._events = EventReader()
        self._followed: dict[int, int] = {}  # where the stream is
        self._heard_at = 0.0
        self._ended = 0  # streams in a row that said nothing

    def seek(self, start: Start) -> None:
        """Goes on from elsewhere, also in the middle of an iteration. What until_end() reads ends with it."""
        self._unfollow()
        self._start, self._since_ms, self.positions = start, None, {}

    def _hand_out(self, messages: list[Message], reached: dict[int, int]) -> Iterator[Message]:
        """Positions move with every message, so that they are right whenever the reader stops."""
        positions = self.positions
        for message in messages:
            positions[message.partition] = message.offset + 1
            yield message
            if self.positions is not positions:
                return  # the reader wants to go on from elsewhere
        positions.update(reached)

    def _take(self, wait_s: float) -> EagerTask[Taken]:
        """The next messages, of whatever partition has some; none only when the time is over. A broker may answer
        before that: it stops, it does not let a read wait as long, or what came was not for readers."""
        deadline = time.monotonic() + wait_s
        while True:
            taken = yield from self._look(deadline - time.monotonic())
            if taken[0] or time.monotonic() >= deadline:
                return taken
            self.positions.update(taken[1])

    def _look(self, wait_s: float) -> EagerTask[Taken]:
        yield from self._begin()
        if len(self.positions) == 1:
            return (yield from self._fetch(next(iter(self.positions)), wait_s))
        if self._stream is not None and self._followed != self.positions:
            self._unfollow()  # the reader stopped half-way and comes back for the rest
        if self._stream is None:
            for _ in self.positions:  # every partition gets its turn, however busy another is
                partition = self._rotation.pop(0)
                self._rotation.append(partition)
                taken = yield from self._fetch(partition, 0.0)
                if taken[0]:
                    return taken
                self.positions.update(taken[1])  # past what was only for the broker, such as transaction marks
            if wait_s <= 0:
                return [], {}
            yield from self._follow()
        return (yield from self._listen(wait_s))

    def _ends(self) -> EagerTask[dict[int, int]]:
        """Where every partition ends now."""
        yield from self._begin()
        return {r.partition: r.end for r in (yield from self._ranges())}

    def _up_to(self, partition: int, end: int) -> EagerTask[tuple[Taken, bool]]:
        """The next messages before `end`; and whether there were others behind it."""
        messages, reached = yield from self._fetch(partition, 0.0)
        wanted = [message for message in messages if message.offset < end]
        is_last = len(wanted) < len(messages)
        return (wanted, {} if is_last else reached), is_last

    def _begin(self) -> EagerTask[None]:
        if self.positions:
            return
        ranges = chosen(self.topic, (yield from self._ranges()), self._partition)
        positions = resolve(self._start, ranges)
        if self._since_ms is not None:
            for partition in positions:
                query = {"partition": partition, "timestamp": self._since_ms, "limit": 1}
                messages, next_offset = parse_read((yield self._get("messages", query)))
                positions[partition] = messages[0].offset if messages else next_offset
        # Not before all are known: whoever is cut off here, and tries again, begins again.
        self.positions, self._rotation = positions, sorted(positions)

    def _ranges(self) -> EagerTask[list[Range]]:
        return parse_offsets((yield self._get("offsets", {})))

    def _get(self, what: str, query: Query, wait_s: float = 0.0) -> Get:
        return Get(path_of("topics", self.topic, what), query, wait_s)

    def _fetch(self, partition: int, wait_s: float) -> EagerTask[Taken]:
        query = fetch_query(partition, self.positions[partition], self._limits, wait_s)
        try:
            messages, next_offset = parse_read((yield self._get("messages", query, wait_s)))
        except OffsetOutOfRange as error:
            if self._on_lost == "raise":
                raise
            self.positions[partition] = skip_lost(error, (yield from self._ranges()), partition)
            return [], {}
        return messages, {partition: next_offset}

    # Several partitions at their end: one stream of events tells which one goes on.

    def _follow(self) -> EagerTask[None]:
        path = path_of("topics", self.topic, "stream")
        self._stream = yield Follow(path, {"Accept": EVENTS, "Last-Event-ID": event_id(self.positions)})
        self._events = EventReader()
        self._followed = dict(self.positions)
        self._heard_at = time.monotonic()

    def _unfollow(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _listen(self, wait_s: float) -> EagerTask[Taken]:
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
                self._unfollow()  # what follows reads from where we are, and tries again if that fails
                if response is not None and retry_after_s(response) is None:
                    raise_for(response)
                self._ended += 1
                yield Pause(min(backoff_s(self._ended - 1), max(deadline - now, 0.0)))
            if now >= deadline:
                break
        return [], {}
