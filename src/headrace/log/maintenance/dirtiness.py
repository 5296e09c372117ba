"""Whether a log is worth compacting: all of it is rewritten for what is new. The deed is in maintenance.py."""

from headrace.log.log import Log
from headrace.log.segments.segment import Segment
from headrace.record import codec


def is_due_now(log: Log, now_ms: int) -> bool:
    """ReadWaits when what has to be looked at is not in memory."""
    sealed = [segment for segment in log.segments if segment.is_sealed]
    dirty = _dirty(log, sealed, now_ms)
    if not dirty:
        return False
    total = sum(segment.size for segment in sealed)
    if sum(segment.size for segment in dirty) * 100 >= total * log.settings.compaction_dirty_percent:
        return True
    return log.settings.compaction_lag_max_ms >= 0 and _is_overdue_now(log, dirty[0], now_ms)


def _dirty(log: Log, sealed: list[Segment], now_ms: int) -> list[Segment]:
    # After a restart a rewritten segment is taken for a compacted one: at worst it waits for new ones.
    clean_until = log.compacted_until or max((s.next_offset for s in sealed if s.generation), default=0)
    hold = log.compaction_hold
    end = log.stable_end if hold is None else min(log.stable_end, hold)
    young_from_ms = now_ms - log.settings.compaction_lag_ms
    dirty: list[Segment] = []
    for segment in sealed:
        if segment.next_offset <= log.compacted_until:
            continue
        if segment.next_offset > end or (log.settings.compaction_lag_ms and segment.max_timestamp > young_from_ms):
            break  # compaction goes no further, so that what lies behind is no reason for one
        if segment.base >= clean_until and segment.size:
            dirty.append(segment)
    return dirty


def _is_overdue_now(log: Log, oldest: Segment, now_ms: int) -> bool:
    """By its first batch, as in Kafka. Those behind it are taken to be younger."""
    chunk = log.read_now(max(oldest.base, log.start_offset), 1)
    if not chunk.data:
        return False
    [first, *_] = codec.scan(chunk.data, verify_crc=False)
    return now_ms - first.max_timestamp > log.settings.compaction_lag_max_ms
