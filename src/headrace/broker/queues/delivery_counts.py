"""Counts how often each message was returned, for queues with a delivery limit. Saved with the view's settles.

Only messages that were returned and are not settled yet have a count, so the size does not depend on the backlog.
Counts must survive a restart: otherwise a message that crashes broker and consumer each time would start at zero again
and never reach its dead-letter queue.
"""

import struct
from collections.abc import Mapping

from headrace.broker.types.range_set import RangeSet

_SIZE = struct.Struct(">I")
_COUNT = struct.Struct(">qI")


class DeliveryCounts:
    """Return counts of one view, by offset."""

    __slots__ = ("_counts", "_offsets", "_unsaved")

    def __init__(self, saved: Mapping[int, int]) -> None:
        self._counts = dict(saved)
        self._offsets = RangeSet((offset, offset + 1) for offset in sorted(saved))  # for next_in
        self._unsaved: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._counts)

    def __contains__(self, offset: int) -> bool:
        return offset in self._counts

    def get(self, offset: int) -> int:
        return self._counts.get(offset, 0)

    @property
    def highest(self) -> int:
        return max(self._counts.values(), default=0)

    def next_in(self, start: int, end: int) -> int:
        """The first counted offset of [start, end), or end."""
        if start in self._counts:
            return start
        gap = self._offsets.gap(start, end)
        return end if gap is None else gap[1]

    def add(self, offset: int) -> int:
        count = self._counts[offset] = self._unsaved[offset] = self.get(offset) + 1
        if count == 1:
            self._offsets.add(offset, offset + 1)
        return count

    def forget(self, start: int, end: int) -> None:
        """[start, end) is settled for good."""
        if not self._counts:
            return
        self._offsets.remove(start, end)
        few = range(start, end) if end - start < len(self._counts) else list(self._counts)
        for offset in few:
            if start <= offset < end:
                self._counts.pop(offset, None)
                self._unsaved.pop(offset, None)

    def take_unsaved(self) -> dict[int, int]:
        taken, self._unsaved = self._unsaved, {}
        return taken

    def put_back(self, unsaved: Mapping[int, int]) -> None:
        self._unsaved = {**unsaved, **self._unsaved}


def encode_counts(counts: Mapping[int, int]) -> bytes:
    return _SIZE.pack(len(counts)) + b"".join(_COUNT.pack(*entry) for entry in counts.items())


def decode_counts(raw: memoryview) -> tuple[dict[int, int], memoryview]:
    """(counts, the bytes after them)."""
    (size,) = _SIZE.unpack_from(raw)
    end = _SIZE.size + size * _COUNT.size
    return dict(_COUNT.iter_unpack(raw[_SIZE.size : end])), raw[end:]
