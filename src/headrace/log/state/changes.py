"""A change of one value in the state, as it travels through a journal entry."""

import struct
from typing import NamedTuple

# Kinds of change. They share their number space with the other items of a journal entry (commit/journal_entry.py).
PUT = 1
DELETE = 2
MERGE = 3

STATE_FIELDS = struct.Struct("<BBHI")  # kind, table bytes, key bytes, value bytes


class StateChange(NamedTuple):
    kind: int
    table: str
    key: bytes
    value: bytes

    @property
    def size(self) -> int:
        """Bytes in a journal entry."""
        return STATE_FIELDS.size + len(self.table) + len(self.key) + len(self.value)
