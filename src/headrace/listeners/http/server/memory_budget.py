"""Bounds the bytes of request and response bodies that the HTTP listener holds in memory."""

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.errors import Overloaded
from headrace.listeners.common.per_source_limit import SOURCE_PART


class Budget:
    """Bytes that all requests and responses together may hold in memory.

    One source address cannot use up the budget, so a slow or hostile client only delays clients of its own address.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.used = 0
        self._by_source: dict[str, int] = {}

    @contextmanager
    def share(self, source: str) -> Iterator["BudgetShare"]:
        share = BudgetShare(self, source)
        try:
            yield share
        finally:
            share.release()

    def has_room(self, source: str, size: int, own: int) -> bool:
        """Whether `size` more bytes fit. `own` bytes of those in use belong to the caller: a request that is the only
        user of the budget may exceed it, or the largest requests could never be served."""
        used_by_source = self._by_source.get(source, 0)
        if used_by_source > own and used_by_source + size > self.bytes_max * SOURCE_PART:
            return False
        return self.used <= own or self.used + size <= self.bytes_max

    def add(self, source: str, size: int) -> None:
        """Account for `size` bytes, which may be negative."""
        self.used += size
        used_by_source = self._by_source.get(source, 0) + size
        if used_by_source:
            self._by_source[source] = used_by_source
        else:
            self._by_source.pop(source, None)


class BudgetShare:
    """The part of the budget that one request holds; released when the request ends."""

    __slots__ = ("_budget", "_source", "held")

    def __init__(self, budget: Budget, source: str) -> None:
        self._budget = budget
        self._source = source
        self.held = 0

    def check(self, size: int, own: int = 0) -> None:
        if not self._budget.has_room(self._source, size, own):
            raise Overloaded("too many bytes of requests and responses are in memory; try again in a moment")

    def take(self, size: int) -> None:
        self.check(size)
        self._add(size)

    def take_chunk(self, size: int) -> None:
        """Take more for a body that was admitted: the bytes it already holds do not count against it."""
        self.check(size, self.held)
        self._add(size)

    def _add(self, size: int) -> None:
        self._budget.add(self._source, size)
        self.held += size

    def release(self) -> int:
        """Release everything, possibly before the request ends; returns how many bytes were held."""
        size, self.held = self.held, 0
        if size:
            self._budget.add(self._source, -size)
        return size
