"""Counters of a shard: plain numbers that the metrics endpoint reads."""

from bisect import bisect_left
from dataclasses import dataclass, field

SYNC_BUCKETS_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
ROUND_BUCKETS = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000, 25_000, 100_000)


@dataclass(slots=True)
class Histogram:
    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        self.total += value
        self.counts[bisect_left(self.bounds, value)] += 1

    @property
    def count(self) -> int:
        return sum(self.counts)


@dataclass(slots=True)
class Counters:
    bytes_written: int = 0
    records_written: int = 0
    bytes_read: int = 0
    records_read: int = 0
    cold_reads: int = 0
    tier_reads: int = 0
    rounds: int = 0
    syncs: int = 0
    checkpoints: int = 0
    segments_created: int = 0
    segments_deleted: int = 0
    index_lookups: int = 0
    indexes_rebuilt: int = 0
    crc_failures: int = 0
    refused_full: int = 0
    sync_s: Histogram = field(default_factory=lambda: Histogram(SYNC_BUCKETS_S))
    round_records: Histogram = field(default_factory=lambda: Histogram(ROUND_BUCKETS))
