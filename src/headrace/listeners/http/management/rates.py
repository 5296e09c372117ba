"""Rates of counters that nobody watches between two looks: the difference since the last look, by the time."""

from collections.abc import Mapping

LOOK_S_MIN = 1.0  # looks that follow closer share one rate: a short moment says little
SEEN_MAX = 50_000


class Rates:
    """By names, not by what has them: a queue that is gone would be kept, with all that is in it."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, ...], tuple[float, Mapping[str, float], dict[str, float]]] = {}

    def of(self, key: tuple[str, ...], now_s: float, counters: Mapping[str, float]) -> dict[str, float]:
        seen = self._seen.get(key)
        if seen is None:
            if len(self._seen) >= SEEN_MAX:
                self._seen.clear()
            rates = dict.fromkeys(counters, 0.0)
            self._seen[key] = (now_s, dict(counters), rates)
            return rates
        then_s, before, rates = seen
        passed = now_s - then_s
        if passed < LOOK_S_MIN:
            return rates
        rates = {name: max(0.0, (value - before.get(name, value)) / passed) for name, value in counters.items()}
        self._seen[key] = (now_s, dict(counters), rates)
        return rates
