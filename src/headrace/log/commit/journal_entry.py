"""The content of a journal entry, and the result of committing a round. round.pyx encodes entries."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.log.state.changes import DELETE, MERGE, PUT, STATE_FIELDS, StateChange

Bytes = bytes | bytearray | memoryview
LogEpochEnd = tuple[int, int, int]  # log id, epoch, end offset

# Kinds of item; 1 to 3 are the kinds of state change.
APPEND = 4
SHARED = 5
END = 6

APPEND_FIELDS = struct.Struct("<BQQqqI")  # kind, log, epoch, base, next offset, bytes that follow
SHARED_FIELDS = struct.Struct("<BQQqqI")  # ... number of the append in this entry whose bytes it shares
END_FIELDS = struct.Struct("<BQQq")  # kind, log, epoch, durable end
END_BYTES = END_FIELDS.size

PART_BYTES = 64  # upper estimate of what an entry spends on a part besides its batches


@dataclass(slots=True)
class CommittedRound:
    """Result of a committed round, and its cost."""

    syncs: int = 0
    sync_s: float = 0.0
    segments_created: int = 0
    has_entry: bool = False  # it wrote a journal entry, which includes the round's `ends`
    direct_ends: list[LogEpochEnd] = field(default_factory=list)  # logs that were synced without the journal


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
    """The reverse of round.encode. The entry's CRC was checked before, so an inconsistency here is a bug."""
    stored: list[memoryview] = []
    at = 0
    while at < len(body):
        kind = body[at]
        if kind == APPEND:
            _, log_id, epoch, base, next_offset, size = APPEND_FIELDS.unpack_from(body, at)
            at += APPEND_FIELDS.size
            stored.append(body[at : at + size])
            at += size
            yield ReplayedPart(log_id, epoch, base, next_offset, stored[-1])
        elif kind == SHARED:
            _, log_id, epoch, base, next_offset, number = SHARED_FIELDS.unpack_from(body, at)
            at += SHARED_FIELDS.size
            yield ReplayedPart(log_id, epoch, base, next_offset, stored[number])
        elif kind == END:
            _, log_id, epoch, end = END_FIELDS.unpack_from(body, at)
            at += END_FIELDS.size
            yield ReplayedEnd(log_id, epoch, end)
        else:
            assert kind in (PUT, DELETE, MERGE), f"unknown kind {kind} in a journal entry"
            _, table_bytes, key_bytes, value_bytes = STATE_FIELDS.unpack_from(body, at)
            at += STATE_FIELDS.size
            table = bytes(body[at : at + table_bytes]).decode()
            at += table_bytes
            key = bytes(body[at : at + key_bytes])
            at += key_bytes
            yield StateChange(kind, table, key, bytes(body[at : at + value_bytes]))
            at += value_bytes


__all__ = [
    "APPEND",
    "APPEND_FIELDS",
    "DELETE",
    "END",
    "END_BYTES",
    "END_FIELDS",
    "MERGE",
    "PART_BYTES",
    "PUT",
    "SHARED",
    "SHARED_FIELDS",
    "Bytes",
    "CommittedRound",
    "LogEpochEnd",
    "ReplayedEnd",
    "ReplayedPart",
    "StateChange",
    "decode",
]
