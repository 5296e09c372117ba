"""Rates of counters that are only sampled when a client asks: the difference since the last sample, per second.

A module of its own, since `HttpContext` holds the rates and the rest of this package needs `HttpContext`.
"""

from collections.abc import Mapping
from typing import NamedTuple

SAMPLE_INTERVAL_S_MIN = 1.0  # closer requests get the same rate: a shorter interval is too noisy
SAMPLES_MAX = 50_000


class Sampled(NamedTuple):
    at_s: float
    counters: Mapping[str, float]
    rates: dict[str, float]
    levels: Mapping[str, float]
    before: tuple[float, Mapping[str, float]] | None  # when the sample before was taken, and its levels


class Rates:
    """Keeps one sample per key. Keys are names, not objects, which would keep deleted queues in memory."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, ...], Sampled] = {}

    def of(self, key: tuple[str, ...], now_s: float, counters: Mapping[str, float]) -> dict[str, float]:
        return self.sample(key, now_s, counters, {}).rates

    def sample(
        self, key: tuple[str, ...], now_s: float, counters: Mapping[str, float], levels: Mapping[str, float]
    ) -> Sampled:
        """With the rates of counters, and of levels, which may also fall. A counter that fell belongs to another object
        of the same name."""
        last = self._samples.get(key)
        if last is None:
            if len(self._samples) >= SAMPLES_MAX:
                self._samples.clear()
            rates = dict.fromkeys((*counters, *levels), 0.0)
            before = None
        else:
            elapsed_s = now_s - last.at_s
            if elapsed_s < SAMPLE_INTERVAL_S_MIN:
                return last
            known = last.counters
            rates = {name: max(0.0, (value - known.get(name, value)) / elapsed_s) for name, value in counters.items()}
            for name, value in levels.items():
                rates[name] = (value - last.levels.get(name, value)) / elapsed_s
            before = (last.at_s, last.levels) if levels else None
        found = self._samples[key] = Sampled(now_s, dict(counters), rates, dict(levels), before)
        return found
