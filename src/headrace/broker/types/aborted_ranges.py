"""The aborted transactions of one log: what nobody who reads it may be shown."""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple


class Aborted(NamedTuple):
    """Ordered by where the marker is, which is how the log meets them."""

    last_offset: int
    producer_id: int
    first_offset: int


class Aborts:
    """Found by the offsets that a reader has before it, however many there are: each read asks."""

    def __init__(self, aborted: Iterable[Aborted] = ()) -> None:
        self._aborted = list(aborted)
        # For each of them, the lowest first offset of it and of all behind it, so that these are in order, too.
        lowest = accumulate((one.first_offset for one in reversed(self._aborted)), min)
        self._firsts = list(lowest)[::-1]

    def __len__(self) -> int:
        return len(self._aborted)

    def __iter__(self) -> Iterator[Aborted]:
        return iter(self._aborted)

    def between(self, start: int, end: int) -> list[Aborted]:
        """Those with records in [start, end)."""
        first, behind = bisect_left(self._aborted, Aborted(start, -1, -1)), bisect_left(self._firsts, end)
        return [one for one in self._aborted[first:behind] if one.first_offset < end]

    def add(self, one: Aborted) -> None:
        """Nearly always the last, and all but those that were open beside it began before it."""
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
