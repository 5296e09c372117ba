"""A shard: the logs of one data folder, and the journal, worker, slots and open files they share.

One owner thread stages work and hears of its completion; the worker does a round at a time; the keeper
does checkpoints. Nothing here knows an event loop: `post` brings a call to the owner thread, `defer` runs one later
on it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from headrace.clock import Clock
from headrace.errors import DiskFull, HeadraceError, LogClosed, NotFound, StorageError, StorageFailed
from headrace.log import checkpoint, paths
from headrace.log.commit import Committed, Committer, Plan
from headrace.log.counters import Counters
from headrace.log.disk import Disk, FileId, Ran, RealDisk, make_folder
from headrace.log.files import NO_ROOM, Files
from headrace.log.group import Group
from headrace.log.journal import Journal, JournalFull
from headrace.log.loading import Loader
from headrace.log.log import Log, LogSpec
from headrace.log.maintenance import Maintenance
from headrace.log.reader import IndexCache
from headrace.log.recent import RecentReads
from headrace.log.recovery import RecoveryReport, recover
from headrace.log.rounds import DELETE, MERGE, PUT, Round, StateChange, Ticket, Unit
from headrace.log.settings import LogSettings
from headrace.log.slots import Ends, Slots
from headrace.log.state import Fold, StateStore
from headrace.log.tail import Tail
from headrace.log.tiering import tier_root
from headrace.log.work import InlineWorker, Lane, Post, ThreadWorker, Watch, Worker
from headrace.record import codec

EPOCHS = "epochs"
RECENT_BYTES_MAX = 8 << 20


class Shard:
    # Set while opening, in this order.
    worker: Lane
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
    _checkpoints: checkpoint.Checkpoints
    _lock: FileId

    def __init__(self, root: str, settings: LogSettings, clock: Clock, disk: Disk) -> None:
        self.root = root
        self.settings = settings
        self.clock = clock
        self.disk = disk
        self.counters = Counters()
        self.files = Files(disk, settings.open_files_max or disk.open_files_max() // 4)
        self.index_cache = IndexCache(self.files, settings.index_cache_bytes)
        self.recent_reads = RecentReads(RECENT_BYTES_MAX)
        self.logs: dict[int, Log] = {}
        self.epoch = 0
        self.failure: StorageError | None = None
        self.is_full = False
        self.pending_bytes = 0
        self.unsynced_since: float | None = None  # the journal holds settles that no sync has covered yet
        self._pending: deque[Unit] = deque()
        self._in_flight: Round | None = None
        self._waits_for_journal = False
        self._is_scheduled = False
        self._drained: list[Callable[[], object]] = []
        self._direct_ends: list[tuple[int, int, int]] = []
        self.ids = range(0)
        self.pending_truncations: list[tuple[Log, int]] = []
        self._closing: Callable[[BaseException | None], object] | None = None
        self.is_closed = False

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
        shard._checkpoints = checkpoint.Checkpoints(shard)
        shard.maintenance = Maintenance(shard)
        shard.maintenance.finish_truncations()
        return shard, report

    def _recover(self, logs: Iterable[LogSpec], folds: Mapping[str, Fold] | None) -> RecoveryReport:
        make_folder(self.disk, self.root)
        for folder in (paths.LOGS, paths.STATE, paths.JOURNAL):
            self.disk.mkdir(f"{self.root}/{folder}")
        self.disk.sync_dir(self.root)  # what is synced in a folder without a durable name of its own is lost with it
        self._lock = self.disk.lock(f"{self.root}/{paths.LOCK}")
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
        self._make_future = make_future
        self.post = post or (lambda fn: fn())
        self._inline: list[InlineWorker] = []
        if post is None:
            self._inline = [InlineWorker(), InlineWorker()]
            self.worker, self.keeper = Lane(self._inline[0], self.disk), self._inline[1]
            self._deferred: deque[Callable[[], object]] = deque()
            self.defer = self._deferred.append
            self.loader = Loader(None, self.keeper)
        else:
            self.worker = Lane(ThreadWorker("headrace-log", post), self.disk, watch)
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
        self._close_when_idle()
        if done is None:
            self.pump()
            self.join()
            if result and result[0] is not None:
                raise result[0]

    def _close_when_idle(self) -> None:
        if self._closing is None or self._in_flight is not None or self._pending or self._checkpoints.is_running:
            return
        closing, self._closing = self._closing, None
        self.worker.stop_watching()
        for log in self.logs.values():
            log.close()
        if self.failure is not None or self.committer.is_stuck:
            closing(self.failure)  # the next start recovers; a clean mark would be a lie
            return
        self._checkpoints.run(clean=True, done=closing)

    def join(self) -> None:
        self._stop()

    def _stop(self) -> None:
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
        """The catalog no longer names it, durably: after a crash its folder is an orphan and is removed."""
        log = self.logs.pop(log_id)
        log.is_deleted = True
        log.close()
        self.maintenance.delete_files(log)

    # Staging.

    def new_ticket(self) -> Ticket:
        return Ticket(self._make_future)

    def group(self) -> Group:
        return Group(self)

    def stage(self, unit: Unit) -> None:
        if self.failure is not None:
            raise StorageFailed(str(self.failure)) from self.failure
        if self._closing is not None or self.is_closed:
            raise LogClosed("the broker is stopping")
        if self.is_full and unit.parts:
            self.counters.refused_full += 1
            raise DiskFull(f"less than {self.settings.disk_reserve:,} bytes are free at {self.root}")
        self._pending.append(unit)
        self.pending_bytes += unit.size
        if self._in_flight is None and not self._is_scheduled:
            # Not at once: what else arrives in this turn of the loop rides along.
            self._is_scheduled = True
            self.defer(self._start_round)

    def begin_round(self) -> None:
        """For who knows that nothing more comes in this turn of the loop: the disk need not wait for the next."""
        self._start_round()

    def on_drain(self, callback: Callable[[], object]) -> None:
        """Call back, once, when nothing is waiting for the disk any more."""
        if self.pending_bytes == 0:
            self.defer(callback)
        else:
            self._drained.append(callback)

    def _start_round(self) -> None:
        self._is_scheduled = False
        if self._in_flight is not None or self.failure is not None or not self._pending:
            return
        batch = Round()
        while self._pending and (not batch.units or self._fits(batch, self._pending[0])):
            unit = self._pending.popleft()
            if not self._is_wanted(unit):
                continue
            batch.add(unit)
            if unit.immediate:
                break
        if not batch.units:
            self._next()
            return
        batch.ends, self._direct_ends = self._direct_ends, []
        self._number(batch)
        self._in_flight = batch
        self._submit(batch)

    def _is_wanted(self, unit: Unit) -> bool:
        """Leave out what was staged for a log that is deleted by now; the rest of its group goes on."""
        for part in unit.parts:
            if part.log.is_deleted:
                break
        else:
            return True
        unit.parts = [part for part in unit.parts if not part.log.is_deleted]
        if unit.parts or unit.changes:
            return True
        self.pending_bytes -= unit.size
        unit.ticket.resolve(LogClosed("the log was deleted"))
        return False

    def _fits(self, batch: Round, unit: Unit) -> bool:
        # Half the journal's file: what the entry adds to the parts (headers, ends, epochs) has the other half.
        limit = min(self.settings.round_bytes_max, self.journal.capacity // 2)
        return not unit.immediate and batch.size + unit.size <= limit

    def _number(self, batch: Round) -> None:
        """Give out offsets: densely, in the order of arrival."""
        for part in batch.parts:
            log = part.log
            part.base_offset = log.next_offset
            part.next_offset = codec.patch_run(part.data, 0, len(part.data), part.base_offset, log.epoch)
            log.next_offset = part.next_offset
            if not log.epochs or log.epochs[-1][0] != log.epoch:
                log.epochs.append((log.epoch, part.base_offset))
                batch.changes.append(StateChange(PUT, EPOCHS, log_key(log.id), pack_epochs(log.epochs)))

    def _submit(self, batch: Round) -> None:
        self.worker.enter(lambda: self._write(batch))

    def _write(self, batch: Round) -> None:
        """In the round's turn: as a chain if it can be one, else by the worker."""
        if batch is not self._in_flight:
            self.worker.leave()  # a failure was faster, and was told
            return
        try:
            plan = self.committer.plan(batch)
        except BaseException as error:  # noqa: BLE001 - as if the worker had met it
            self.worker.leave()
            self._round_done(batch, None, error)
            return
        if plan is None:
            self.worker.give(lambda: self.committer.commit(batch), partial(self._round_done, batch))
        else:
            self.worker.run(plan.steps, lambda ran, error: self._written(batch, plan, ran, error))

    def _written(self, batch: Round, plan: Plan, ran: Ran | None, error: BaseException | None) -> None:
        result = None
        try:
            if ran is not None:
                result = self.committer.finish(plan, ran)
        except BaseException as bug:  # noqa: BLE001 - as if the worker had met it
            error = bug
        if ran is not None and result is not None and ran.error is not None:
            self.worker.give(lambda: self.committer.mend(plan, ran, result), partial(self._round_done, batch))
        else:
            self.worker.leave()
            self._round_done(batch, result, error)

    def _round_done(self, batch: Round, result: Committed | None, error: BaseException | None) -> None:
        if batch is not self._in_flight:
            # It was told already: by a failure of another job, or by the first of two retries. What is in flight
            # by now has not been written, and must not be taken for this one.
            return
        if isinstance(error, JournalFull):
            # Back-pressure: the round waits for the checkpoint that frees a journal file.
            self._waits_for_journal = True
            self._checkpoints.run()
            return
        if isinstance(error, DiskFull):
            self.is_full = True
            self._take_back(batch, error)
        elif error is not None:
            self.fail(error)
            return
        elif self.committer.is_stuck:
            self.is_full = True  # durable, but not readable yet: tick() tries again
            return
        else:
            assert result is not None
            self._complete(batch, result)
        self._next()

    def retry_stuck(self) -> None:
        if self._in_flight is not None and self.committer.is_stuck:
            batch = self._in_flight
            self.worker.submit(lambda: self.committer.apply_rest(Committed()), partial(self._round_done, batch))

    def journal_freed(self) -> None:
        if self._waits_for_journal and self._in_flight is not None:
            self._waits_for_journal = False
            self._submit(self._in_flight)

    def _next(self) -> None:
        self._in_flight = None
        if self._pending:
            self._start_round()
        elif self._drained:
            drained, self._drained = self._drained, []
            for callback in drained:
                callback()
        self._close_when_idle()

    def _complete(self, batch: Round, result: Committed) -> None:
        self._direct_ends += result.direct_ends
        if batch.must_sync:
            self.unsynced_since = None
        elif batch.changes and self.unsynced_since is None:
            self.unsynced_since = self.clock.monotonic()
        self.apply_changes(batch.changes)
        touched = {}
        records = 0
        for part in batch.parts:
            log = part.log
            records += part.next_offset - part.base_offset
            log.visible_end = part.next_offset
            if log.is_async:
                log.unflushed_bytes += len(part.data)
            else:
                log.durable_end = part.next_offset
            touched[log.id] = log
            part.ticket.base_offset = part.base_offset if part.ticket.base_offset < 0 else part.ticket.base_offset
            part.ticket.next_offset = part.next_offset
        self._count(batch, records, result)
        for unit in batch.units:
            self.pending_bytes -= unit.size
            unit.ticket.resolve()
        for log in touched.values():
            log.wake()
        self._checkpoints.wrote(batch.size, touched.values())

    def _count(self, batch: Round, records: int, result: Committed) -> None:
        counters = self.counters
        counters.rounds += 1
        counters.records_written += records
        counters.bytes_written += batch.size
        counters.segments_created += result.segments_created
        counters.syncs += result.syncs
        counters.round_records.observe(records)
        if result.syncs:
            counters.sync_s.observe(result.sync_s)

    def apply_changes(self, changes: Iterable[StateChange]) -> None:
        for change in changes:
            if change.kind == PUT:
                self.state.apply_put(change.table, change.key, change.value)
            elif change.kind == DELETE:
                self.state.apply_delete(change.table, change.key)
            else:
                assert change.kind == MERGE
                self.state.apply_merge(change.table, change.key, change.value)

    def _take_back(self, batch: Round, error: HeadraceError) -> None:
        """The round was refused as a whole and left nothing behind: its offsets go to the next one."""
        self.counters.refused_full += 1
        self._direct_ends = batch.ends + self._direct_ends
        for log in {part.log.id: part.log for part in batch.parts}.values():
            log.next_offset = log.visible_end
            while log.epochs and log.epochs[-1][1] >= log.next_offset:
                log.epochs.pop()
        for unit in batch.units:
            self.pending_bytes -= unit.size
            unit.ticket.resolve(error)

    def fail(self, error: BaseException) -> None:
        """A write or sync failed: nothing is confirmed any more. What is on disk is judged by the next start."""
        if self.failure is None:
            self.failure = (
                error if isinstance(error, StorageFailed) else StorageFailed(f"writing to {self.root} failed: {error}")
            )
            self.failure.__cause__ = error
        units = [*(self._in_flight.units if self._in_flight else ()), *self._pending]
        self._in_flight = None
        self._pending.clear()
        self.pending_bytes = 0
        for unit in units:
            unit.ticket.resolve(self.failure)
        drained, self._drained = self._drained, []
        for callback in drained:
            callback()
        self._close_when_idle()

    def checkpoint(self, done: Callable[[BaseException | None], object] | None = None) -> None:
        self._checkpoints.run(done=done)

    @property
    def checkpoint_bytes_since(self) -> int:
        """What a start after a kill would have to look at."""
        return self._checkpoints.bytes_since

    def checkpoint_finished(self) -> None:
        self._close_when_idle()

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
            self._checkpoints.tick()
            self.maintenance.tick()


def ends_of(log: Log) -> Ends:
    return Ends(log.id, log.epoch, log.start_offset, log.visible_end, log.durable_end, log.stable_end)


def log_key(log_id: int) -> bytes:
    return log_id.to_bytes(8, "big")


def pack_epochs(epochs: list[tuple[int, int]]) -> bytes:
    return b"".join(epoch.to_bytes(8, "big") + start.to_bytes(8, "big") for epoch, start in epochs)


def unpack_epochs(raw: bytes) -> list[tuple[int, int]]:
    return [
        (int.from_bytes(raw[at : at + 8], "big"), int.from_bytes(raw[at + 8 : at + 16], "big"))
        for at in range(0, len(raw), 16)
    ]


__all__ = ["LogSpec", "RecoveryReport", "Shard"]
