"""Index of offsets by due time, for millions of entries of 16 bytes each.

There is neither a timer nor an object per entry. Entries of one second are a flat array of (due, offset) pairs, and the
seconds are a heap. Only the earliest second is sorted.
"""

import heapq
from array import array
from bisect import insort

SLOT_MS = 1000


class DueIndex:
    def __init__(self) -> None:
        self._slots: dict[int, array[int]] = {}
        self._order: list[int] = []
        self._head: list[tuple[int, int]] = []  # the earliest slot, and later additions before it; soonest last
        self._head_slot = -1
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, due_ms: int, offset: int) -> None:
        slot = due_ms // SLOT_MS
        self._length += 1
        if slot <= self._head_slot and self._head:
            # Into the head, even if its slot is earlier: everything in the heap is later.
            insort(self._head, (due_ms, offset), key=lambda entry: (-entry[0], -entry[1]))
            return
        pairs = self._slots.get(slot)
        if pairs is None:
            pairs = self._slots[slot] = array("q")
            heapq.heappush(self._order, slot)
        pairs.append(due_ms)
        pairs.append(offset)

    def _fill_head(self) -> bool:
        """Fill the head if it is empty; False if there are no entries."""
        if self._head:
            return True
        if not self._order:
            return False
        self._head_slot = heapq.heappop(self._order)
        flat = self._slots.pop(self._head_slot)
        self._head = sorted(zip(flat[::2], flat[1::2], strict=True), reverse=True)
        return True

    def next_due(self) -> int | None:
        return self._head[-1][0] if self._fill_head() else None

    def take(self, now_ms: int, limit: int) -> list[int]:
        """Remove and return offsets that are due, soonest first, at most `limit`."""
        found: list[int] = []
        while len(found) < limit and self._fill_head() and self._head[-1][0] <= now_ms:
            found.append(self._head.pop()[1])
            self._length -= 1
        return found
