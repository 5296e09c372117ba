"""What a journal entry holds, and what became of a round. What is staged for one is in staging.pyx."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

Bytes = bytes | bytearray | memoryview

PUT = 1
DELETE = 2
MERGE = 3
APPEND = 4
SHARED = 5
END = 6

STATE_FIELDS = struct.Struct("<BBHI")  # kind, table bytes, key bytes, value bytes
APPEND_FIELDS = struct.Struct("<BQQqqI")  # kind, log, epoch, base, next offset, bytes that follow
SHARED_FIELDS = struct.Struct("<BQQqqI")  # ... number of the append in this entry whose bytes it shares
END_FIELDS = struct.Struct("<BQQq")  # kind, log, epoch, durable end
END_BYTES = END_FIELDS.size

PART_BYTES = 64  # about what an entry spends on a part besides its batches


class StateChange(NamedTuple):
    kind: int
    table: str
    key: bytes
    value: bytes

    @property
    def size(self) -> int:
        return STATE_FIELDS.size + len(self.table) + len(self.key) + len(self.value)


@dataclass(slots=True)
class Committed:
    """What became of a round that is durable, and what it cost."""

    syncs: int = 0
    sync_s: float = 0.0
    segments_created: int = 0
    has_entry: bool = False  # of its own, with the ends it was given
    direct_ends: list[tuple[int, int, int]] = field(default_factory=list)


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
    """The reverse of staging.encode. The entry's CRC has been checked: what does not add up here is our bug."""
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
