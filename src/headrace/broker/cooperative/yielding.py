"""Long looks in short turns: whoever goes through thousands of things lets others have the loop in between.

A listing of ten thousand queues takes a tenth of a second or more, and every publisher's confirm would wait as long.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import TypeVar

from headrace.clock import SystemClock

TURN_S = 0.001
REST_S = 0.001  # not 0: the log's thread gets the interpreter only while this one sleeps, and needs it to confirm
STEP = 32  # things between two looks at the clock
_now = SystemClock().monotonic  # not the loop's own time: that stands still within a turn
T = TypeVar("T")
R = TypeVar("R")


class YieldEvery:
    """One piece of work, in as many turns as it needs."""

    __slots__ = ("_began",)

    def __init__(self) -> None:
        self._began = _now()

    async def rest(self) -> None:
        """Others come first if this turn was long enough."""
        if _now() - self._began > TURN_S:
            await asyncio.sleep(REST_S)
            self._began = _now()

    async def map(self, function: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """As list(map(...)), for a sequence that nobody changes meanwhile."""
        found: list[R] = []
        for at in range(0, len(items), STEP):
            found += map(function, items[at : at + STEP])
            await self.rest()
        return found

    async def each(self, items: Iterable[T]) -> AsyncIterator[T]:
        """The items one by one. They may be made on the way, out of nothing that changes meanwhile."""
        for number, item in enumerate(items):
            yield item
            if number % STEP == STEP - 1:
                await self.rest()
