"""Holding what bulk readers plan to read: named segments, or whatever offsets lie in right now.

Nothing is waited for between looking and holding, so what was found cannot go in between.
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


def hold_named(shard: Shard, keys: Iterable[Key], for_ms: int, holder: str | None) -> list[Key]:
    """Those that are not there any more; the others are held."""
    now_ms, leases = shard.clock.now_ms(), shard.maintenance.leases
    known: dict[int, dict[Key, Segment]] = {}
    found: dict[Key, Segment] = {}
    gone = []
    for key in keys:
        log_id = key[0]
        if log_id not in known:
            log = shard.logs.get(log_id)
            known[log_id] = {} if log is None else {(log_id, s.base, s.generation): s for s in log.segments}
        segment = known[log_id].get(key) or leases.segment(key, now_ms)
        if segment is None:
            gone.append(key)
        else:
            found[key] = segment
    leases.take(found, now_ms + for_ms, holder)
    return gone


def hold_ranges(
    shard: Shard, ranges: Sequence[tuple[Partition, int, int]], for_ms: int, holder: str | None
) -> list[list[Planned]]:
    """For every range of offsets, the segments they lie in, all of them held."""
    found: dict[Key, Segment] = {}
    plans = []
    for partition, start, end in ranges:
        log = partition.log
        end = min(end, log.visible_end)
        inside = [s for s in log.segments if s.size and s.base < end and s.next_offset > start]
        found |= {(log.id, s.base, s.generation): s for s in inside}
        if len(found) > SEGMENTS_MAX:
            raise LimitReached(f"a lease holds at most {SEGMENTS_MAX:,} segments")
        plans.append([Planned(s.base, s.generation, min(s.next_offset, log.visible_end)) for s in inside])
    shard.maintenance.leases.take(found, shard.clock.now_ms() + for_ms, holder)
    return plans
