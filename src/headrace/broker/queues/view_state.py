"""The durable state of a view and its encoding in the state table.

A view saves deltas; the state table folds them into one value, which is itself a delta that holds everything so far.
"""

import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from headrace.broker.queues.delivery_counts import decode_counts, encode_counts
from headrace.broker.types.range_set import RangeSet

SETTLE_TABLE = "settle"

_HEAD = struct.Struct(">Bq")
_RANGE = struct.Struct(">qq")
# Bits of a delta's first byte: whether `reserved` is raised or set, and whether delivery counts precede the ranges.
_RAISE, _SET, _COUNTED = 0, 1, 2


class Delta(NamedTuple):
    """Changes of a view since its last save."""

    settled: RangeSet
    moving: RangeSet  # settled together with a publish elsewhere: undone if that publish is refused
    reserved: int  # deliveries may have gone up to here
    exact: bool = False  # `reserved` may also fall
    counts: Mapping[int, int] = MappingProxyType({})

    def encode(self) -> bytes:
        kind = (_SET if self.exact else _RAISE) | (_COUNTED if self.counts else 0)
        counts = encode_counts(self.counts) if self.counts else b""
        pairs = (_RANGE.pack(start, end) for ranges in (self.settled, self.moving) for start, end in ranges)
        return b"".join((_HEAD.pack(kind, self.reserved), counts, *pairs))


class SavedState(NamedTuple):
    """The state of a view as the state table has it."""

    reserved: int
    settled: RangeSet
    counts: dict[int, int]


def fold_settles(value: bytes | None, deltas: Sequence[bytes]) -> bytes | None:
    """Merge deltas into a value of the state table."""
    reserved, settled, counts = decode_settles(value)
    for delta in deltas:
        kind, raised, more, pairs = _split(delta)
        reserved = raised if kind & _SET else max(reserved, raised)
        counts.update(more)
        for pair in _RANGE.iter_unpack(pairs):
            settled.add(*pair)
    counts = {offset: count for offset, count in counts.items() if offset not in settled}
    return Delta(settled, RangeSet(), reserved, counts=counts).encode()


def decode_settles(value: bytes | None) -> SavedState:
    if value is None:
        return SavedState(0, RangeSet(), {})
    _, reserved, counts, pairs = _split(value)
    return SavedState(reserved, RangeSet(_RANGE.iter_unpack(pairs)), counts)


def _split(raw: bytes) -> tuple[int, int, dict[int, int], memoryview]:
    """(kind, reserved, delivery counts, encoded ranges)."""
    kind, reserved = _HEAD.unpack_from(raw)
    counts: dict[int, int] = {}
    rest = memoryview(raw)[_HEAD.size :]
    if kind & _COUNTED:
        counts, rest = decode_counts(rest)
    return kind, reserved, counts, rest
