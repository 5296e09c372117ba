"""Which offset is due when, for millions of them: 16 bytes each, by the second, in order within it.

No timer and no object for each entry. Entries of one second are a flat array of (due, offset) pairs; the seconds
are a heap. Only the second that is at hand is unpacked and sorted.
"""

import heapq
from array import array
from bisect import insort

SLOT_MS = 1000


class DueIndex:
    def __init__(self) -> None:
        self._slots: dict[int, array[int]] = {}
        self._order: list[int] = []
        self._head: list[tuple[int, int]] = []  # the earliest slot, and what came in before it, soonest last
        self._head_slot = -1
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, due_ms: int, offset: int) -> None:
        slot = due_ms // SLOT_MS
        self._length += 1
        if slot <= self._head_slot and self._head:
            # Into the head, whatever its slot: everything in the heap is later than that.
            insort(self._head, (due_ms, offset), key=lambda entry: (-entry[0], -entry[1]))
            return
        pairs = self._slots.get(slot)
        if pairs is None:
            pairs = self._slots[slot] = array("q")
            heapq.heappush(self._order, slot)
        pairs.append(due_ms)
        pairs.append(offset)

    def _open(self) -> bool:
        """Whether the head has something in it, or could be filled."""
        if self._head:
            return True
        if not self._order:
            return False
        self._head_slot = heapq.heappop(self._order)
        flat = self._slots.pop(self._head_slot)
        self._head = sorted(zip(flat[::2], flat[1::2], strict=True), reverse=True)
        return True

    def next_due(self) -> int | None:
        return self._head[-1][0] if self._open() else None

    def take(self, now_ms: int, limit: int) -> list[int]:
        """Offsets that are due, soonest first, at most limit of them."""
        found: list[int] = []
        while len(found) < limit and self._open() and self._head[-1][0] <= now_ms:
            found.append(self._head.pop()[1])
            self._length -= 1
        return found
