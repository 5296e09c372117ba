"""What happens to a log besides appends and reads: deletion, compaction, retention (starts.py says how far), and
truncation (truncations.py).

Each is durable as an intention before a file is touched, so that a crash in the middle is finished by the next start
and can never be taken for damage.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from headrace.errors import Conflict, DiskFull, HeadraceError, SegmentGone
from headrace.log.commit.round import Ticket
from headrace.log.disk import paths
from headrace.log.disk.file_cache import NO_FILES, NO_ROOM
from headrace.log.disk.workers import InlineWorker, ThreadWorker, Worker
from headrace.log.log import Log
from headrace.log.maintenance import abort_markers
from headrace.log.maintenance.abort_markers import Aborts
from headrace.log.maintenance.compaction import ByKey, Filter, LatestByKey, Rewritten, rewrite
from headrace.log.maintenance.log_start import StartOffsets
from headrace.log.maintenance.truncate_requests import TruncateRequests
from headrace.log.read.leases import Leases
from headrace.log.segments import epochs
from headrace.log.segments.segment import Segment
from headrace.log.state.tables import ENDS, STARTS, TRUNCATIONS
from headrace.log.tier.archive import remove_archived, remove_file

if TYPE_CHECKING:
    from headrace.log.shard import Shard

CLEANER, REMOVER = "headrace-cleaner", "headrace-remover"
KEYS_MAX = 1_500_000  # keys one pass of compaction holds in memory, in 50 MB


def runs_of(segments: Sequence[Segment], bytes_max: int) -> list[list[Segment]]:
    """Neighbours to be rewritten as one: no more of them than make a full segment, as positions have 32 bits."""
    runs: list[list[Segment]] = []
    size = 0
    for segment in segments:
        size += segment.size
        if not runs or size > bytes_max:
            runs.append([])
            size = segment.size
        runs[-1].append(segment)
    return runs


class Maintenance:
    def __init__(self, shard: "Shard") -> None:
        self._shard = shard
        self._workers: dict[str, ThreadWorker] = {}
        self.busy: set[int] = set()  # logs being compacted or truncated
        self.truncations = TruncateRequests(shard, self)
        self.starts = StartOffsets(shard, self)
        self.apply_retention, self.delete_before = self.starts.apply_retention, self.starts.delete_before
        self.leases = Leases()
        self.aborts = Aborts(shard)
        self.keys_max = KEYS_MAX
        self._delayed: list[Callable[[], None]] = []
        self._graves: list[tuple[int, Segment]] = []  # removed from their log, files still leased
        self._leaving: Counter[int] = Counter()  # log -> how many of its segments are being removed

    # Retention.

    def drop_before(self, log: Log, offset: int) -> None:
        """The start is durable: have it count, and let go of the segments wholly before it."""
        if log.is_closed:
            return
        log.start_offset = max(log.start_offset, offset)

        def drop() -> tuple[list[Segment], bool]:
            tail = log.tail
            has_room = True
            if tail.segments and offset >= tail.next_offset and tail.writer is not None and tail.writer.position:
                try:
                    tail.roll(tail.next_offset)  # even the last one is too old: it goes, its end stays known
                except OSError as error:
                    if error.errno not in NO_ROOM + NO_FILES:
                        raise
                    has_room = False
            gone = [
                s for s, following in zip(tail.segments, tail.segments[1:], strict=False) if following.base <= offset
            ]
            tail.segments = tail.segments[len(gone) :]
            self._shard.committer.publish_ends(log)
            return gone, has_room

        def dropped(result: tuple[list[Segment], bool] | None, error: BaseException | None) -> None:
            gone, has_room = result or ([], True)
            if not has_room:  # a full disk needs retention most of all: what can go without a new file is gone
                self.delay(lambda: self.drop_before(log, offset))
            self.bury(log, gone, error)

        self._shard.worker.submit(drop, dropped)

    def bury(self, log: Log, gone: list[Segment] | None, error: BaseException | None) -> None:
        if error is not None:
            self._shard.fail(error)
            return
        for segment in gone or ():
            segment.is_buried = True
            self._graves.append((log.id, segment))
            self._shard.counters.segments_deleted += 1
        self.sweep()

    def replaced_of(self, log: Log) -> list[Segment]:
        """What left the log, and is kept for those who read it."""
        return [segment for log_id, segment in self._graves if log_id == log.id]

    def forget(self, log: Log, gone: list[Segment]) -> None:
        """Their files are removed, whoever held them: another segment may have such a name next."""
        removed = set(gone)
        self._graves = [grave for grave in self._graves if grave[1] not in removed]
        for segment in gone:
            self._shard.index_cache.drop(segment)
            segment.is_buried = segment.is_deleted = True
            self._shard.counters.segments_deleted += 1

    def planned_segment(self, log: Log, base: int, generation: int) -> tuple[Segment, bool]:
        """A segment as somebody planned on it, and whether it is held. One that is held may have left its log; what
        nobody holds is there only as long as the log has it. SegmentGone otherwise."""
        held = self.leases.segment((log.id, base, generation), self._shard.clock.now_ms())
        found = held or next((s for s in log.segments if s.base == base and s.generation == generation), None)
        if found is None or found.is_deleted:
            raise SegmentGone(
                f"segment {base} of log {log.id} is gone in generation {generation}: it was removed or rewritten, "
                "and nobody holds it (any more)"
            )
        return found, held is not None

    def sweep(self) -> None:
        """Remove the files of buried segments that nobody holds any more. Not in the worker's lane: to remove a large
        file takes as long as many rounds, and all who wait for a confirm would wait for it."""
        held = self.leases.held(self._shard.clock.now_ms())
        free: list[tuple[int, Segment]] = []
        kept: list[tuple[int, Segment]] = []
        for log_id, segment in self._graves:
            log = self._shard.logs.get(log_id)
            is_cut = log is not None and log.is_frozen  # by a truncation, which removes what it has to
            is_held = is_cut or (log_id, segment.base, segment.generation) in held
            (kept if is_held else free).append((log_id, segment))
        if not free or self._shard.is_closed:
            return
        self._graves = kept
        for log_id, segment in free:
            self._shard.index_cache.drop(segment)
            segment.is_deleted = True
            self._leaving[log_id] += 1
        self._worker(REMOVER).submit(lambda: self._unlink(free), partial(self._swept, free))

    def is_leaving(self, log: Log) -> bool:
        """Files of it are just being removed: nothing else may take their names yet."""
        return self._leaving[log.id] > 0

    def _unlink(self, graves: list[tuple[int, Segment]]) -> list[tuple[int, Segment]]:
        """Those whose files in the tier could not be removed yet."""
        files = self._shard.files
        left = []
        for log_id, segment in graves:
            files.forget(segment.paths)
            for path in segment.paths:
                if segment.tier is not None and path == segment.tier.path:
                    if not remove_file(files.disk, path):
                        left.append((log_id, segment))
                else:
                    with suppress(FileNotFoundError):  # not every segment has every kind
                        files.disk.unlink(path)
            files.folder_changed(segment.folder)
        return left

    def _swept(
        self, swept: list[tuple[int, Segment]], left: list[tuple[int, Segment]] | None, error: BaseException | None
    ) -> None:
        self._leaving -= Counter(log_id for log_id, _ in swept)
        self._graves += left or ()
        self._checked(None, error)

    def _checked(self, _result: object, error: BaseException | None) -> None:
        if error is not None:
            self._shard.fail(error)

    # Deletion.

    def delete_files(self, log: Log) -> None:
        """The folder gets a name that says it is to go, then goes; what a crash leaves, the next start removes."""
        files, folder = self._shard.files, log.tail.folder
        doomed = folder + paths.DELETED

        def rename() -> list[str] | None:
            self._clear_slot(log)
            if not files.disk.exists(folder):
                return None
            files.disk.rename(folder, doomed)
            files.folder_changed(folder.rpartition("/")[0])
            # Listed by its new name, under which a compaction that still runs adds nothing any more.
            try:
                names = files.listdir(doomed)
            except OSError as error:
                if error.errno not in NO_FILES:
                    raise
                return None  # the next start removes it
            files.forget([f"{folder}/{name}" for name in names])
            return names

        def remove(names: list[str]) -> None:
            if not remove_archived(files.disk, self._shard.tier_root, doomed):
                return  # the next start tries again
            for name in names:
                files.disk.unlink(f"{doomed}/{name}")
            files.disk.rmdir(doomed)
            files.folder_changed(folder.rpartition("/")[0])

        def renamed(names: list[str] | None, error: BaseException | None) -> None:
            self._checked(None, error)
            if names is not None and not self._shard.is_closed:
                self._worker(REMOVER).submit(lambda: remove(names), self._checked)

        self._shard.worker.submit(rename, renamed)
        key = log.id.to_bytes(8, "big")
        group = self._shard.group()
        for table in (ENDS, STARTS, TRUNCATIONS, epochs.TABLE, abort_markers.TABLE):
            group.delete(table, key)
        group.commit(lazy=True)

    def _clear_slot(self, log: Log) -> None:
        """In the worker's turn: a round under way may still write it, and its place may be another log's next."""
        try:
            self._shard.slots.remove(log.id)
        except OSError as error:
            # Without room the slot stays: its number is never used again, and the next start leaves it out.
            if error.errno not in NO_ROOM:
                raise

    def delay(self, again: Callable[[], None]) -> None:
        """For want of room: tried again at every tick."""
        self._delayed.append(again)

    def tick(self) -> None:
        delayed, self._delayed = self._delayed, []
        for again in delayed:
            again()

    # Compaction.

    def compact(self, log: Log, done: Callable[[Rewritten | None, BaseException | None], object]) -> None:
        """Keep the latest record of each key in the sealed segments. `done` is told what was gained in all, None when
        nothing is sealed; Conflict when somebody else is at the log, or was before the end.

        A pass learns as many keys as it may hold, from where the one before it ended, and rewrites what lies before
        them, too."""

        def again(earlier: Rewritten | None) -> None:
            def ended(gained: Rewritten | None, error: BaseException | None) -> None:
                gained = gained.made_of(earlier) if gained else earlier
                # Not for ever: a pin may hold what comes next.
                goes_on = keep.is_full and error is None and log.compacted_until > start
                again(gained) if goes_on else done(gained, error)

            start, keep = log.compacted_until, self._latest_by_key(log)
            self._compact_once(log, keep, ended)

        again(None)

    def _latest_by_key(self, log: Log) -> LatestByKey:
        return LatestByKey(
            self._shard.clock.now_ms(),
            start=log.compacted_until,
            lag_ms=log.settings.compaction_lag_ms,
            tombstone_ms=log.settings.tombstone_retention_ms,
            keys_max=self.keys_max,
            hold=log.compaction_hold,
            aborts_before=self.aborts.may_go_before(log),
        )

    def _compact_once(
        self, log: Log, keep: LatestByKey, done: Callable[[Rewritten | None, BaseException | None], object]
    ) -> None:
        sealed = [s for s in log.segments if s.is_sealed and s.next_offset <= log.durable_end]
        runs = runs_of(sealed, log.settings.segment_size)
        is_learnt = False

        def learn() -> None:
            nonlocal is_learnt
            is_learnt = True
            keep.learn(self._shard.files, sealed, log.stable_end)

        def step(gained: Rewritten | None, error: BaseException | None) -> None:
            if error is not None:
                done(gained, error)
                return
            if not runs or (is_learnt and runs[0][0].base >= keep.until):  # nothing goes from here on
                log.compacted_until = max(log.compacted_until, keep.until)
                self.aborts.passed(log, keep)
                done(gained, None)
                return

            def rewritten(more: Rewritten | None, failed: BaseException | None) -> None:
                if isinstance(failed, FileNotFoundError) and any(segment.is_buried for segment in sealed):
                    failed = None  # retention was faster
                if more is None and failed is None:
                    # No further: what lies behind was to go because of what goes here. A tombstone, say.
                    failed = Conflict(f"log {log.id} is being written or rewritten: try again")
                step(more.added_to(gained) if more else gained, failed)

            def is_free() -> bool:
                hold = log.compaction_hold
                return hold is None or hold >= keep.until

            self.rewrite_segments(
                log,
                runs.pop(0),
                keep,
                rewritten,
                learn=None if is_learnt else learn,
                first=lambda: self.aborts.let_go(log, keep.take_aborts_gone()),
                if_still=is_free,
            )

        step(None, None)

    def rewrite_segments(
        self,
        log: Log,
        segments: Sequence[Segment],
        keep: Filter | ByKey,
        done: Callable[[Rewritten | None, BaseException | None], object],
        *,
        learn: Callable[[], None] | None = None,
        make: Callable[[], Rewritten] | None = None,
        first: Callable[[], Ticket | None] = lambda: None,
        if_still: Callable[[], bool] = lambda: True,
    ) -> None:
        """Replace a run of sealed neighbours by one without the records that keep does not name, or by what `make`
        makes of them. When that is made, on the owner thread, `first` says what has to be stored before it counts, and
        `if_still` is asked after that: a pin may have come meanwhile.

        After a checkpoint: recovery must know them as synced, or it would look for what was dropped in the journal.
        `done` is told None, and no error, when nothing was replaced: somebody else was there before.
        """
        if not segments or log.id in self.busy:
            done(None, None)
            return
        assert all(segment.is_sealed for segment in segments), "the active segment is never rewritten"
        self.busy.add(log.id)

        def work() -> Rewritten:
            if learn is not None:
                learn()
            if make is not None:
                return make()
            return rewrite(self._shard.files, segments, keep, log.settings.index_interval)

        def swap(rewritten: Rewritten | None, error: BaseException | None) -> None:
            if error is not None or rewritten is None:
                self.busy.discard(log.id)
                self._check_syncs()
                done(None, error)
                return
            try:
                ticket = first()
            except HeadraceError:
                put_in_place(rewritten, is_ready=False)
                return
            if ticket is None:
                put_in_place(rewritten, is_ready=True)
            else:
                ticket.add_callback(lambda ended: put_in_place(rewritten, is_ready=ended.error is None))

        def put_in_place(rewritten: Rewritten, *, is_ready: bool) -> None:
            wanted = is_ready and if_still()
            # In the lane, name and all: a pin that comes from now on is confirmed after it, and never before.
            self._shard.worker.submit(
                lambda: self._swap(log, segments if wanted else (), rewritten),
                lambda gone, failed: self._swapped(log, gone, failed, rewritten, done),
            )

        def known(error: BaseException | None) -> None:
            # The round that sealed the last of them may have been refused since: that one is written to again.
            if error is None and all(segment.is_sealed for segment in segments):
                self._worker(CLEANER).submit(work, swap)
            else:
                swap(None, error)

        self._shard.checkpoints.include(log)  # the round that sealed the last of them may still be under way
        self._shard.checkpoint(known)

    def _check_syncs(self) -> None:
        """Perhaps it was somebody else's file, to be closed for one of ours, whose sync has failed."""
        failure = self._shard.files.failure
        if failure is not None:
            self._shard.fail(failure)

    def _swap(self, log: Log, segments: Sequence[Segment], rewritten: Rewritten) -> list[Segment] | None:
        """What goes; None when it is what was to replace them. No segments: it is not wanted."""
        current = log.tail.segments
        if not segments or not set(current).issuperset(segments):
            # A pin came, or retention took some of them meanwhile: the old ones stay as they are.
            self._give_up(log, rewritten)
            return None
        if rewritten.unnamed is not None and not self._name(log, rewritten.unnamed, rewritten):
            return None
        at = current.index(segments[0])
        log.tail.segments = (*current[:at], rewritten.segment, *current[at + len(segments) :])
        return list(segments)

    def _name(self, log: Log, unnamed: str, rewritten: Rewritten) -> bool:
        """Durably, or DiskFull: what has the name, a start takes, so there has to be a descriptor for the sync before.
        False when the log was deleted."""
        files, folder = self._shard.files, rewritten.segment.folder
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
            self._give_up(log, rewritten)
            raise DiskFull(f"no file descriptor is free to replace segments of log {log.id}") from error
        return True

    def _give_up(self, log: Log, rewritten: Rewritten) -> None:
        """Here and now: who tries again takes the same names."""
        if rewritten.unnamed is not None:
            with suppress(FileNotFoundError):  # the log was deleted
                self._shard.disk.unlink(rewritten.unnamed)
        self._unlink([(log.id, rewritten.segment)])

    def _swapped(
        self,
        log: Log,
        gone: list[Segment] | None,
        error: BaseException | None,
        rewritten: Rewritten,
        done: Callable[[Rewritten | None, BaseException | None], object],
    ) -> None:
        self.busy.discard(log.id)
        if not isinstance(error, DiskFull):  # which left everything as it was
            self.bury(log, gone, error)
        done(None if gone is None else rewritten, error)

    def _worker(self, name: str) -> Worker:
        """A thread for what takes long, made when there is something."""
        if isinstance(self._shard.keeper, InlineWorker):
            return self._shard.keeper
        if name not in self._workers:
            self._workers[name] = ThreadWorker(name, self._shard.post)
        return self._workers[name]

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
