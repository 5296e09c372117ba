"""Fetch sessions: a client names its partitions once, and after that only the changes (KIP-227)."""

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from headrace.clock import Clock
from headrace.listeners.kafka.errors import Code

SESSIONS_MAX = 2000
OF_CONNECTION_MAX = 4  # clients need one per connection; a connection that starts more evicts only its own
IDLE_S_MIN = 120.0  # Kafka's min.incremental.fetch.session.eviction.ms: a younger one is not evicted for another client
PARTITIONS_MAX = 500_000  # in all sessions together: each costs a few hundred bytes while its session lasts
FULL = 0  # the epoch that starts a session
FINAL = -1  # the epoch of a client that wants no session
EPOCH_MAX = 0x7FFFFFFF

Topic = str | bytes
Key = tuple[Topic, int]


class FetchPosition:
    """A partition that a client reads, and the offsets that the last response gave for it."""

    __slots__ = ("high_watermark", "leader_epoch", "log_start", "max_bytes", "offset", "watch")

    def __init__(self, leader_epoch: int, offset: int, max_bytes: int) -> None:
        self.leader_epoch = leader_epoch
        self.offset = offset
        self.max_bytes = max_bytes
        self.high_watermark = -1
        self.log_start = -1
        self.watch: Any = None  # fetch.Watch: until it fires there is nothing new to read


class FetchSession:
    def __init__(self, session_id: int, by_id: bool, siblings: set[int], now: float) -> None:
        self.session_id = session_id
        self.siblings = siblings  # ids of all sessions of the same connection, including this one
        self.by_id = by_id  # whether the client names topics by id: a response has room for an id or for a name
        self.epoch = 1
        self.used = now  # monotonic; FetchSessions.by_id is in this order
        self.wanted: dict[Key, FetchPosition] = {}
        self.counted = 0  # how many of these are counted in FetchSessions.partitions


class Opened(NamedTuple):
    """The partitions to read for one fetch. is_incremental: the response omits partitions with nothing new."""

    session_id: int
    wanted: dict[Key, FetchPosition]
    is_incremental: bool
    error: Code = Code.NONE


class FetchSessions:
    """All sessions of one listener, least recently used first."""

    def __init__(self, clock: Clock, elements_max: Callable[[], int]) -> None:
        self._clock = clock
        self._elements_max = elements_max
        self.by_id: dict[int, FetchSession] = {}
        self.partitions = 0  # in all sessions

    def open(
        self,
        own: set[int],
        session_id: int,
        epoch: int,
        by_id: bool,
        topics: list[tuple[Topic, list[tuple[int, int, int, int]]]],
        forgotten: list[tuple[Topic, list[int]]],
    ) -> Opened:
        """Start or continue a session. own: the ids of the connection's sessions, changed here."""
        now = self._clock.monotonic()
        if epoch in (FINAL, FULL):
            self.end(session_id)
            wanted = update({}, topics)
            if epoch == FINAL or not self._make_room(own, now) or not self._has_room(len(wanted)):
                return Opened(0, wanted, False)
            session = FetchSession(self._new_id(), by_id, own, now)
            session.wanted = wanted
            self._count(session)
            self.by_id[session.session_id] = session
            # A client that reconnects starts over: a session ends with its connection.
            own.add(session.session_id)
            return Opened(session.session_id, wanted, False)
        known = self.by_id.get(session_id)
        if known is None:
            return Opened(0, {}, False, Code.FETCH_SESSION_ID_NOT_FOUND)
        if epoch != known.epoch:
            return Opened(0, {}, False, Code.INVALID_FETCH_SESSION_EPOCH)
        if by_id != known.by_id:
            return Opened(0, {}, False, Code.FETCH_SESSION_TOPIC_ID_ERROR)
        known.epoch = known.epoch + 1 if known.epoch < EPOCH_MAX else 1
        known.used = now
        self.by_id[session_id] = self.by_id.pop(session_id)
        update(known.wanted, topics)
        for topic, numbers in forgotten:  # after update: a partition in both lists is not read any more, as in Kafka
            for number in numbers:
                known.wanted.pop((topic, number), None)
        grown = len(known.wanted) - known.counted
        if grown > 0 and (len(known.wanted) > self._elements_max() or not self._has_room(grown)):
            self.end(session_id)
            return Opened(0, {}, False, Code.FETCH_SESSION_ID_NOT_FOUND)
        self._count(known)
        return Opened(session_id, known.wanted, True)

    def end(self, session_id: int) -> None:
        ended = self.by_id.pop(session_id, None)
        if ended is not None:
            self.partitions -= ended.counted
            ended.siblings.discard(session_id)

    def _make_room(self, own: set[int], now: float) -> bool:
        """Make room for one more session of a connection. False: all are in use, so the fetch is served without one,
        as Kafka does."""
        if len(own) >= OF_CONNECTION_MAX:
            self.end(min(own, key=lambda session_id: self.by_id[session_id].used))
        if len(self.by_id) >= SESSIONS_MAX:
            idlest = next(iter(self.by_id.values()))
            if now - idlest.used < IDLE_S_MIN:
                return False
            self.end(idlest.session_id)
        return True

    def _has_room(self, more: int) -> bool:
        return self.partitions + more <= PARTITIONS_MAX

    def _count(self, session: FetchSession) -> None:
        size = len(session.wanted)
        self.partitions += size - session.counted
        session.counted = size

    def _new_id(self) -> int:
        while True:
            session_id = random.randint(1, 0x7FFFFFFF)
            if session_id not in self.by_id:
                return session_id


def update(
    wanted: dict[Key, FetchPosition], topics: list[tuple[Topic, list[tuple[int, int, int, int]]]]
) -> dict[Key, FetchPosition]:
    """Add the partitions of a request, and move those that were there already."""
    for topic, parts in topics:
        for number, leader_epoch, offset, max_bytes in parts:
            one = wanted.get((topic, number))
            if one is None:
                wanted[topic, number] = FetchPosition(leader_epoch, offset, max_bytes)
            else:
                one.leader_epoch, one.offset, one.max_bytes = leader_epoch, offset, max_bytes
    return wanted
