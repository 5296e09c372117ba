"""Maintenance of a shard's logs: retention and deletion of records, compaction, archiving, truncation, log deletion.

Every change is durable as an intention before a file is touched, so that the next start finishes it after a crash and
never takes it for damage. The parts are in the other modules of this package; this one puts them together.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from headrace.clock import Clock
from headrace.errors import StorageError
from headrace.log.commit.atomic_group import AtomicGroup
from headrace.log.commit.checkpoint import Checkpoints
from headrace.log.commit.committer import Committer
from headrace.log.commit.slots import Slots
from headrace.log.counters import Counters
from headrace.log.disk.file_cache import FileCache
from headrace.log.disk.workers import Post, SerialExecutor, Worker
from headrace.log.log import Log
from headrace.log.maintenance.abort_markers import AbortMarkers
from headrace.log.maintenance.compaction import ByKey, Filter
from headrace.log.maintenance.compactor import Compactor
from headrace.log.maintenance.deletion import LogDeletion
from headrace.log.maintenance.jobs import BackgroundWorkers, Retries
from headrace.log.maintenance.log_start import StartOffsets
from headrace.log.maintenance.removal import SegmentRemoval
from headrace.log.maintenance.rewrites import Done, SegmentRewrites
from headrace.log.maintenance.truncate import Truncations
from headrace.log.read.leases import Leases
from headrace.log.segments.index_cache import IndexCache
from headrace.log.segments.replacement import Rewritten
from headrace.log.segments.segment import Segment
from headrace.log.state.store import StateStore
from headrace.log.tier.sources import Archives


class MaintainedShard(Protocol):
    """What maintenance uses of a shard; each part receives only its own collaborators."""

    @property
    def clock(self) -> Clock: ...
    @property
    def counters(self) -> Counters: ...
    @property
    def files(self) -> FileCache: ...
    @property
    def archives(self) -> Archives: ...
    @property
    def tier_root(self) -> str: ...
    @property
    def index_cache(self) -> IndexCache: ...
    @property
    def logs(self) -> dict[int, Log]: ...
    @property
    def state(self) -> StateStore: ...
    @property
    def slots(self) -> Slots: ...
    @property
    def committer(self) -> Committer: ...
    @property
    def checkpoints(self) -> Checkpoints: ...
    @property
    def worker(self) -> SerialExecutor: ...
    @property
    def keeper(self) -> Worker: ...
    @property
    def post(self) -> Post: ...
    @property
    def failure(self) -> StorageError | None: ...
    @property
    def is_closed(self) -> bool: ...
    def fail(self, error: BaseException) -> None: ...
    def group(self) -> AtomicGroup: ...


class Maintenance:
    def __init__(self, shard: MaintainedShard) -> None:
        files, worker, group, clock = shard.files, shard.worker, shard.group, shard.clock
        self._archives, self._tier_root = shard.archives, shard.tier_root
        self._background = BackgroundWorkers(shard.keeper, shard.post)
        self._retries = Retries()
        self.busy: set[int] = set()  # ids of the logs that are being rewritten or truncated
        self.leases = Leases()
        self.removal = SegmentRemoval(
            files,
            shard.index_cache,
            self.leases,
            shard.logs,
            self._background,
            shard,
            clock=clock,
            counters=shard.counters,
        )
        self.starts = StartOffsets(files.disk, worker, shard.committer, group, self.removal, self._retries, shard)
        self.truncations = Truncations(
            files,
            worker,
            shard.checkpoints,
            shard.committer,
            shard.slots,
            group,
            self.removal,
            self._retries,
            self.busy,
            shard,
        )
        self.aborts = AbortMarkers(shard.state, group, clock)
        self.rewrites = SegmentRewrites(
            files, worker, shard.checkpoints, self.removal, self._background, self.busy, shard
        )
        self.compactor = Compactor(files, self.rewrites, self.aborts, clock)
        self._deletion = LogDeletion(
            files, worker, shard.slots, group, self._background, shard, tier_root=shard.tier_root
        )

    def compact(self, log: Log, done: Done) -> None:
        self.compactor.compact(log, done)

    def archive(self, log: Log, segment: Segment, done: Done) -> None:
        self.rewrites.archive(self._archives, self._tier_root, log, segment, done)

    def restore(self, log: Log, segment: Segment, source: str, done: Done) -> None:
        self.rewrites.restore(log, segment, source, done)

    def rewrite_segments(
        self,
        log: Log,
        segments: Sequence[Segment],
        keep: Filter | ByKey,
        done: Done,
        *,
        make: Callable[[], Rewritten] | None = None,
        if_still: Callable[[], bool] = lambda: True,
    ) -> None:
        self.rewrites.rewrite(log, segments, keep, done, make=make, if_still=if_still)

    def planned_segment(self, log: Log, base: int, generation: int) -> tuple[Segment, bool]:
        return self.removal.planned_segment(log, base, generation)

    def sweep(self) -> None:
        self.removal.sweep()

    def delete_files(self, log: Log) -> None:
        self._deletion.delete(log)

    def tick(self) -> None:
        self._retries.run()

    def close(self) -> None:
        self._background.close()
