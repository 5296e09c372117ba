"""Clocks. Components receive a Clock instead of calling `time`, so that tests can control it."""

import time
from typing import Protocol


class Clock(Protocol):
    def now_ms(self) -> int:
        """Wall clock in milliseconds since 1970. Used for record timestamps; may jump."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary point, never decreasing. Used for intervals and deadlines."""


class SystemClock:
    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that only moves when the test calls `advance` or `jump`."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self._now_ms = now_ms
        self._monotonic = 0.0

    def now_ms(self) -> int:
        return self._now_ms

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        self._now_ms += int(seconds * 1000)
        self._monotonic += seconds

    def jump(self, seconds: float) -> None:
        """Moves only the wall clock, as a wrong NTP step would."""
        self._now_ms += int(seconds * 1000)
