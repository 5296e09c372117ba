"""A clock, timers and a journal that move only when told to, for tests of groups."""

import heapq
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

from headrace.broker.groups.classic.group import ClassicGroup
from headrace.broker.groups.classic.members import Join, JoinResult, Synced
from headrace.broker.groups.config import DEFAULTS, GroupConfig
from headrace.broker.groups.coordinator import Groups
from headrace.broker.groups.settings import GroupSettings
from headrace.clock import ManualClock
from headrace.errors import HeadraceError

T = TypeVar("T")


class Handle:
    cancelled = False

    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback = callback

    def cancel(self) -> None:
        self.cancelled = True


class ManualTimers:
    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Handle]] = []
        self.made = 0

    def call_later(self, delay: float, callback: Callable[[], object]) -> Handle:
        handle = Handle(callback)
        self.made += 1
        heapq.heappush(self._heap, (self._clock.monotonic() + delay, self.made, handle))
        return handle

    def time(self) -> float:
        return self._clock.monotonic()

    def advance(self, seconds: float) -> None:
        """Time passes, timer by timer."""
        end = self._clock.monotonic() + seconds
        while self._heap and self._heap[0][0] <= end:
            when, _, handle = heapq.heappop(self._heap)
            self._clock.advance(max(0.0, when - self._clock.monotonic()))
            if not handle.cancelled:
                handle.callback()
        self._clock.advance(end - self._clock.monotonic())


class MemoryTicket:
    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.done = False
        self._callbacks: list[Callable[[Any], object]] = []

    def add_callback(self, callback: Callable[[Any], object]) -> None:
        if self.done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def resolve(self, error: BaseException | None = None) -> None:
        self.done, self.error = True, error
        for callback in self._callbacks:
            callback(self)


class MemoryJournal:
    """Entries wait in `staged` until sync() makes them durable, as a round would."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[bytes, bytes]] = {}
        self.staged: list[tuple[list[tuple[str, bytes, bytes | None]], MemoryTicket]] = []
        self.hold = False

    def begin(self) -> "MemoryEntry":
        return MemoryEntry(self)

    def sync(self, error: BaseException | None = None) -> None:
        staged, self.staged = self.staged, []
        for changes, ticket in staged:
            if error is None:
                for table, key, value in changes:
                    if value is None:
                        self.tables.setdefault(table, {}).pop(key, None)
                    else:
                        self.tables.setdefault(table, {})[key] = value
            ticket.resolve(error)

    def items(self, table: str) -> list[tuple[bytes, bytes]]:
        return list(self.tables.get(table, {}).items())


class MemoryEntry:
    def __init__(self, journal: MemoryJournal) -> None:
        self._journal = journal
        self._changes: list[tuple[str, bytes, bytes | None]] = []

    def put(self, table: str, key: bytes, value: bytes) -> None:
        self._changes.append((table, key, value))

    def delete(self, table: str, key: bytes) -> None:
        self._changes.append((table, key, None))

    def commit(self) -> MemoryTicket:
        ticket = MemoryTicket()
        self._journal.staged.append((self._changes, ticket))
        if not self._journal.hold:
            self._journal.sync()
        return ticket


class World:
    def __init__(self, topics: Mapping[str, int] | None = None, **settings: Any) -> None:
        self.clock = ManualClock()
        self.timers = ManualTimers(self.clock)
        self.journal = MemoryJournal()
        self.topics = dict(topics or {})
        self._counted: Mapping[str, int] = {}
        self.settings = GroupSettings(**settings)
        self.configs: dict[str, GroupConfig] = {}
        self.groups = self.open()

    def open(self) -> Groups:
        groups = Groups(
            self.settings, self.clock, self.timers, self.journal.begin, self._counts,
            lambda group_id: self.configs.get(group_id, DEFAULTS),
        )  # fmt: skip
        groups.load(self.journal.items)
        return groups

    def _counts(self) -> Mapping[str, int]:
        if self._counted != self.topics:
            self._counted = dict(self.topics)
        return self._counted

    def restart(self) -> None:
        """As after kill -9: timers and members in memory are gone."""
        self.timers = ManualTimers(self.clock)
        self.groups = self.open()

    def classic(self, group: str) -> ClassicGroup:
        """The group, whose members all use the classic protocol."""
        found = self.groups.known_classic(group)
        assert isinstance(found, ClassicGroup)
        return found

    def join(self, group: str, member_id: str = "", **values: Any) -> "Answer[JoinResult]":
        answer: Answer[JoinResult] = Answer()
        fields: dict[str, Any] = {
            "member_id": member_id,
            "instance_id": None,
            "client_id": "client",
            "client_host": "/127.0.0.1",
            "session_timeout_ms": 10_000,
            "rebalance_timeout_ms": 60_000,
            "protocol_type": "consumer",
            "protocols": (("range", b"metadata"),),
        }
        fields.update(values)
        self.groups.join(group, Join(**fields), answer)
        return answer

    def sync(self, group: str, joined: JoinResult, assignments: Mapping[str, bytes] | None = None) -> "Answer[Synced]":
        answer: Answer[Synced] = Answer()
        self.groups.known_classic(group).sync(
            joined.member_id, None, joined.generation, "consumer", joined.protocol, assignments or {}, answer
        )
        return answer

    def stable(self, group: str, count: int) -> list[JoinResult]:
        """A group with that many members, each assigned its own id."""
        ids = [""] * count
        answers = [self.join(group) for _ in ids]
        if count > 1:  # the first is alone in its generation, and hears of the others by heartbeat
            first = answers[0].result
            answers[0] = self.join(group, first.member_id)
        joined = [answer.result for answer in answers]
        leader = next(one for one in joined if one.leader == one.member_id)
        assignments = {member_id: member_id.encode() for member_id, _, _ in leader.members}
        for one in joined:
            self.sync(group, one, assignments if one is leader else {})
        return joined


class Answer(Generic[T]):
    """Called once with the result or an error."""

    def __init__(self) -> None:
        self.value: T | HeadraceError | None = None

    def __call__(self, value: T | HeadraceError) -> None:
        assert self.value is None, "answered twice"
        self.value = value

    @property
    def waiting(self) -> bool:
        return self.value is None

    @property
    def result(self) -> T:
        assert self.value is not None, "no answer yet"
        if isinstance(self.value, HeadraceError):
            raise self.value
        return self.value
