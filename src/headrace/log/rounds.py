"""What goes into a round: parts (batches for a log), state changes, and the tickets that wait for them.

A round is everything that arrived since the last sync began. It becomes one journal entry, so everything in
it happens together; what is asked for as one Group is never split over two rounds.
"""

import struct
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.log.log import Log

Bytes = bytes | bytearray | memoryview

PUT = 1
DELETE = 2
MERGE = 3
APPEND = 4
SHARED = 5
END = 6

_STATE = struct.Struct("<BBHI")  # kind, table bytes, key bytes, value bytes
_APPEND = struct.Struct("<BQQqqI")  # kind, log, epoch, base, next offset, bytes that follow
_SHARED = struct.Struct("<BQQqqI")  # ... number of the append in this entry whose bytes it shares
_END = struct.Struct("<BQQq")  # kind, log, epoch, durable end
END_BYTES = _END.size

PART_BYTES = 64  # about what an entry spends on a part besides its batches


class StateChange(NamedTuple):
    kind: int
    table: str
    key: bytes
    value: bytes

    @property
    def size(self) -> int:
        return _STATE.size + len(self.table) + len(self.key) + len(self.value)


class Part:
    """Whole batches for one log. Offsets are given out when the round is sealed."""

    __slots__ = ("atomic", "base_offset", "data", "log", "next_offset", "ticket")

    def __init__(self, log: "Log", data: bytearray | memoryview, ticket: "Ticket", atomic: bool) -> None:
        self.log = log
        self.data = data
        self.ticket = ticket
        self.atomic = atomic
        self.base_offset = -1
        self.next_offset = -1


class Ticket:
    """The answer to "is it safe yet?". Resolved on the owner thread once the round is on stable storage.

    Nothing above the log uses an offset before that: until then it does not exist.
    """

    __slots__ = ("_callbacks", "_make_future", "base_offset", "done", "error", "next_offset")

    def __init__(self, make_future: Callable[[], Any] | None = None) -> None:
        self.done = False
        self.error: HeadraceError | None = None
        self.base_offset = -1
        self.next_offset = -1
        self._callbacks: list[Callable[[Ticket], object]] = []
        self._make_future = make_future

    def add_callback(self, callback: Callable[["Ticket"], object]) -> None:
        if self.done:
            callback(self)
        else:
            self._callbacks.append(callback)

    def resolve(self, error: HeadraceError | None = None) -> None:
        assert not self.done, "a ticket is resolved once"
        self.done = True
        self.error = error
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def __await__(self) -> Generator[Any, None, "Ticket"]:
        if not self.done:
            if self._make_future is None:
                raise RuntimeError("this shard was opened without make_future: its tickets cannot be awaited")
            future = self._make_future()
            self.add_callback(lambda _: None if future.done() else future.set_result(None))
            yield from future.__await__()
        if self.error is not None:
            raise self.error
        return self


class Unit:
    """What must stay together: one append, or one group."""

    __slots__ = ("changes", "immediate", "lazy", "parts", "size", "ticket")

    def __init__(self, ticket: Ticket) -> None:
        self.ticket = ticket
        self.parts: list[Part] = []
        self.changes: list[StateChange] = []
        self.size = 0
        self.lazy = False
        self.immediate = False  # a round of its own


class Round:
    __slots__ = ("changes", "ends", "has_async", "must_sync", "parts", "size", "units")

    def __init__(self) -> None:
        self.units: list[Unit] = []
        self.parts: list[Part] = []
        self.changes: list[StateChange] = []
        self.ends: list[tuple[int, int, int]] = []  # log, epoch, end: synced past the journal since the last entry
        self.size = 0
        self.must_sync = False
        self.has_async = False  # a part of it belongs to a log that is written past the journal

    def add(self, unit: Unit) -> None:
        self.units.append(unit)
        self.parts += unit.parts
        self.changes += unit.changes
        self.size += unit.size
        if unit.changes and not unit.lazy:
            self.must_sync = True
        for part in unit.parts:
            if part.log.is_async:
                self.has_async = True
            else:
                self.must_sync = True


Run = tuple["Log", list[Part]]


def by_log(parts: Sequence[Part]) -> list[Run]:
    """One run per log, in the order of their first part: one write each. A deleted log has no place to write to."""
    runs: dict[int, Run] = {}
    for part in parts:
        if part.log.is_deleted:
            continue
        runs.setdefault(part.log.id, (part.log, []))[1].append(part)
    return list(runs.values())


@dataclass(slots=True)
class Committed:
    """What became of a round that is durable, and what it cost."""

    syncs: int = 0
    sync_s: float = 0.0
    segments_created: int = 0
    has_entry: bool = False  # of its own, with the ends it was given
    direct_ends: list[tuple[int, int, int]] = field(default_factory=list)


def encode(parts: Sequence[Part], changes: Sequence[StateChange], ends: Sequence[tuple[int, int, int]]) -> list[Bytes]:
    """The body of a journal entry. Equal bytes for many logs (fan-out) are stored once."""
    body: list[Bytes] = []
    stored: dict[int, int] = {}
    for part in parts:
        facts = part.log.id, part.log.epoch, part.base_offset, part.next_offset
        number = stored.get(id(part.data))
        if number is None:
            stored[id(part.data)] = len(stored)
            body += [_APPEND.pack(APPEND, *facts, len(part.data)), part.data]
        else:
            body.append(_SHARED.pack(SHARED, *facts, number))
    for change in changes:
        table = change.table.encode()
        body.append(_STATE.pack(change.kind, len(table), len(change.key), len(change.value)))
        body += [table, change.key, change.value]
    body += [_END.pack(END, *end) for end in ends]
    return body


class ReplayedPart(NamedTuple):
    log_id: int
    epoch: int
    base_offset: int
    next_offset: int
    data: memoryview


class ReplayedEnd(NamedTuple):
    log_id: int
    epoch: int
    end: int


def decode(body: memoryview) -> Iterator[ReplayedPart | StateChange | ReplayedEnd]:
    """The reverse of encode. The entry's CRC has been checked: what does not add up here is our bug."""
    stored: list[memoryview] = []
    at = 0
    while at < len(body):
        kind = body[at]
        if kind == APPEND:
            _, log_id, epoch, base, next_offset, size = _APPEND.unpack_from(body, at)
            at += _APPEND.size
            stored.append(body[at : at + size])
            at += size
            yield ReplayedPart(log_id, epoch, base, next_offset, stored[-1])
        elif kind == SHARED:
            _, log_id, epoch, base, next_offset, number = _SHARED.unpack_from(body, at)
            at += _SHARED.size
            yield ReplayedPart(log_id, epoch, base, next_offset, stored[number])
        elif kind == END:
            _, log_id, epoch, end = _END.unpack_from(body, at)
            at += _END.size
            yield ReplayedEnd(log_id, epoch, end)
        else:
            assert kind in (PUT, DELETE, MERGE), f"unknown kind {kind} in a journal entry"
            _, table_bytes, key_bytes, value_bytes = _STATE.unpack_from(body, at)
            at += _STATE.size
            table = bytes(body[at : at + table_bytes]).decode()
            at += table_bytes
            key = bytes(body[at : at + key_bytes])
            at += key_bytes
            yield StateChange(kind, table, key, bytes(body[at : at + value_bytes]))
            at += value_bytes
