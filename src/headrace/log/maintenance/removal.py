"""Removing the files of segments that have left their log.

A segment leaves its log by retention, deletion of records or rewriting; it is then *retired*. Its files stay as long
as a reader has leased it.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from headrace.clock import Clock
from headrace.errors import SegmentGone
from headrace.log.counters import Counters
from headrace.log.disk.file_cache import FileCache
from headrace.log.log import Log
from headrace.log.maintenance.jobs import REMOVER, BackgroundWorkers, ShardHealth
from headrace.log.read.leases import Leases
from headrace.log.segments.index_cache import IndexCache
from headrace.log.segments.segment import Segment


class Retired(NamedTuple):
    log_id: int
    segment: Segment


class SegmentRemoval:
    """The retired segments of a shard. Owner thread only."""

    def __init__(
        self,
        files: FileCache,
        index_cache: IndexCache,
        leases: Leases,
        logs: Mapping[int, Log],
        background: BackgroundWorkers,
        health: ShardHealth,
        *,
        clock: Clock,
        counters: Counters,
    ) -> None:
        self._files = files
        self._index_cache = index_cache
        self._leases = leases
        self._logs = logs
        self._background = background
        self._health = health
        self._clock = clock
        self._counters = counters
        self._retired: list[Retired] = []
        self._removing: Counter[int] = Counter()  # log id -> number of its segments whose files are being removed

    def retire(self, log: Log, segments: Sequence[Segment]) -> None:
        """Segments have left their log: remove their files as soon as no reader has leased them."""
        for segment in segments:
            segment.is_retired = True
            self._retired.append(Retired(log.id, segment))
            self._counters.segments_deleted += 1
        self.sweep()

    def retired_of(self, log: Log) -> list[Segment]:
        """Segments that left the log and whose files are still there."""
        return [segment for log_id, segment in self._retired if log_id == log.id]

    def removed(self, segments: Sequence[Segment]) -> None:
        """A truncation has removed these files, even if they were leased: their names may be reused."""
        gone = set(segments)
        self._retired = [retired for retired in self._retired if retired.segment not in gone]
        for segment in segments:
            self._index_cache.drop(segment)
            segment.is_retired = segment.is_deleted = True
            self._counters.segments_deleted += 1

    def planned_segment(self, log: Log, base: int, generation: int) -> tuple[Segment, bool]:
        """The segment that a reader has planned to read, and whether it is leased. A leased segment may have left its
        log; without a lease it must still be part of it. SegmentGone otherwise."""
        leased = self._leases.segment((log.id, base, generation), self._clock.monotonic())
        found = leased or next((s for s in log.segments if s.base == base and s.generation == generation), None)
        if found is None or found.is_deleted:
            raise SegmentGone(
                f"generation {generation} of segment {base} of log {log.id} is gone: it was removed or rewritten, "
                "and no lease keeps it"
            )
        return found, leased is not None

    def sweep(self) -> None:
        """Remove the files of retired segments that are not leased, on a thread of its own: removing a large file
        takes as long as many rounds, and would delay every confirm."""
        leased = self._leases.held(self._clock.monotonic())
        free: list[Retired] = []
        kept: list[Retired] = []
        for retired in self._retired:
            log_id, segment = retired
            log = self._logs.get(log_id)
            is_truncated = log is not None and log.is_frozen  # the truncation removes files itself
            is_kept = is_truncated or (log_id, segment.base, segment.generation) in leased
            (kept if is_kept else free).append(retired)
        if not free or self._health.is_closed:
            return
        self._retired = kept
        for log_id, segment in free:
            self._index_cache.drop(segment)
            segment.is_deleted = True
            self._removing[log_id] += 1
        self._background.get(REMOVER).submit(lambda: self._remove_all(free), partial(self._swept, free))

    def is_removing(self, log: Log) -> bool:
        """Whether files of the log are being removed at the moment, so that their names must not be reused yet."""
        return self._removing[log.id] > 0

    def _remove_all(self, retired: list[Retired]) -> list[Retired]:
        """Returns the segments whose storage could not be changed at the moment."""
        return [one for one in retired if not self.remove_files(one.segment)]

    def remove_files(self, segment: Segment) -> bool:
        """Remove a segment's files, on any thread. False when its storage cannot be changed at the moment."""
        self._files.forget(segment.paths)
        segment.source.evict()
        is_removed = segment.source.remove(self._files.disk, segment)
        self._files.folder_changed(segment.folder)
        return is_removed

    def _swept(self, swept: list[Retired], left: list[Retired] | None, error: BaseException | None) -> None:
        self._removing -= Counter(log_id for log_id, _ in swept)
        self._retired += left or ()
        if error is not None:
            self._health.fail(error)
