"""Helpers for a single event loop: yielding during long work, and changes that cannot be cancelled halfway.

Listing ten thousand queues takes a tenth of a second or more; without yielding, every publisher's confirm would wait as
long.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from headrace.clock import SystemClock

YIELD_EVERY_S = 0.001
PAUSE_S = 0.001  # not 0: the log's thread needs the GIL to confirm, and gets it only while this thread sleeps
STEP = 32  # items between two looks at the clock
_now = SystemClock().monotonic  # not the loop's time, which does not change within an iteration
T = TypeVar("T")
R = TypeVar("R")
Parameters = ParamSpec("Parameters")
_running: set["asyncio.Task[Any]"] = set()  # the event loop keeps only weak references


class YieldEvery:
    """Yields to the event loop about every millisecond while walking a large collection."""

    __slots__ = ("_began",)

    def __init__(self) -> None:
        self._began = _now()

    async def maybe_yield(self) -> None:
        """Yield if the last yield was more than YIELD_EVERY_S ago."""
        if _now() - self._began > YIELD_EVERY_S:
            await asyncio.sleep(PAUSE_S)
            self._began = _now()

    async def map(self, function: Callable[[T], R], items: Sequence[T], *, step: int = STEP) -> list[R]:
        """Like list(map(...)). The sequence must not change meanwhile. The clock is read after each `step` items."""
        found: list[R] = []
        for at in range(0, len(items), step):
            found += map(function, items[at : at + step])
            await self.maybe_yield()
        return found

    async def each(self, items: Iterable[T]) -> AsyncIterator[T]:
        """The items one by one. A generator must not depend on anything that changes meanwhile."""
        for number, item in enumerate(items):
            yield item
            if number % STEP == STEP - 1:
                await self.maybe_yield()


def uncancellable(change: Callable[Parameters, Coroutine[Any, Any, R]]) -> Callable[Parameters, Coroutine[Any, Any, R]]:
    """The change completes even if its caller is cancelled.

    A client can cancel its request, by closing the connection or by sending garbage, while the disk is written. Memory
    would then lack what is on disk: a removed user, for example, would stay until the next start.
    """

    @wraps(change)
    async def whole(*arguments: Parameters.args, **options: Parameters.kwargs) -> R:
        task = asyncio.ensure_future(change(*arguments, **options))
        _running.add(task)
        task.add_done_callback(_running.discard)
        return await asyncio.shield(task)

    return whole
