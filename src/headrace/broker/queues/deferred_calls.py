"""Calls postponed to the next event-loop iteration, so that long work leaves room for other work."""

import asyncio
from collections.abc import Callable


class DeferredCalls:
    """Calls each function once in the next iteration, however often that was requested."""

    __slots__ = ("_loop", "pending")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.pending: list[Callable[[], object]] = []

    def call_soon(self, function: Callable[[], object]) -> None:
        if function not in self.pending:
            self.pending.append(function)
            self._loop.call_soon(self._call, function)

    def _call(self, function: Callable[[], object]) -> None:
        self.pending.remove(function)
        function()
