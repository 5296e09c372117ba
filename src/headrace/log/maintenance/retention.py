"""Retention: which segments may be removed. Decisions only; log_start.py carries them out."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from headrace.log.segments.segment import Segment
from headrace.log.settings import StreamSettings


@dataclass(frozen=True, slots=True)
class RetentionLimits:
    age_ms_max: int  # -1 = none
    bytes_max: int  # -1 = none
    hold: int | None  # the lowest pinned offset

    @classmethod
    def of(cls, settings: StreamSettings, holds: Iterable[int]) -> "RetentionLimits":
        if settings.cleanup_policy == "compact":
            return cls(-1, -1, min(holds, default=None))
        return cls(settings.retention_ms, settings.retention_bytes, min(holds, default=None))


def new_start(
    segments: Sequence[Segment],
    limits: RetentionLimits,
    start: int,
    end: int,
    now_ms: int,
    *,
    last_ms: Callable[[Segment], int] = lambda segment: segment.max_timestamp,
) -> int:
    """The new start of a log: whole segments are dropped, oldest first, but never one that a pin needs.

    The last segment is dropped only by age, when all of its records are too old; it is sealed first.
    """
    bytes_kept = sum(segment.stored_bytes for segment in segments)
    for at, segment in enumerate(segments):
        last = at == len(segments) - 1
        if segment.records:
            too_old = limits.age_ms_max >= 0 and now_ms - last_ms(segment) > limits.age_ms_max
        else:
            too_old = limits.age_ms_max >= 0 and not last  # compacted to nothing: it must not keep later segments
        too_big = limits.bytes_max >= 0 and bytes_kept > limits.bytes_max and not last
        if not (too_old or too_big):
            break  # a later segment can only be younger
        after = end if last else segments[at + 1].base
        if after > end or (limits.hold is not None and limits.hold < after):
            break
        start = max(start, after)
        bytes_kept -= segment.stored_bytes
    return start
