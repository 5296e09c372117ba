"""Fetch sessions: a client says once which partitions it reads, then only what changed."""

import random
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.listeners.kafka.errors import Code

if TYPE_CHECKING:
    from headrace.listeners.kafka.connection import Connection
    from headrace.listeners.kafka.listener import KafkaListener

SESSIONS_MAX = 2000
OF_CONNECTION_MAX = 4  # clients have one on each connection: who goes on beginning new ones takes only its own
IDLE_S_MIN = 120.0  # Kafka's min.incremental.fetch.session.eviction.ms: before that nobody loses one to another client
PARTITIONS_MAX = 500_000  # in all sessions together: a few hundred bytes each, for as long as a client likes
FULL = 0  # the epoch that begins a session
FINAL = -1  # the epoch of a client that wants none
EPOCH_MAX = 0x7FFFFFFF

Topic = str | bytes
Key = tuple[Topic, int]


class FetchPosition:
    """A partition that a client reads, and what it was told of it last."""

    __slots__ = ("high_watermark", "leader_epoch", "log_start", "max_bytes", "offset", "watch")

    def __init__(self, leader_epoch: int, offset: int, max_bytes: int) -> None:
        self.leader_epoch = leader_epoch
        self.offset = offset
        self.max_bytes = max_bytes
        self.high_watermark = -1
        self.log_start = -1
        self.watch: Any = None  # fetch.Watch: while it has not fired there is nothing new to read


class Session:
    def __init__(self, session_id: int, by_id: bool, siblings: set[int], now: float) -> None:
        self.session_id = session_id
        self.siblings = siblings  # the ids of those that end with the same connection, this one among them
        self.by_id = by_id  # how the client calls topics: an answer has room for an id or for a name
        self.epoch = 1
        self.used = now  # monotonic; the listener's sessions are in this order
        self.wanted: dict[Key, FetchPosition] = {}
        self.counted = 0  # of these, in listener.session_partitions


class Opened(NamedTuple):
    """What to read for one fetch. is_incremental: partitions with nothing new are left out of the answer."""

    session_id: int
    wanted: dict[Key, FetchPosition]
    is_incremental: bool
    error: Code = Code.NONE


def open_session(
    listener: "KafkaListener",
    connection: "Connection",
    session_id: int,
    epoch: int,
    by_id: bool,
    topics: list[tuple[Topic, list[tuple[int, int, int, int]]]],
    forgotten: list[tuple[Topic, list[int]]],
) -> Opened:
    now = listener.broker.clock.monotonic()
    if epoch in (FINAL, FULL):
        end_session(listener, session_id)
        wanted = update({}, topics)
        if epoch == FINAL or not make_room(listener, connection, now) or not has_room(listener, len(wanted)):
            return Opened(0, wanted, False)
        session = Session(new_id(listener), by_id, connection.fetch_sessions, now)
        session.wanted = wanted
        count(listener, session)
        listener.sessions[session.session_id] = session
        # A client that reconnects starts over: a session lives as long as its connection.
        connection.fetch_sessions.add(session.session_id)
        return Opened(session.session_id, wanted, False)
    known: Session | None = listener.sessions.get(session_id)
    if known is None:
        return Opened(0, {}, False, Code.FETCH_SESSION_ID_NOT_FOUND)
    if epoch != known.epoch:
        return Opened(0, {}, False, Code.INVALID_FETCH_SESSION_EPOCH)
    if by_id != known.by_id:
        return Opened(0, {}, False, Code.FETCH_SESSION_TOPIC_ID_ERROR)
    known.epoch = known.epoch + 1 if known.epoch < EPOCH_MAX else 1
    known.used = now
    listener.sessions[session_id] = listener.sessions.pop(session_id)
    update(known.wanted, topics)
    for topic, numbers in forgotten:  # in this order: of what is named in both nothing more is read, as in Kafka
        for number in numbers:
            known.wanted.pop((topic, number), None)
    grown = len(known.wanted) - known.counted
    if grown > 0 and (len(known.wanted) > listener.elements_max or not has_room(listener, grown)):
        end_session(listener, session_id)
        return Opened(0, {}, False, Code.FETCH_SESSION_ID_NOT_FOUND)
    count(listener, known)
    return Opened(session_id, known.wanted, True)


def make_room(listener: "KafkaListener", connection: "Connection", now: float) -> bool:
    """For one more session of this connection. False: all are in use, and it is served without one, as by Kafka."""
    own, all_ = connection.fetch_sessions, listener.sessions
    if len(own) >= OF_CONNECTION_MAX:
        end_session(listener, min(own, key=lambda session_id: all_[session_id].used))
    if len(all_) >= SESSIONS_MAX:
        idlest: Session = next(iter(all_.values()))
        if now - idlest.used < IDLE_S_MIN:
            return False
        end_session(listener, idlest.session_id)
    return True


def has_room(listener: "KafkaListener", more: int) -> bool:
    return listener.session_partitions + more <= PARTITIONS_MAX


def count(listener: "KafkaListener", session: Session) -> None:
    size = len(session.wanted)
    listener.session_partitions += size - session.counted
    session.counted = size


def end_session(listener: "KafkaListener", session_id: int) -> None:
    ended: Session | None = listener.sessions.pop(session_id, None)
    if ended is not None:
        listener.session_partitions -= ended.counted
        ended.siblings.discard(session_id)


def update(
    wanted: dict[Key, FetchPosition], topics: list[tuple[Topic, list[tuple[int, int, int, int]]]]
) -> dict[Key, FetchPosition]:
    for topic, parts in topics:
        for number, leader_epoch, offset, max_bytes in parts:
            one = wanted.get((topic, number))
            if one is None:
                wanted[topic, number] = FetchPosition(leader_epoch, offset, max_bytes)
            else:
                one.leader_epoch, one.offset, one.max_bytes = leader_epoch, offset, max_bytes
    return wanted


def new_id(listener: "KafkaListener") -> int:
    while True:
        session_id = random.randint(1, 0x7FFFFFFF)
        if session_id not in listener.sessions:
            return session_id
