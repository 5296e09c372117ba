"""A shard: the logs of one data folder, and the journal, worker, slots and open files they share.

One owner thread stages work and hears of its completion; the worker does a round at a time; the keeper
does checkpoints. Nothing here knows an event loop: `post` brings a call to the owner thread, `defer` runs one later
on it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from headrace.clock import Clock
from headrace.errors import DiskFull, NotFound, StorageError, StorageFailed
from headrace.log.commit import checkpoint
from headrace.log.commit.atomic_group import AtomicGroup
from headrace.log.commit.committer import Committer
from headrace.log.commit.journal import Journal
from headrace.log.commit.journal_entry import DELETE, MERGE, PUT, StateChange
from headrace.log.commit.log_writer import Tail
from headrace.log.commit.round import Ticket, Unit
from headrace.log.commit.scheduler import RoundScheduler
from headrace.log.commit.slots import Ends, Slots
from headrace.log.counters import Counters
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, FileId, RealDisk, make_folder
from headrace.log.disk.file_cache import NO_ROOM, FileCache
from headrace.log.disk.workers import InlineWorker, Post, SerialExecutor, ThreadWorker, Watch, Worker
from headrace.log.log import Log, LogSpec
from headrace.log.maintenance.maintenance import Maintenance
from headrace.log.read.cold_reads import Loader
from headrace.log.read.file_range import FileRanges
from headrace.log.read.recent_reads import RecentReads
from headrace.log.recovery.recovery import RecoveryReport, recover
from headrace.log.segments.index_cache import IndexCache
from headrace.log.settings import LogSettings
from headrace.log.standby import follower
from headrace.log.state.store import Fold, StateStore
from headrace.log.tier.archive import tier_root
from headrace.log.tier.sources import Archives

RECENT_BYTES_MAX = 8 << 20


class Shard:
    # Set while opening, in this order.
    worker: SerialExecutor
    keeper: Worker
    loader: Loader
    post: Post
    defer: Post
    tier_root: str
    state: StateStore
    journal: Journal
    slots: Slots
    committer: Committer
    maintenance: Maintenance
    checkpoints: checkpoint.Checkpoints
    _lock: FileId

    def __init__(self, root: str, settings: LogSettings, clock: Clock, disk: Disk) -> None:
        self.root = root
        self.settings = settings
        self.clock = clock
        self.disk = disk
        self.counters = Counters()
        self.files = FileCache(disk, settings.open_files_max or disk.open_files_max() // 4)
        self.index_cache = IndexCache(self.files, settings.index_cache_bytes)
        self.recent_reads = RecentReads(RECENT_BYTES_MAX)
        self.file_ranges = FileRanges(self.files)
        self.archives = Archives(disk)
        self.logs: dict[int, Log] = {}
        self.epoch = 0
        self.failure: StorageError | None = None
        self.is_full = False
        self.intake = RoundScheduler(self)
        self.unsynced_since: float | None = None  # the journal holds settles that no sync has covered yet
        self.ids = range(0)
        self.pending_truncations: list[tuple[Log, int]] = []
        self._closing: Callable[[BaseException | None], object] | None = None
        self._waits_for_room = True
        self._left_for_want_of_room = False
        self.is_closed = False
        self.was_standby = False

    # Opening and closing.

    @classmethod
    def open(
        cls,
        root: str,
        settings: LogSettings | None = None,
        *,
        logs: Iterable[LogSpec] = (),
        clock: Clock,
        disk: Disk | None = None,
        post: Post | None = None,
        defer: Post | None = None,
        watch: Watch | None = None,
        make_future: Callable[[], Any] | None = None,
        folds: Mapping[str, Fold] | None = None,
    ) -> tuple["Shard", RecoveryReport]:
        """Lock the folder, recover, and be ready to append. Without `post` nothing runs by itself: see pump()."""
        shard = cls(root, settings or LogSettings(), clock, disk or RealDisk())
        shard._start_workers(post, defer, watch, make_future)
        try:
            report = shard._recover(logs, folds)
        except OSError as error:
            shard._stop()
            if error.errno not in NO_ROOM:
                raise
            raise DiskFull(
                f"{root} cannot be opened: the disk is full, and a start after a crash writes before it deletes; "
                "make room and start again, nothing is lost"
            ) from error
        except BaseException:
            shard._stop()
            raise
        shard.checkpoints = checkpoint.Checkpoints(shard)
        shard.maintenance = Maintenance(shard)
        shard.maintenance.truncations.finish(shard.pending_truncations)
        shard.pending_truncations = []
        return shard, report

    def _recover(self, logs: Iterable[LogSpec], folds: Mapping[str, Fold] | None) -> RecoveryReport:
        make_folder(self.disk, self.root)
        for folder in (paths.LOGS, paths.STATE, paths.JOURNAL):
            self.disk.mkdir(f"{self.root}/{folder}")
        self.disk.sync_dir(self.root)  # what is synced in a folder without a durable name of its own is lost with it
        self._lock = self.disk.lock(f"{self.root}/{paths.LOCK}")
        self.was_standby = follower.promote(self.disk, self.root)
        self.tier_root = tier_root(self.disk, self.root, self.settings.tier_dir)
        self.state = StateStore(self.disk, f"{self.root}/{paths.STATE}", folds)
        return recover(self, list(logs))  # not before the lock is ours: another broker may be changing them

    def _start_workers(
        self,
        post: Post | None,
        defer: Post | None,
        watch: Watch | None,
        make_future: Callable[[], Any] | None,
    ) -> None:
        self.make_future = make_future
        self.post = post or (lambda fn: fn())
        self._inline: list[InlineWorker] = []
        if post is None:
            self._inline = [InlineWorker(), InlineWorker()]
            self.worker = SerialExecutor(self._inline[0], self.disk, self.files.sync_failure)
            self.keeper = self._inline[1]
            self._deferred: deque[Callable[[], object]] = deque()
            self.defer = self._deferred.append
            self.loader = Loader(None, self.keeper)
        else:
            self.worker = SerialExecutor(ThreadWorker("headrace-log", post), self.disk, self.files.sync_failure, watch)
            self.keeper = ThreadWorker("headrace-keeper", post)
            self.defer = defer or post
            self.loader = Loader(post)

    def begin(self, journal: Journal, slots: Slots) -> None:
        """Called by recovery once everything on disk is known."""
        self.journal = journal
        self.slots = slots
        self.committer = Committer(journal, slots, self.files, self.settings.inline_bytes_max, self.clock.monotonic)
        slots.start(journal.sequence, map(ends_of, self.logs.values()))

    def pump(self) -> bool:
        """Inline only: run what is waiting, one step at a time, until nothing is left. True if anything ran."""
        ran = False
        while self._deferred or any(worker.pump() for worker in self._inline):
            ran = True
            while self._deferred:
                self._deferred.popleft()()
        return ran

    def close(self, done: Callable[[BaseException | None], object] | None = None) -> None:
        """Finish what is in flight, checkpoint, mark the stop as clean. `done` is told on the owner thread;
        then `join` ends the threads. Inline shards close at once."""
        result: list[BaseException | None] = []
        self._closing = done or result.append
        self.close_when_idle()
        if done is None:
            self.pump()
            self.join()
            if result and result[0] is not None:
                raise result[0]

    @property
    def is_closing(self) -> bool:
        return self._closing is not None

    def stop_waiting_for_room(self) -> None:
        """For who is about to close, and has to wait for others who store something: on a full disk they would wait
        for ever. They hear that it failed; what lies in the journal is stored by the next start."""
        self._waits_for_room = False
        self.close_when_idle()

    def close_when_idle(self) -> None:
        if (self._closing is None and self._waits_for_room) or self.checkpoints.is_running:
            return
        lacks_room = self.intake.waits_for_room  # there may never be any: it lies in the journal, or nobody was told
        if lacks_room and not self._waits_for_room and self.failure is None:
            self._left_for_want_of_room = True
            self.fail(StorageFailed("the disk is full, and the broker stops: the next start stores what waits"))
            return
        if self._closing is None or (not self.intake.is_idle and not lacks_room):
            return
        closing, self._closing = self._closing, None
        self.worker.stop_watching()
        for log in self.logs.values():
            log.close()
        if self.failure is not None or lacks_room:
            # The next start recovers; a clean mark would be a lie.
            closing(None if self._left_for_want_of_room else self.failure)
            return
        # It may fail meanwhile: what is written to files whose folder is gone is written without an error.
        self.checkpoints.run(clean=True, done=lambda error: closing(error or self.failure))

    def join(self) -> None:
        self._stop()

    def _stop(self) -> None:
        self.files.is_ending = True
        self.is_closed = True
        if hasattr(self, "maintenance"):
            self.maintenance.close()
        self.worker.close()
        self.keeper.close()
        self.loader.close()
        for part in ("journal", "slots", "state"):
            if hasattr(self, part):
                getattr(self, part).close()
        self.files.close()
        if hasattr(self, "_lock"):
            self.disk.close(self._lock)

    def leave_to_parent(self) -> None:
        """In the child of a fork: the folder would stay locked as long as the child lives, whatever the parent does."""
        self.disk.close(self._lock)

    # Logs.

    def next_log_id(self) -> int:
        """A number no log ever had or will have: recovery reserved a block of them, durably, at the start."""
        number, self.ids = self.ids[0], self.ids[1:]
        return number

    def create_log(self, spec: LogSpec) -> Log:
        assert spec.id not in self.logs, "log ids are never reused"
        log = self.new_log(spec)
        self.logs[spec.id] = log
        return log

    def new_log(self, spec: LogSpec) -> Log:
        folder = f"{self.root}/{paths.LOGS}/{paths.log_folder(spec.id, spec.slug)}"
        tail = Tail(self.files, folder, spec.settings, self.clock)
        return Log(self, spec, tail, 0)

    def log(self, log_id: int) -> Log:
        try:
            return self.logs[log_id]
        except KeyError:
            raise NotFound(f"no log {log_id}") from None

    def delete_log(self, log_id: int) -> None:
        """The catalog no longer names it, durably. After a crash before its folder has another name the next start says
        that it is a stray: the same is left of a topic whose description was lost."""
        log = self.logs.pop(log_id)
        log.is_deleted = True
        log.close()
        self.maintenance.delete_files(log)

    # Staging.

    def new_ticket(self) -> Ticket:
        return Ticket(self.make_future)

    def group(self) -> AtomicGroup:
        return AtomicGroup(self)

    def stage(self, unit: Unit) -> None:
        self.intake.stage(unit)

    def begin_round(self) -> None:
        self.intake.begin()

    def on_drain(self, callback: Callable[[], object]) -> None:
        self.intake.on_drain(callback)

    @property
    def pending_bytes(self) -> int:
        """What waits for the disk."""
        return self.intake.pending_bytes

    def apply_changes(self, changes: Iterable[StateChange]) -> None:
        for change in changes:
            if change.kind == PUT:
                self.state.apply_put(change.table, change.key, change.value)
            elif change.kind == DELETE:
                self.state.apply_delete(change.table, change.key)
            else:
                assert change.kind == MERGE
                self.state.apply_merge(change.table, change.key, change.value)

    def fail(self, error: BaseException) -> None:
        """A write or sync failed: nothing is confirmed any more. What is on disk is judged by the next start."""
        if self.failure is None:
            self.failure = (
                error if isinstance(error, StorageFailed) else StorageFailed(f"writing to {self.root} failed: {error}")
            )
            self.failure.__cause__ = error
        self.intake.fail(self.failure)
        self.close_when_idle()

    def checkpoint(self, done: Callable[[BaseException | None], object] | None = None) -> None:
        self.checkpoints.run(done=done)

    @property
    def checkpoint_bytes_since(self) -> int:
        """What a start after a kill would have to look at."""
        return self.checkpoints.bytes_since

    def checkpoint_finished(self) -> None:
        self.close_when_idle()

    def tell(self, log: Log) -> None:
        """Have the log's slot written: an end moved without an append."""

        def write() -> None:
            if not (log.is_closed or self.is_closed):
                self.committer.tell(log)

        self.worker.submit(write, lambda _, error: None if error is None else self.fail(error))

    def sync_filesystem(self) -> None:
        self.disk.sync_filesystem(self._lock)

    # Time.

    def tick(self) -> None:
        """Called on the owner thread every 50 to 100 ms."""
        if self.failure is None and not self.is_closed and self._closing is None:
            self.checkpoints.tick()
            self.maintenance.tick()


def ends_of(log: Log) -> Ends:
    return Ends(log.id, log.epoch, log.start_offset, log.visible_end, log.durable_end, log.stable_end)


__all__ = ["LogSpec", "RecoveryReport", "Shard"]
