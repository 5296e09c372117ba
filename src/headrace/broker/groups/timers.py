"""Timers of groups: a small interface, so that tests control time, and timers that tolerate a stalled process."""

from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    def cancel(self) -> object: ...


class Timers(Protocol):
    def call_later(self, delay: float, callback: Callable[[], object], /) -> Timer:
        """Call back on the event loop's thread after `delay` seconds, as asyncio does."""


class Loop(Timers, Protocol):
    def time(self) -> float: ...


LATE_S = 1.0  # a timer this late was not delayed by work: the process or the machine was stopped
FORGIVEN_S = 1.0  # enough to read the requests that arrived meanwhile, and for clients to send delayed ones


class ForgivingTimers:
    """The event loop's timers, except that a timer which is late because the process was stopped fires a moment later.

    After a stop, the event loop runs its timers before it reads from sockets, so it would take its own pause for the
    silence of every member.
    """

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
