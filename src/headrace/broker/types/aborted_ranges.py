"""The aborted transactions of one log, whose records readers must not see."""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple


class Aborted(NamedTuple):
    """One aborted transaction. Ordered by the offset of its marker."""

    last_offset: int
    producer_id: int
    first_offset: int


class Aborts:
    """All aborted transactions, found by offset in logarithmic time: every read asks."""

    def __init__(self, aborted: Iterable[Aborted] = ()) -> None:
        self._aborted = list(aborted)
        # For each one, the lowest first offset of it and all later ones, so that these are sorted too.
        lowest = accumulate((one.first_offset for one in reversed(self._aborted)), min)
        self._firsts = list(lowest)[::-1]

    def __len__(self) -> int:
        return len(self._aborted)

    def __iter__(self) -> Iterator[Aborted]:
        return iter(self._aborted)

    def between(self, start: int, end: int) -> list[Aborted]:
        """The transactions with records in [start, end)."""
        first, after = bisect_left(self._aborted, Aborted(start, -1, -1)), bisect_left(self._firsts, end)
        return [one for one in self._aborted[first:after] if one.first_offset < end]

    def add(self, one: Aborted) -> None:
        """Usually appends at the end, and changes only the entries of transactions that were open at the same time."""
        at = bisect_left(self._aborted, one)
        self._aborted.insert(at, one)
        self._firsts.insert(at, min([one.first_offset, *self._firsts[at : at + 1]]))
        while at and self._firsts[at - 1] > one.first_offset:
            at -= 1
            self._firsts[at] = one.first_offset

    def without(self, markers: Collection[int]) -> "Aborts":
        return Aborts(one for one in self._aborted if one.last_offset not in markers)

    def forget_before(self, offset: int) -> None:
        gone = bisect_left(self._aborted, Aborted(offset, -1, -1))
        del self._aborted[:gone], self._firsts[:gone]


NO_ABORTS = Aborts()
