"""Replacing sealed segments of a log: by compaction, by archiving and restoring, and by files made outside the broker.

Only one job at a time changes a log's segments: `busy` holds the ids of the logs that one is working on.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress

from headrace.errors import DiskFull, HeadraceError
from headrace.log.commit.checkpoint import Checkpoints
from headrace.log.commit.round import Ticket
from headrace.log.disk import paths
from headrace.log.disk.file_cache import NO_FILES, FileCache
from headrace.log.disk.workers import Worker
from headrace.log.log import Log
from headrace.log.maintenance.compaction import ByKey, Filter, rewrite
from headrace.log.maintenance.jobs import CLEANER, BackgroundWorkers, ShardHealth
from headrace.log.maintenance.removal import SegmentRemoval
from headrace.log.segments.replacement import Rewritten
from headrace.log.segments.segment import Segment
from headrace.log.tier.archive import adopt_parquet, adopt_restored, parquet_path
from headrace.log.tier.sources import Archives

Done = Callable[[Rewritten | None, BaseException | None], object]


def _drop_all(_data: memoryview, _info: object) -> None:
    """The filter where `make` makes the replacement, and no filter is used."""


class SegmentRewrites:
    def __init__(
        self,
        files: FileCache,
        worker: Worker,
        checkpoints: Checkpoints,
        removal: SegmentRemoval,
        background: BackgroundWorkers,
        busy: set[int],
        health: ShardHealth,
    ) -> None:
        self._files = files
        self._worker = worker
        self._checkpoints = checkpoints
        self._removal = removal
        self._background = background
        self._busy = busy
        self._health = health

    def archive(self, archives: Archives, tier_root: str, log: Log, segment: Segment, done: Done) -> None:
        """Adopt the Parquet file that was written for a segment, under the temporary name of `parquet_path`. The
        segment's own files are removed when they are no longer leased. `done` receives None when the log is busy."""
        target = parquet_path(tier_root, segment)
        limit = log.settings.batch_bytes_max
        self.rewrite(
            log,
            [segment],
            _drop_all,
            done,
            make=lambda: adopt_parquet(
                self._files, archives, segment, target + paths.UNFINISHED, target, batch_bytes_max=limit
            ),
        )

    def restore(self, log: Log, segment: Segment, source: str, done: Done) -> None:
        """Adopt the file that `write_segment` has written for an archived segment. `done` as in `archive`."""
        interval = log.settings.index_interval
        self.rewrite(
            log, [segment], _drop_all, done, make=lambda: adopt_restored(self._files, segment, source, interval)
        )

    def rewrite(
        self,
        log: Log,
        segments: Sequence[Segment],
        keep: Filter | ByKey,
        done: Done,
        *,
        prepare: Callable[[], None] | None = None,
        make: Callable[[], Rewritten] | None = None,
        store_first: Callable[[], Ticket | None] = lambda: None,
        if_still: Callable[[], bool] = lambda: True,
    ) -> None:
        """Replace a run of sealed neighbours by one segment with the records that `keep` keeps, or by the result of
        `make`.

        `prepare` and `make` run on the cleaner thread. When the replacement is ready, on the owner thread,
        `store_first` returns the ticket of a change that must be durable before the replacement counts; after that
        `if_still` is asked whether it is still wanted, because a pin may have been set meanwhile.

        A checkpoint comes first: recovery must know the segments as synced, or it would look for dropped records in
        the journal. `done` receives None and no error when nothing was replaced because another job was faster.
        """
        if not segments or log.id in self._busy:
            done(None, None)
            return
        assert all(segment.is_sealed for segment in segments), "the active segment is never rewritten"
        self._busy.add(log.id)

        def work() -> Rewritten:
            if prepare is not None:
                prepare()
            if make is not None:
                return make()
            return rewrite(self._files, segments, keep, log.settings.index_interval)

        def made(rewritten: Rewritten | None, error: BaseException | None) -> None:
            if error is not None or rewritten is None:
                self._busy.discard(log.id)
                self._check_syncs()
                done(None, error)
                return
            try:
                ticket = store_first()
            except HeadraceError:
                put_in_place(rewritten, is_ready=False)
                return
            if ticket is None:
                put_in_place(rewritten, is_ready=True)
            else:
                ticket.add_callback(lambda ended: put_in_place(rewritten, is_ready=ended.error is None))

        def put_in_place(rewritten: Rewritten, *, is_ready: bool) -> None:
            wanted = is_ready and if_still()
            # On the worker, including the renaming: a pin that is set from now on is confirmed after it.
            self._worker.submit(
                lambda: self._swap(log, segments if wanted else (), rewritten),
                lambda gone, failed: self._swapped(log, gone, failed, rewritten, done),
            )

        def checkpointed(error: BaseException | None) -> None:
            # The round that sealed the last of them may have been refused since: then it is being written again.
            if error is None and all(segment.is_sealed for segment in segments):
                self._background.get(CLEANER).submit(work, made)
            else:
                made(None, error)

        self._checkpoints.include(log)  # the round that sealed the last of them may still be in progress
        self._checkpoints.run(done=checkpointed)

    def _check_syncs(self) -> None:
        """A rewrite may have failed because a file of a log, closed to make room for its own, could not be synced."""
        failure = self._files.failure
        if failure is not None:
            self._health.fail(failure)

    def _swap(self, log: Log, segments: Sequence[Segment], rewritten: Rewritten) -> list[Segment] | None:
        """Runs on the worker. Returns the replaced segments, or None when the replacement was given up: it is not
        wanted (no segments), or the log was deleted."""
        current = log.tail.segments
        if not segments or not set(current).issuperset(segments):
            # A pin was set, or retention has removed some of them: the old segments stay.
            self._give_up(rewritten)
            return None
        if rewritten.unnamed is not None and not self._name(log, rewritten.unnamed, rewritten):
            return None
        at = current.index(segments[0])
        log.tail.segments = (*current[:at], rewritten.segment, *current[at + len(segments) :])
        return list(segments)

    def _name(self, log: Log, unnamed: str, rewritten: Rewritten) -> bool:
        """Give the replacement its final name, durably; False when the log was deleted. A start uses whatever has the
        name, so a descriptor for the sync is reserved before the renaming: DiskFull when there is none."""
        files, folder = self._files, rewritten.segment.folder
        try:
            with files.folder_held(folder):
                files.disk.rename(unnamed, rewritten.segment.path())
                files.sync_folder(folder)
        except FileNotFoundError:
            if not log.is_deleted:
                raise
            return False
        except OSError as error:
            if error.errno not in NO_FILES:
                raise
            self._give_up(rewritten)
            raise DiskFull(f"no file descriptor is free to replace segments of log {log.id}") from error
        return True

    def _give_up(self, rewritten: Rewritten) -> None:
        """Remove the replacement's files at once: the next attempt uses the same names."""
        if rewritten.unnamed is not None:
            with suppress(FileNotFoundError):  # the log was deleted
                self._files.disk.unlink(rewritten.unnamed)
        self._removal.remove_files(rewritten.segment)

    def _swapped(
        self, log: Log, gone: list[Segment] | None, error: BaseException | None, rewritten: Rewritten, done: Done
    ) -> None:
        self._busy.discard(log.id)
        if error is None:
            self._removal.retire(log, gone or ())
        elif not isinstance(error, DiskFull):  # after which everything is as before
            self._health.fail(error)
        done(None if gone is None else rewritten, error)
