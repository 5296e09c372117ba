"""Key compaction of a log, in as many passes as its keys need."""

from collections.abc import Sequence

from headrace.clock import Clock
from headrace.errors import Conflict
from headrace.log.disk.file_cache import FileCache
from headrace.log.log import Log
from headrace.log.maintenance.abort_markers import AbortMarkers
from headrace.log.maintenance.compaction import LatestByKey
from headrace.log.maintenance.rewrites import Done, SegmentRewrites
from headrace.log.segments.replacement import Rewritten
from headrace.log.segments.segment import Segment

KEYS_MAX = 1_500_000  # keys that one pass holds in memory, in 50 MB


def runs_of(segments: Sequence[Segment], bytes_max: int) -> list[list[Segment]]:
    """Groups of neighbours to be rewritten as one segment, none larger than `bytes_max`: positions have 32 bits."""
    runs: list[list[Segment]] = []
    size = 0
    for segment in segments:
        size += segment.size
        if not runs or size > bytes_max:
            runs.append([])
            size = segment.size
        runs[-1].append(segment)
    return runs


class Compactor:
    def __init__(self, files: FileCache, rewrites: SegmentRewrites, aborts: AbortMarkers, clock: Clock) -> None:
        self._files = files
        self._rewrites = rewrites
        self._aborts = aborts
        self._clock = clock
        self.keys_max = KEYS_MAX

    def compact(self, log: Log, done: Done) -> None:
        """Keep the latest record of each key in the sealed segments. `done` receives the total gain, None when nothing
        is sealed; Conflict when another job was working on the log.

        A pass learns as many keys as fit into memory, from where the pass before it ended, and also rewrites the
        segments before them."""

        def next_pass(earlier: Rewritten | None) -> None:
            def ended(gained: Rewritten | None, error: BaseException | None) -> None:
                gained = gained.made_of(earlier) if gained else earlier
                # Without progress there is no further pass: a pin may hold the records that come next.
                has_more = keep.is_full and error is None and log.compacted_until > start
                next_pass(gained) if has_more else done(gained, error)

            start, keep = log.compacted_until, self._latest_by_key(log)
            self._run_pass(log, keep, ended)

        next_pass(None)

    def _latest_by_key(self, log: Log) -> LatestByKey:
        return LatestByKey(
            self._clock.now_ms(),
            start=log.compacted_until,
            lag_ms=log.settings.compaction_lag_ms,
            tombstone_ms=log.settings.tombstone_retention_ms,
            keys_max=self.keys_max,
            hold=log.compaction_pin,
            aborts_before=self._aborts.removable_before(log),
        )

    def _run_pass(self, log: Log, keep: LatestByKey, done: Done) -> None:
        sealed = [s for s in log.segments if s.is_sealed and s.next_offset <= log.durable_end]
        runs = runs_of(sealed, log.settings.segment_size)
        has_learnt = False

        def learn() -> None:
            nonlocal has_learnt
            has_learnt = True
            keep.learn(self._files, sealed, log.stable_end)

        def rewrite_next(gained: Rewritten | None, error: BaseException | None) -> None:
            if error is not None:
                done(gained, error)
                return
            if not runs or (has_learnt and runs[0][0].base >= keep.until):  # everything from here on is kept
                log.compacted_until = max(log.compacted_until, keep.until)
                self._aborts.record_pass(log, keep)
                done(gained, None)
                return

            def rewritten(more: Rewritten | None, failed: BaseException | None) -> None:
                if isinstance(failed, FileNotFoundError) and any(segment.is_retired for segment in sealed):
                    failed = None  # retention was faster
                if more is None and failed is None:
                    # Stop here: a tombstone, say, may only be dropped after the older records of its key.
                    failed = Conflict(f"log {log.id} is being written or rewritten: try again")
                rewrite_next(more.added_to(gained) if more else gained, failed)

            def is_unpinned() -> bool:
                hold = log.compaction_pin
                return hold is None or hold >= keep.until

            self._rewrites.rewrite(
                log,
                runs.pop(0),
                keep,
                rewritten,
                prepare=None if has_learnt else learn,
                store_first=lambda: self._aborts.forget_dropped(log, keep.take_aborts_gone()),
                if_still=is_unpinned,
            )

        rewrite_next(None, None)
