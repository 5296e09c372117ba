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


class Rates:
    """Keeps one sample per key. Keys are names, not objects, which would keep deleted queues in memory."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, ...], Sampled] = {}

    def of(self, key: tuple[str, ...], now_s: float, counters: Mapping[str, float]) -> dict[str, float]:
        last = self._samples.get(key)
        if last is None:
            if len(self._samples) >= SAMPLES_MAX:
                self._samples.clear()
            rates = dict.fromkeys(counters, 0.0)
        else:
            elapsed_s, before = now_s - last.at_s, last.counters
            if elapsed_s < SAMPLE_INTERVAL_S_MIN:
                return last.rates
            rates = {name: max(0.0, (value - before.get(name, value)) / elapsed_s) for name, value in counters.items()}
        self._samples[key] = Sampled(now_s, dict(counters), rates)
        return rates

    def change(
        self, key: tuple[str, ...], now_s: float, levels: Mapping[str, float]
    ) -> tuple[Sampled | None, dict[str, float]]:
        """The last sample, and the rates of numbers that may also fall."""
        last = self._samples.get(key)
        if last is not None and now_s - last.at_s < SAMPLE_INTERVAL_S_MIN:
            return last, last.rates
        if last is None:
            if len(self._samples) >= SAMPLES_MAX:
                self._samples.clear()
            rates = dict.fromkeys(levels, 0.0)
        else:
            elapsed_s = now_s - last.at_s
            rates = {name: (value - last.counters[name]) / elapsed_s for name, value in levels.items()}
        self._samples[key] = Sampled(now_s, dict(levels), rates)
        return last, rates
