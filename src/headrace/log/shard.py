"""A shard: all logs of one data folder, with the journal, state, worker threads and open files that they share.

The owner thread stages work and gets its results; the worker writes one round at a time; the keeper does checkpoints.
A shard knows no event loop: `post` brings a call to the owner thread, and `defer` runs one later on it.

A shard is built in two phases. The constructor makes what recovery needs: threads, open files, the queue of staged
appends. `open` then locks and recovers the folder (`begin` receives journal and slots), and `_start` adds the
components that write: scheduler, checkpoints, maintenance.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from enum import Enum, auto
from typing import Any

from headrace.clock import Clock
from headrace.errors import DiskFull, NotFound, StorageError, StorageFailed
from headrace.log.commit.atomic_group import AtomicGroup
from headrace.log.commit.checkpoint import Checkpoints, WriterPosition
from headrace.log.commit.committer import Committer
from headrace.log.commit.context import CommitContext
from headrace.log.commit.disk_space import DiskSpace
from headrace.log.commit.flusher import Flusher
from headrace.log.commit.journal import Journal
from headrace.log.commit.log_writer import Tail
from headrace.log.commit.recovery_space import RecoverySpace
from headrace.log.commit.round import Staging, Ticket
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
from headrace.log.read.reader import LogReader
from headrace.log.read.recent_reads import RecentReads
from headrace.log.recovery.recovery import RecoveryReport, recover
from headrace.log.segments.index_cache import IndexCache
from headrace.log.segments.segment import Segment
from headrace.log.settings import LogSettings
from headrace.log.standby import follower
from headrace.log.state.changes import StateChange
from headrace.log.state.store import DiskStateStore, Fold
from headrace.log.status import Phase, ShardStatus
from headrace.log.tier.archive import tier_root
from headrace.log.tier.sources import Archives

RECENT_BYTES_MAX = 8 << 20


class FullDisk(Enum):
    """What a shard does about a round that waits for disk space while the broker stops."""

    WAIT = auto()
    GIVE_UP = auto()  # fail such a round instead of waiting for it
    GAVE_UP = auto()  # such a round has been failed: the next start stores what is in the journal


class Shard:
    # Phase 2, set by `_recover` in this order ...
    _lock: FileId
    tier_root: str
    state: DiskStateStore
    journal: Journal
    slots: Slots
    committer: Committer
    # ... and by `_start`.
    checkpoints: Checkpoints
    scheduler: RoundScheduler
    disk_space: DiskSpace
    flusher: Flusher
    maintenance: Maintenance

    def __init__(
        self,
        root: str,
        settings: LogSettings,
        clock: Clock,
        disk: Disk,
        *,
        post: Post | None,
        defer: Post | None,
        watch: Watch | None,
        make_future: Callable[[], Any] | None,
    ) -> None:
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
        self.ids = range(0)
        self.pending_truncations: list[tuple[Log, int]] = []
        self.was_standby = False
        self._on_closed: Callable[[BaseException | None], object] | None = None
        self._full_disk = FullDisk.WAIT
        # Closed in the reverse order of opening: first the threads, then the files that they use.
        self._threads = ExitStack()
        self._open_files = ExitStack()
        self.worker: SerialExecutor
        self.keeper: Worker
        self.post: Post = post or (lambda fn: fn())
        self._inline: list[InlineWorker] = []
        self._deferred: deque[Callable[[], object]] = deque()
        if post is None:
            self._inline = [InlineWorker(), InlineWorker()]
            self.worker = SerialExecutor(self._inline[0], disk, self.files.sync_failure)
            self.keeper = self._inline[1]
            self.defer: Post = self._deferred.append
            self.loader = Loader(None, self.keeper)
        else:
            self.worker = SerialExecutor(ThreadWorker("headrace-log", post), disk, self.files.sync_failure, watch)
            self.keeper = ThreadWorker("headrace-keeper", post)
            self.defer = defer or post
            self.loader = Loader(post)
        for thread in (self.loader, self.keeper, self.worker):
            self._threads.callback(thread.close)
        self.status = ShardStatus(
            root, settings.disk_reserve, self.counters, on_failure=self._failed, on_idle=self._close_when_idle
        )
        self.staging = Staging(self.status, self.defer, make_future)

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
        """Lock the folder, recover it, and get ready to append. Without `post` nothing runs by itself: see pump()."""
        shard = cls(
            root,
            settings or LogSettings(),
            clock,
            disk or RealDisk(),
            post=post,
            defer=defer,
            watch=watch,
            make_future=make_future,
        )
        try:
            report = shard._recover(logs, folds)
        except OSError as error:
            shard.join()
            if error.errno not in NO_ROOM:
                raise
            raise DiskFull(
                f"{root} cannot be opened: the disk is full, and a start after a crash writes before it deletes; "
                "make room and start again, nothing is lost"
            ) from error
        except BaseException:
            shard.join()
            raise
        shard._start()
        return shard, report

    def _recover(self, logs: Iterable[LogSpec], folds: Mapping[str, Fold] | None) -> RecoveryReport:
        make_folder(self.disk, self.root)
        for folder in (paths.LOGS, paths.STATE, paths.JOURNAL):
            self.disk.mkdir(f"{self.root}/{folder}")
        self.disk.sync_dir(self.root)  # files synced in a folder whose own name is not durable are lost with it
        self._lock = self.disk.lock(f"{self.root}/{paths.LOCK}")
        self._open_files.callback(lambda: self.disk.close(self._lock))
        self._open_files.callback(self.files.close)
        self.was_standby = follower.promote(self.disk, self.root)
        self.tier_root = tier_root(self.disk, self.root, self.settings.tier_dir)
        self.state = DiskStateStore(self.disk, f"{self.root}/{paths.STATE}", folds)
        self._open_files.callback(self.state.close)
        return recover(self, list(logs))  # only with the lock: another broker may be changing the files

    def begin(self, journal: Journal, slots: Slots) -> None:
        """Called by recovery once everything on disk is known."""
        self.journal = journal
        self.slots = slots
        self._open_files.callback(slots.close)
        self._open_files.callback(journal.close)
        space = RecoverySpace(journal, self.state)
        self.committer = Committer(
            journal, slots, self.files, space, self.settings.inline_bytes_max, self.clock.monotonic
        )
        slots.start(journal.sequence, map(ends_of, self.logs.values()))

    def _start(self) -> None:
        context = CommitContext(
            root=self.root,
            settings=self.settings,
            clock=self.clock,
            counters=self.counters,
            disk=self.disk,
            files=self.files,
            status=self.status,
            worker=self.worker,
            keeper=self.keeper,
        )
        self.files.sync_filesystem = self.sync_filesystem
        self.checkpoints = Checkpoints(
            context, self.committer, self.state, self.logs, self.epoch, on_durable=self._checkpointed
        )
        self.scheduler = RoundScheduler(context, self.staging, self.committer, self.checkpoints, self.state)
        self.disk_space = DiskSpace(context, self.committer.space, on_room=self._has_room)
        self.disk_space.measure()
        self.flusher = Flusher(context, self.logs)
        self.maintenance = Maintenance(self)
        self._threads.callback(self.maintenance.close)
        self.maintenance.truncations.finish(self.pending_truncations)
        self.pending_truncations = []

    def pump(self) -> bool:
        """Inline only: run the waiting jobs, one at a time, until none is left. True if any ran."""
        ran = False
        while self._deferred or any(worker.pump() for worker in self._inline):
            ran = True
            while self._deferred:
                self._deferred.popleft()()
        return ran

    def close(self, done: Callable[[BaseException | None], object] | None = None) -> None:
        """Finish the rounds under way, checkpoint, and mark the stop as clean. `done` is called on the owner thread;
        after that, `join` ends the threads. An inline shard closes at once."""
        result: list[BaseException | None] = []
        self._on_closed = done or result.append
        self.status.enter(Phase.CLOSING)
        self._close_when_idle()
        if done is None:
            self.pump()
            self.join()
            if result and result[0] is not None:
                raise result[0]

    def stop_waiting_for_room(self) -> None:
        """Fail rounds that wait for disk space instead of waiting for it. For a broker that is about to close and has
        to wait for appends under way: on a full disk they would never end. The next start stores what is in the
        journal."""
        if self._full_disk is FullDisk.WAIT:
            self._full_disk = FullDisk.GIVE_UP
        self._close_when_idle()

    def _close_when_idle(self) -> None:
        if (self._on_closed is None and self._full_disk is FullDisk.WAIT) or self.checkpoints.is_running:
            return
        waits_for_room = self.scheduler.waits_for_room  # perhaps for ever
        if waits_for_room and self._full_disk is not FullDisk.WAIT and self.failure is None:
            self._full_disk = FullDisk.GAVE_UP
            self.fail(StorageFailed("the disk is full and the broker is stopping: the next start stores what waits"))
            return
        if self._on_closed is None or (not self.scheduler.is_idle and not waits_for_room):
            return
        on_closed, self._on_closed = self._on_closed, None
        self.status.enter(Phase.LAST_CHECKPOINT)
        self.worker.stop_watching()
        for log in self.logs.values():
            log.close()
        if self.failure is not None or waits_for_room:
            # The stop is not clean, so no marker may say that it is: the next start recovers.
            on_closed(None if self._full_disk is FullDisk.GAVE_UP else self.failure)
            return
        # The shard may fail meanwhile: writes to files whose folder was removed succeed.
        self.checkpoints.run(clean=True, done=lambda error: on_closed(error or self.failure))

    def join(self) -> None:
        """End the threads and close the files."""
        self.files.is_ending = True
        self.status.enter(Phase.CLOSED)
        try:
            self._threads.close()
        finally:
            self._open_files.close()

    def leave_to_parent(self) -> None:
        """In the child of a fork: close the lock, or the folder would stay locked for as long as the child lives."""
        self.disk.close(self._lock)

    # Status.

    @property
    def failure(self) -> StorageError | None:
        return self.status.failure

    @property
    def is_full(self) -> bool:
        return self.status.is_full

    @is_full.setter
    def is_full(self, is_full: bool) -> None:
        self.status.is_full = is_full

    @property
    def is_closed(self) -> bool:
        return self.status.is_closed

    def fail(self, error: BaseException) -> None:
        """See ShardStatus.fail."""
        self.status.fail(error)

    def _failed(self, failure: StorageError) -> None:
        self.scheduler.fail(failure)
        self._close_when_idle()

    # Logs.

    def next_log_id(self) -> int:
        """A number that no log ever had or will have: each start durably reserves a block of them."""
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
        reader = LogReader(
            self.files, self.index_cache, self.recent_reads, self.file_ranges, tail, self.counters, self.loader
        )
        log = Log(self, self.staging, spec, self.epoch, tail, reader)
        log.loader = self.loader
        return log

    def log(self, log_id: int) -> Log:
        try:
            return self.logs[log_id]
        except KeyError:
            raise NotFound(f"no log {log_id}") from None

    def delete_log(self, log_id: int) -> None:
        """Delete a log that the catalog durably no longer names. After a crash before its folder is renamed, the next
        start reports the folder as a stray, because a topic whose description was lost looks the same."""
        log = self.logs.pop(log_id)
        log.is_deleted = True
        log.close()
        self.maintenance.delete_files(log)

    def publish_ends(self, log: Log) -> None:
        """Have the log's slot written: an end moved without an append."""

        def write() -> None:
            if not (log.is_closed or self.is_closed):
                self.committer.publish_ends(log)

        self.worker.submit(write, lambda _, error: None if error is None else self.fail(error))

    def pin_added(self, log: Log) -> None:
        self.maintenance.starts.give_way(log)

    def planned_segment(self, log: Log, base: int, generation: int) -> tuple[Segment, bool]:
        return self.maintenance.planned_segment(log, base, generation)

    # Rounds.

    def new_ticket(self) -> Ticket:
        return Ticket(self.staging.make_future)

    def group(self) -> AtomicGroup:
        return AtomicGroup(self.staging, self.journal.capacity // 2)

    def on_drain(self, callback: Callable[[], object]) -> None:
        self.scheduler.on_drain(callback)

    @property
    def pending_bytes(self) -> int:
        """Bytes that are staged or in the round under way."""
        return self.staging.pending_bytes

    def apply_changes(self, changes: Iterable[StateChange]) -> None:
        """For recovery, which replays the journal."""
        self.state.apply(changes)

    # Checkpoints.

    def checkpoint(self, done: Callable[[BaseException | None], object] | None = None) -> None:
        self.checkpoints.run(done=done)

    @property
    def checkpoint_bytes_since(self) -> int:
        """Bytes that a start after a kill would have to scan."""
        return self.checkpoints.bytes_since

    def _checkpointed(self, positions: Iterable[WriterPosition]) -> None:
        for position in positions:
            self.scheduler.on_checkpointed(position.log_id, position.next_offset)
        self.scheduler.on_journal_freed()

    def sync_filesystem(self) -> None:
        self.disk.sync_filesystem(self._lock)

    # Time.

    def tick(self) -> None:
        """Called on the owner thread every 50 to 100 ms."""
        if self.failure is None and self.status.phase is not Phase.CLOSED and self._on_closed is None:
            self.tick_writes()
            self.maintenance.tick()

    def tick_writes(self) -> None:
        """Everything that the commit path does by the clock."""
        now = self.clock.monotonic()
        self.disk_space.check(self.checkpoints.bytes_since, now)
        if self.failure is not None:
            return
        self.scheduler.move_starts()
        self.scheduler.sync_changes(now)
        self.flusher.flush_due(self.checkpoints.touched, now)
        self.checkpoints.run_if_due(now)

    def _has_room(self) -> None:
        if self.committer.is_stuck:
            self.scheduler.retry_apply()
        elif self.committer.space.has_room_for(0):
            self.is_full = False


def ends_of(log: Log) -> Ends:
    return Ends(log.id, log.epoch, log.start_offset, log.visible_end, log.durable_end, log.stable_end)


__all__ = ["LogSpec", "RecoveryReport", "Shard"]
