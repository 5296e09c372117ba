"""A share partition: one log that a share group reads like a queue.

It tracks which offsets are settled, acquired or returned, with the range sets that AMQP queues use: memory grows with
acquired records and gaps, not with the backlog. No I/O: time is passed in, and share/groups.py writes the saved state.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from headrace.broker.groups.config import DEFAULTS, GroupConfig
from headrace.broker.types.range_set import RangeSet
from headrace.errors import InvalidRecordState

GAP, ACCEPT, RELEASE, REJECT, RENEW = range(5)


class Acquired(NamedTuple):
    """Offsets first to last, acquired with the same delivery count."""

    first: int
    last: int
    delivery_count: int


class Lock:
    __slots__ = ("count", "deadline", "member")

    def __init__(self, member: str, deadline: float, count: int) -> None:
        self.member, self.deadline, self.count = member, deadline, count


class SavedShare(msgspec.Struct, frozen=True, array_like=True):
    """Offsets below start and the ranges in `settled` are done. Acquired records are returned after a crash."""

    start: int
    settled: list[tuple[int, int]]
    attempts: dict[int, int]


class SharePartition:
    def __init__(self, start: int, saved: SavedShare | None = None, settings: GroupConfig = DEFAULTS) -> None:
        self.settings = settings
        self.start = saved.start if saved else start  # all offsets below are settled
        self.next = self.start  # no offset from here on was ever acquired
        self._settled = RangeSet(saved.settled) if saved else RangeSet()
        self._returned = RangeSet()
        self._attempts: dict[int, int] = dict(saved.attempts) if saved else {}
        self._locks: dict[int, Lock] = {}

    @property
    def locked(self) -> int:
        return len(self._locks)

    @property
    def is_full(self) -> bool:
        """Whether the group has acquired as many records as it may."""
        return self.locked >= self.settings.locks_max

    def lag(self, log_start: int, end: int) -> int:
        """Number of unsettled records below `end`; records that retention deleted do not count."""
        start = max(self.start, log_start)
        return max(0, end - start - self._settled.count(start, end))

    def save(self) -> bytes:
        attempts = dict(self._attempts)
        attempts.update({offset: lock.count for offset, lock in self._locks.items()})
        return msgspec.msgpack.encode(SavedShare(self.start, list(self._settled), attempts))

    # Acquiring.

    def available(self, log_start: int, end: int) -> int | None:
        """The first offset below `end` that can be acquired, or None."""
        if log_start > self.start:
            self._settle(self.start, log_start)  # retention deleted unread records
        if self.is_full:
            return None
        returned = self._returned.first()
        if returned is not None:
            return returned[0] if returned[0] < end else None  # above the end if the group reads committed records only
        self._skip_settled()
        return self.next if self.next < end else None

    def acquire(self, member: str, start: int, end: int, records_max: int, deadline: float) -> list[Acquired]:
        """Acquire up to records_max available records of [start, end). A record on its last attempt is delivered alone,
        so that a poison record cannot take others down with its consumer."""
        taken: list[Acquired] = []
        room = min(records_max, self.settings.locks_max - self.locked)
        offset = start
        while offset < end and room > 0:
            came_back = offset in self._returned
            if not came_back and (offset != self.next or offset in self._settled):
                offset += 1
                self._skip_settled()
                continue
            count = self._attempts.get(offset, 0) + 1
            if count >= self.settings.attempts_max:
                if taken:
                    break
                room = 1
            if came_back:
                self._returned.remove(offset, offset + 1)
            else:
                self.next = offset + 1
            self._attempts.pop(offset, None)
            self._locks[offset] = Lock(member, deadline, count)
            if taken and taken[-1].last == offset - 1 and taken[-1].delivery_count == count:
                taken[-1] = Acquired(taken[-1].first, offset, count)
            else:
                taken.append(Acquired(offset, offset, count))
            room -= 1
            offset += 1
        return taken

    def archive(self, start: int, end: int) -> None:
        """Settle [start, end) except for acquired records: those are checked again when they are released."""
        held = sorted(offset for offset in self._locks if start <= offset < end)
        for first, last in zip([start, *(offset + 1 for offset in held)], [*held, end], strict=True):
            if first < last:
                self._settle(first, last)

    def _skip_settled(self) -> None:
        while True:
            hole = self._settled.gap(self.next, self.next + (1 << 40))
            if hole is None or hole[0] == self.next:
                return
            self.next = hole[0]

    # Acknowledging and releasing.

    def acknowledge(self, member: str, first: int, last: int, types: Sequence[int], deadline: float) -> None:
        """Apply acknowledgements, one type for the whole range or one per offset. Raises and changes nothing unless the
        member has acquired them all."""
        self.check(member, first, last, types)
        for offset in range(first, last + 1):
            kind = types[0] if len(types) == 1 else types[offset - first]
            if kind == RENEW:
                self._locks[offset].deadline = deadline
            elif kind == RELEASE:
                self._release(offset)
            else:
                del self._locks[offset]
                self._settle(offset, offset + 1)

    def check(self, member: str, first: int, last: int, types: Sequence[int]) -> None:
        if last < first or last - first >= self.locked or len(types) not in (1, last - first + 1):
            raise InvalidRecordState(f"{len(types)} acknowledgement types for offsets {first} to {last}")
        if any(not GAP <= kind <= RENEW for kind in types):
            raise InvalidRecordState(f"unknown acknowledgement types in {sorted(set(types))}")
        if RENEW in types and not self.settings.renews:
            raise InvalidRecordState("this group does not allow lock renewal")
        for offset in range(first, last + 1):
            lock = self._locks.get(offset)
            if lock is None or lock.member != member:
                raise InvalidRecordState(f"offset {offset} is not acquired by {member!r}")

    def release_member(self, member: str) -> bool:
        """Return everything that the member had acquired."""
        held = [offset for offset, lock in self._locks.items() if lock.member == member]
        for offset in held:
            self._release(offset)
        return bool(held)

    def release_expired(self, now: float) -> bool:
        expired = [offset for offset, lock in self._locks.items() if lock.deadline <= now]
        for offset in expired:
            self._release(offset)
        return bool(expired)

    def next_deadline(self) -> float | None:
        return min((lock.deadline for lock in self._locks.values()), default=None)

    def _release(self, offset: int) -> None:
        lock = self._locks.pop(offset)
        if lock.count >= self.settings.attempts_max:
            self._settle(offset, offset + 1)  # the last attempt failed: Kafka calls the record archived
        else:
            self._attempts[offset] = lock.count
            self._returned.add(offset, offset + 1)

    def _settle(self, start: int, end: int) -> None:
        self._settled.add(start, end)
        self._returned.remove(start, end)
        if end - start <= len(self._attempts):
            for offset in range(start, end):
                self._attempts.pop(offset, None)
        else:
            for offset in [one for one in self._attempts if start <= one < end]:
                del self._attempts[offset]
        first = self._settled.first()
        while first is not None and first[0] <= self.start:
            self.start = max(self.start, first[1])
            self._settled.remove(first[0], first[1])
            first = self._settled.first()
        self.next = max(self.next, self.start)
