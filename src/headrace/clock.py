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


START_GRACE_S = 3600.0  # enough for a wall clock that was wrong when the machine started to be corrected


class ExpiryClock:
    """Decides whether stored values have expired, carefully: what it expires is gone for good, and wall clocks jump.

    Its time is never ahead of the wall clock, nor of the time that has passed since it was made, so a jump forward
    expires nothing. How long the process was not running is unknown if the wall clock is wrong: values from before the
    start are kept for the first hour.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock  # the wall clock, for the times that are stored
        self._started_ms = clock.now_ms()
        self._started = clock.monotonic()

    def now_ms(self) -> int:
        return min(self.clock.now_ms(), self._started_ms + self._running_ms)

    @property
    def _running_ms(self) -> int:
        return int((self.clock.monotonic() - self._started) * 1000)

    def is_past(self, since_ms: int, age_ms: int) -> bool:
        """Whether a value that was last used at `since_ms`, by the wall clock, is older than `age_ms`."""
        is_stored = since_ms < self._started_ms and self._running_ms < START_GRACE_S * 1000
        return not is_stored and self.now_ms() - since_ms > age_ms


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
