"""What a group needs of an event loop, so that tests can hold time still; and that loop, made to forgive a pause."""

from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> object: ...


class Timers(Protocol):
    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        """As asyncio's loop does it: callback on the owner thread after delay seconds."""


class Loop(Timers, Protocol):
    def time(self) -> float: ...


LATE_S = 1.0  # a timer that fires so late was not kept from it by work: the process, or the machine, stood still
FORGIVEN_S = 1.0  # enough for what clients said meanwhile to be read, and for what they could not send to come


class ForgivingTimers:
    """The loop's, save that those which fire late because we stood still fire a moment later. A loop that goes on runs
    its timers before it reads a byte, and would take its own pause for the silence of every member."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        return _Forgiving(self._loop, delay, callback)


class _Forgiving:
    __slots__ = ("_callback", "_due", "_loop", "_timer")

    def __init__(self, loop: Loop, delay: float, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._callback = callback
        self._due = loop.time() + delay
        self._timer = loop.call_later(delay, self._fire)

    def _fire(self) -> None:
        if self._loop.time() - self._due > LATE_S:
            self._timer = self._loop.call_later(FORGIVEN_S, self._callback)
        else:
            self._callback()

    def cancel(self) -> None:
        self._timer.cancel()
