"""Committed offsets of groups. A commit becomes visible and is answered only after it is durable."""

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import msgspec

from headrace.errors import HeadraceError

OFFSETS = "group.offsets"
TopicPartition = tuple[str, int]
Answer = Callable[[HeadraceError | None], None]


class CommittedOffset(msgspec.Struct, frozen=True, array_like=True):
    """One committed offset. log_id distinguishes a topic from a later one with the same name."""

    group: str
    topic: str
    partition: int
    log_id: int
    offset: int
    leader_epoch: int
    metadata: str
    commit_ms: int


class OffsetEntry(Protocol):
    """A journal entry under construction: the part of log.commit.AtomicGroup that is used here."""

    def put(self, table: str, key: bytes, value: bytes) -> object: ...
    def delete(self, table: str, key: bytes) -> object: ...


class CommitTicket(Protocol):
    @property
    def error(self) -> BaseException | None: ...
    def add_callback(self, callback: Callable[["CommitTicket"], object], /) -> object: ...


class StagedEntry(OffsetEntry, Protocol):
    def commit(self) -> CommitTicket: ...


def offset_key(group: str, topic: str, partition: int) -> bytes:
    return f"{group}\0{topic}\0{partition}".encode()


class OffsetStore:
    """Owned by Groups. Memory holds exactly what would survive a crash."""

    def __init__(self, begin: Callable[[], StagedEntry]) -> None:
        self._begin = begin
        self._groups: dict[str, dict[TopicPartition, CommittedOffset]] = {}
        self._under_way: dict[str, CommitTicket] = {}  # group -> its last change that is not durable yet

    def load(self, items: Iterable[tuple[bytes, bytes]]) -> None:
        for _, value in items:
            self.apply([msgspec.msgpack.decode(value, type=CommittedOffset)])

    def commit(self, entries: list[CommittedOffset], answer: Answer) -> None:
        """Call answer(None) once the entries are durable, or answer(error)."""
        staged = self._begin()
        self.stage(staged, entries)

        def done(ticket: CommitTicket) -> None:
            if ticket.error is None:
                self.apply(entries)
                answer(None)
            else:
                answer(as_error(ticket.error))

        self._follow({one.group for one in entries}, staged.commit(), done)

    def _follow(self, groups: set[str], ticket: CommitTicket, done: Callable[[CommitTicket], None]) -> None:
        for group in groups:
            self._under_way[group] = ticket

        def ended(_: CommitTicket) -> None:
            for group in groups:
                if self._under_way.get(group) is ticket:
                    del self._under_way[group]
            done(ticket)

        ticket.add_callback(ended)

    def when_seen(self, group: str, then: Callable[[], None]) -> None:
        """Call `then` once all earlier commits of the group are visible, possibly at once. A client that pipelines a
        fetch after its own commit expects to see that commit."""
        ticket = self._under_way.get(group)
        then() if ticket is None else ticket.add_callback(lambda _: then())

    def stage(self, entry: OffsetEntry, entries: list[CommittedOffset]) -> None:
        """Add the entries to a journal entry; the caller calls apply() when it is durable."""
        encode = msgspec.msgpack.encode
        for one in entries:
            entry.put(OFFSETS, offset_key(one.group, one.topic, one.partition), encode(one))

    def apply(self, entries: Iterable[CommittedOffset]) -> None:
        for one in entries:
            self._groups.setdefault(one.group, {})[one.topic, one.partition] = one

    def delete(self, group: str, partitions: Iterable[TopicPartition], answer: Answer) -> None:
        gone = [which for which in partitions if which in self._groups.get(group, {})]
        staged = self._begin()
        for topic, partition in gone:
            staged.delete(OFFSETS, offset_key(group, topic, partition))

        def done(ticket: CommitTicket) -> None:
            if ticket.error is not None:
                answer(as_error(ticket.error))
                return
            kept = self._groups.get(group, {})
            for which in gone:
                kept.pop(which, None)
            if not kept:
                self._groups.pop(group, None)
            answer(None)

        self._follow({group}, staged.commit(), done)

    def get(self, group: str, topic: str, partition: int) -> CommittedOffset | None:
        return self._groups.get(group, {}).get((topic, partition))

    def of(self, group: str) -> Mapping[TopicPartition, CommittedOffset]:
        return self._groups.get(group, {})

    def groups(self) -> Iterable[str]:
        return self._groups.keys()


def as_error(error: BaseException) -> HeadraceError:
    if isinstance(error, HeadraceError):
        return error
    raise error
