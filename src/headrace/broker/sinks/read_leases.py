"""Read leases for bulk readers such as Spark: retention and compaction keep the leased segments for a while.

Nothing is awaited between looking a segment up and leasing it, so a segment that was found cannot disappear in
between.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headrace.broker.streams.partition import Partition
from headrace.errors import LimitReached
from headrace.log.read.leases import Key
from headrace.log.segments.segment import Segment
from headrace.log.shard import Shard

SEGMENTS_MAX = 100_000


class Planned(NamedTuple):
    """Offsets [segment, next_offset) are in this generation of that segment."""

    segment: int
    generation: int
    next_offset: int


class ReadLeases:
    """A holder's new lease replaces its previous one."""

    def __init__(self, shard: Shard) -> None:
        self._shard = shard

    def hold_segments(self, keys: Iterable[Key], for_ms: int, holder: str | None) -> list[Key]:
        """Lease the named segments; returns those that no longer exist."""
        now_s, leases = self._shard.clock.monotonic(), self._shard.maintenance.leases
        known: dict[int, dict[Key, Segment]] = {}
        found: dict[Key, Segment] = {}
        gone = []
        for key in keys:
            log_id = key[0]
            if log_id not in known:
                log = self._shard.logs.get(log_id)
                known[log_id] = {} if log is None else {(log_id, s.base, s.generation): s for s in log.segments}
            segment = known[log_id].get(key) or leases.segment(key, now_s)
            if segment is None:
                gone.append(key)
            else:
                found[key] = segment
        leases.take(found, now_s + for_ms / 1000, holder)
        return gone

    def hold_ranges(
        self, ranges: Sequence[tuple[Partition, int, int]], for_ms: int, holder: str | None
    ) -> list[list[Planned]]:
        """Lease the segments that hold the offset ranges; returns them for each range."""
        found: dict[Key, Segment] = {}
        plans = []
        for partition, start, end in ranges:
            log = partition.log
            end = min(end, log.visible_end)
            inside = [s for s in log.segments if s.size and s.base < end and s.next_offset > start]
            found |= {(log.id, s.base, s.generation): s for s in inside}
            if len(found) > SEGMENTS_MAX:
                raise LimitReached(f"a lease can hold at most {SEGMENTS_MAX:,} segments")
            plans.append([Planned(s.base, s.generation, min(s.next_offset, log.visible_end)) for s in inside])
        self._shard.maintenance.leases.take(found, self._shard.clock.monotonic() + for_ms / 1000, holder)
        return plans
