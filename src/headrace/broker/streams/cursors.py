"""Cursors: named reading positions, stored for Spark jobs and HTTP readers.

A cursor has one offset per partition of the streams it reads. It is in the state store, so it is as durable as a
message. With `pin` it keeps retention from deleting segments it still needs. A cursor that was not moved for its
maximum age is dropped together with its pin, so that a job that no longer runs does not fill the disk.
"""

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from headrace.broker.streams.partition import Partition
from headrace.broker.streams.streams import Stream, Streams
from headrace.clock import Clock, ExpiryClock
from headrace.errors import CursorNotFound, InvalidInput, LimitReached, OffsetOutOfRange
from headrace.log.shard import Shard

TABLE = "cursors"
NAME_BYTES_MAX = 255
CURSORS_MAX = 10_000
MAX_AGE_MS = 7 * 24 * 3600 * 1000
FOREVER = -1


class CursorState(msgspec.Struct, frozen=True, kw_only=True):
    """A cursor as the state store has it. Offsets are by log id: a stream that is recreated under the same name has
    new logs, in which old positions mean nothing."""

    offsets: dict[int, int]
    pin: bool = False
    max_age_ms: int = MAX_AGE_MS
    updated_ms: int = 0

    def is_expired(self, ages: ExpiryClock) -> bool:
        return self.max_age_ms != FOREVER and ages.is_past(self.updated_ms, self.max_age_ms)


class CursorPosition(NamedTuple):
    stream: Stream
    partition: Partition
    offset: int

    @property
    def lag(self) -> int:
        """Messages between the cursor and the end that can still be read."""
        return max(0, self.partition.end_offset - max(self.offset, self.partition.start_offset))


class Cursors:
    def __init__(self, streams: Streams, shard: Shard, clock: Clock) -> None:
        self._streams = streams
        self._shard = shard
        self._clock = clock
        self._ages = ExpiryClock(clock)
        self._cursors: dict[str, CursorState] = {}
        for key, value in shard.state.items(TABLE):
            self._set(key.decode(), _decode(value))
        streams.on_delete(self._forget_stream)

    def get(self, name: str) -> CursorState:
        try:
            return self._cursors[name]
        except KeyError:
            raise CursorNotFound(name) from None

    def names(self) -> list[str]:
        return sorted(self._cursors)

    def __contains__(self, name: str) -> bool:
        return name in self._cursors

    def __len__(self) -> int:
        return len(self._cursors)

    def positions(self, name: str) -> list[CursorPosition]:
        """The cursor's positions, ordered by stream and partition."""
        found = [
            CursorPosition(*place, offset)
            for log_id, offset in self.get(name).offsets.items()
            if (place := self._streams.of_log(log_id)) is not None
        ]
        return sorted(found, key=lambda p: (p.stream.vhost, p.stream.name, p.partition.number))

    async def commit(
        self,
        name: str,
        stream: Stream,
        offsets: Mapping[int, int],
        *,
        pin: bool | None = None,
        max_age_ms: int | None = None,
    ) -> None:
        """Move a cursor, or create it; durable on return. None leaves a property unchanged."""
        old = self._cursors.get(name)
        if old is None:
            self._check_new(name)
            old = CursorState(offsets={})
        moved = dict(old.offsets)
        for number, offset in offsets.items():
            partition = stream.partition(number)
            if not 0 <= offset <= partition.end_offset:
                raise OffsetOutOfRange(offset, partition.start_offset, partition.end_offset)
            moved[partition.log_id] = offset
        state = CursorState(
            offsets=moved,
            pin=old.pin if pin is None else pin,
            max_age_ms=old.max_age_ms if max_age_ms is None else max_age_ms,
            updated_ms=self._clock.now_ms(),
        )
        await self._store(name, state)

    async def delete(self, name: str) -> None:
        self.get(name)
        await self._store(name, None)

    async def expire(self) -> list[str]:
        """Drop the cursors past their maximum age; returns their names."""
        expired = []
        for name in self.names():
            state = self._cursors.get(name)  # read only now: it may have moved while another one was dropped
            if state is not None and state.is_expired(self._ages):
                await self._store(name, None)
                expired.append(name)
        return expired

    async def _forget_stream(self, stream: Stream) -> None:
        gone = set(stream.document.logs)
        for name in self.names():
            state = self._cursors.get(name)  # read only now: it may have moved while another one was changed
            if state is not None and gone & state.offsets.keys():
                left = {log_id: offset for log_id, offset in state.offsets.items() if log_id not in gone}
                await self._store(name, msgspec.structs.replace(state, offsets=left) if left else None)

    async def _store(self, name: str, state: CursorState | None) -> None:
        """Change memory first: the next commit builds on this one while it waits for the disk."""
        group = self._shard.group()
        key = name.encode()
        if state is None:
            group.delete(TABLE, key)
        else:
            group.put(TABLE, key, msgspec.json.encode(state))
        before = self._cursors.get(name)
        try:
            self._set(name, state)  # the pin must be set before the entry is staged: see Log.set_pin
            ticket = group.commit()
        except Exception:
            self._set(name, before)
            raise
        try:
            await ticket
        except Exception:
            stored = self._shard.state.get(TABLE, key)
            self._set(name, None if stored is None else _decode(stored))
            raise

    def _set(self, name: str, state: CursorState | None) -> None:
        old = self._cursors.pop(name, None)
        if state is not None:
            self._cursors[name] = state
        pins = state.offsets if state is not None and state.pin else {}
        touched = pins.keys() | (old.offsets.keys() if old is not None and old.pin else set())
        for log_id in touched:
            log = self._shard.logs.get(log_id)
            if log is not None:
                log.set_pin(f"cursor:{name}", pins.get(log_id))

    def _check_new(self, name: str) -> None:
        try:
            size = len(name.encode())
        except UnicodeEncodeError:
            raise InvalidInput("a name must not contain unpaired surrogates") from None
        if not 0 < size <= NAME_BYTES_MAX:
            raise InvalidInput(f"the name of a cursor must have 1 to {NAME_BYTES_MAX} bytes, not {size}")
        if len(self._cursors) >= CURSORS_MAX:
            raise LimitReached(f"there are already {CURSORS_MAX:,} cursors")


def _decode(value: bytes) -> CursorState:
    return msgspec.json.decode(value, type=CursorState)
