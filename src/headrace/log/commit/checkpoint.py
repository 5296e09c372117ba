"""Checkpoints: what the journal holds is synced where it belongs, so that the journal's files can be used again.

In three steps, because three threads know three things:
1. the worker, between two rounds, says where every log's writer stands and which files are dirty;
2. the owner takes the state of exactly the rounds before that;
3. the keeper syncs the files and writes state and marker, while further rounds go on.

Also the clock of the shard: async logs are flushed, settles synced and full disks tried again from here.
"""

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from headrace.errors import DiskFull, LogClosed, StorageFailed
from headrace.log.disk.file_cache import NO_FILES, Dirty
from headrace.log.log import Log
from headrace.log.state.store import Marker
from headrace.log.state.tables import ENDS

if TYPE_CHECKING:
    from headrace.log.shard import Shard

logger = logging.getLogger("headrace.log")

MB = 1 << 20
CALM_LOOK_S = 1.0  # at the disk's room, while nothing is written: others write there, too
ROOM_HOLDS_S = 5.0  # a disk that is full again within this time was full all along
WRITE_BACK_BYTES = 1 << 20  # more at once keeps the disk from the sync of a round for longer
WRITE_BACK_LOGS_MAX = 64

Done = Callable[[BaseException | None], object]


class _Standing(NamedTuple):
    sequence: int
    ends: list[tuple[int, bytes, int]]  # log id, saved writer, next offset
    dirty: Dirty


class Checkpoints:
    def __init__(self, shard: "Shard") -> None:
        self._shard = shard
        shard.files.sync_filesystem = shard.sync_filesystem
        self._files_live_max = max(2, shard.settings.journal_files - 1)  # of the journal, before one is due
        self.is_running = False
        self._again = False
        self._is_last = False  # the clean one has begun
        self._done: list[Done] = []  # of the one that runs
        self._waiting: list[Done] = []  # of the next one
        self._touched: set[int] = set()
        self.bytes_since = 0
        self._last = shard.clock.monotonic()
        self._leftover: dict[bytes, bytes | None] = {}  # changes that found no room last time
        self._flushing: set[int] = set()
        self._flushed: dict[int, float] = {}
        self._late: set[int] = set()  # logs whose flush found no descriptor: the next tick tries again
        self._growing: set[Log] = set()
        self._grown_bytes = 0
        self._is_writing_back = False
        self._is_making_journal = False
        self._room_seen: tuple[int, float] | None = None  # bytes_since, and when
        self._full_since: float | None = None  # as the log was told
        self._full_until = 0.0
        self._refused_before = 0

    def wrote(self, size: int, logs: Iterable[Log], *, is_synced: bool) -> None:
        for log in logs:
            self._touched.add(log.id)
        self.bytes_since += size
        if not is_synced:
            self._write_back(size, logs)
        self._make_journal()
        if self.bytes_since >= self._shard.settings.checkpoint_bytes or self._journal_is_filling():
            self.run()

    def include(self, log: Log) -> None:
        """Have the next one say where this log's writer stands: a round that is under way may have moved it."""
        self._touched.add(log.id)

    def _write_back(self, size: int, logs: Iterable[Log]) -> None:
        """Have segments written as they grow: a checkpoint that finds them all to be written keeps the disk from the
        syncs of rounds for as long as that takes."""
        self._growing.update(logs)
        self._grown_bytes += size
        if self._grown_bytes < WRITE_BACK_BYTES or self._is_writing_back:
            return
        growing, self._growing, self._grown_bytes = self._growing, set(), 0
        if len(growing) > WRITE_BACK_LOGS_MAX:
            return  # little of each: not worth so many calls
        writers = [log.tail.writer for log in growing]
        paths = [writer.segment.data_path for writer in writers if writer is not None]
        self._is_writing_back = True
        self._shard.keeper.submit(lambda: self._shard.files.start_writing_back(paths), self._wrote_back)

    def _wrote_back(self, _result: object, error: BaseException | None) -> None:
        self._is_writing_back = False
        if error is not None:
            self._shard.fail(error)

    def _make_journal(self) -> None:
        """Before a round needs it, and all who wait for that one would wait for 64 MB of zeros."""
        if self._is_making_journal or not self._shard.journal.wants_another:
            return
        self._is_making_journal = True
        self._shard.keeper.submit(self._shard.journal.make_ahead, self._made_journal)

    def _made_journal(self, _result: object, error: BaseException | None) -> None:
        self._is_making_journal = False
        # Without room for it nothing is lost yet: the round that needs it is refused.
        if error is not None and not (isinstance(error, OSError) and self._shard.committer.lacks_room(error)):
            self._shard.fail(error)

    def _journal_is_filling(self) -> bool:
        return self._shard.journal.files_live >= self._files_live_max

    def tick(self) -> None:
        shard = self._shard
        now = shard.clock.monotonic()
        if not self._knows_room(now):
            self._look_for_room(now)
            if shard.failure is not None:
                return
        shard.intake.let_starts_pass()
        interval = shard.settings.settle_sync_interval_ms
        if shard.unsynced_since is not None and interval and (now - shard.unsynced_since) * 1000 >= interval:
            shard.unsynced_since = None
            shard.worker.submit(shard.committer.sync_journal, self._synced)
        self._flush_async(now)
        due = (now - self._last) * 1000 >= shard.settings.checkpoint_interval_ms
        if due and (self._touched or shard.state.is_dirty or self._leftover):
            self.run()

    def _knows_room(self, now: float) -> bool:
        """Who is idle need not ask twenty times a second."""
        if self._room_seen is None or self._shard.is_full or self._full_since is not None:
            return False
        bytes_then, seen_at = self._room_seen
        return bytes_then == self.bytes_since and now < seen_at + CALM_LOOK_S

    def _look_for_room(self, now: float) -> None:
        shard = self._shard
        self._room_seen = self.bytes_since, now
        try:
            free_bytes = shard.disk.free_bytes(shard.root)
        except OSError as error:  # what is written there now, nobody finds again
            shard.fail(StorageFailed(f"the data folder {shard.root} is out of reach: {error.strerror}"))
            return
        has_room = free_bytes >= shard.settings.disk_reserve
        if not has_room:
            shard.is_full = True  # before the disk says so: checkpoints and deletions still need room
        self._tell_of_room(now, free_bytes)
        if has_room and shard.is_full:
            self._try_again()

    def _synced(self, _result: object, error: BaseException | None) -> None:
        if error is not None:
            self._shard.fail(error)

    def _tell_of_room(self, now: float, free_bytes: int) -> None:
        shard = self._shard
        if shard.is_full:
            self._full_until = now
            if self._full_since is None:
                self._full_since, self._refused_before = now, shard.counters.refused_full
                words = "the disk is full: %s has %.1f MB free, disk_reserve is %.1f MB; publishes are refused"
                logger.error(words, shard.root, free_bytes / MB, shard.settings.disk_reserve / MB)
        elif self._full_since is not None and now - self._full_until >= ROOM_HOLDS_S:
            refused = shard.counters.refused_full - self._refused_before
            words = "the disk has room again: %.1f MB are free; it was full for %.1f s, refused: %d"
            logger.warning(words, free_bytes / MB, self._full_until - self._full_since, refused)
            self._full_since = None

    def _try_again(self) -> None:
        shard = self._shard
        if shard.committer.is_stuck:
            shard.intake.retry_stuck()
        else:
            shard.is_full = False

    def _flush_async(self, now: float) -> None:
        for log_id in list(self._touched):
            log = self._shard.logs.get(log_id)
            if (
                log is None
                or log.is_frozen  # this flush could end after the cut, and call durable what is no more
                or log.durable_end == log.visible_end
                or log_id in self._flushing
            ):
                continue
            since = self._flushed.setdefault(log_id, now)
            settings = log.settings
            due = settings.flush_interval_ms and (now - since) * 1000 >= settings.flush_interval_ms
            has_many = settings.flush_bytes and log.unflushed_bytes >= settings.flush_bytes
            if due or has_many or log_id in self._late:
                self._flush(log, now)

    def _flush(self, log: Log, now: float) -> None:
        self._flushing.add(log.id)
        self._late.discard(log.id)
        self._flushed[log.id] = now
        log.unflushed_bytes = 0

        # The worker only says what there is: a sync of its own would hold up everything that is confirmed at once.
        def stand() -> tuple[int, dict[str, int]]:
            return log.tail.next_offset, log.tail.unsynced()

        def stood(standing: tuple[int, dict[str, int]], error: BaseException | None) -> None:
            if error is not None:
                self._flush_done(log, error)
                return
            end, written = standing
            self._shard.keeper.submit(
                lambda: log.tail.sync_files(written), lambda _, failed: self._flush_done(log, failed, end, written)
            )

        self._shard.worker.submit(stand, stood)

    def _flush_done(
        self, log: Log, error: BaseException | None, end: int = 0, written: Mapping[str, int] | None = None
    ) -> None:
        self._flushing.discard(log.id)
        if isinstance(error, OSError) and error.errno in NO_FILES:
            self._shard.is_full = True  # as for a checkpoint: what came meanwhile would be as unsafe
            self._late.add(log.id)
            return
        if error is not None:
            self._shard.fail(error)
            return
        if not log.is_closed:
            self._is_durable(log, end)
        self._shard.worker.submit(lambda: log.tail.synced(written or {}), self._synced)

    @staticmethod
    def _is_durable(log: Log, end: int) -> None:
        """Not what nobody was told of yet: a round that is under way may still be taken back as a whole."""
        log.durable_end = max(log.durable_end, min(end, log.visible_end))

    def run(self, *, clean: bool = False, done: Done | None = None) -> None:
        """Start one, or have one follow the one that runs: that one may have begun too early for the caller."""
        if done is not None:
            self._waiting.append(done)
        refusal = self._shard.failure
        if (self._is_last or self._shard.is_closed) and refusal is None:
            refusal = LogClosed("the broker is stopping")  # a further marker would say that it did not stop cleanly
        if refusal is not None:
            waiting, self._waiting = self._waiting, []
            for callback in waiting:
                callback(refusal)
            return
        if self.is_running:
            self._again = True
            return
        self.is_running = True
        self._is_last = clean
        self._done, self._waiting = self._waiting, []
        touched, self._touched = self._touched, set()
        self.bytes_since = 0
        self._last = self._shard.clock.monotonic()
        logs = [self._shard.logs[i] for i in touched if i in self._shard.logs]
        self._shard.worker.submit(
            lambda: self._stand(logs), lambda standing, error: self._collect(standing, error, clean)
        )

    def _stand(self, logs: list[Log]) -> _Standing:
        ends = []
        for log in logs:
            saved = log.tail.saved_writer()
            if saved is not None:
                ends.append((log.id, saved.pack(), saved.next_offset))
        # A round that found no room is in the journal and nowhere else: the marker must not include it.
        return _Standing(self._shard.committer.applied, ends, self._shard.files.take_dirty())

    def _collect(self, standing: _Standing, error: BaseException | None, clean: bool) -> None:
        # After a failure the files hold less than their writers believe: no marker may say otherwise.
        error = error or self._shard.failure
        if error is not None:
            self._finish(error)
            return
        shard = self._shard
        for log_id, saved, _ in standing.ends:
            if log_id in shard.logs:
                shard.state.apply_put(ENDS, log_id.to_bytes(8, "big"), saved)
        rewrite = shard.state.needs_rewrite
        changes = dict([*self._leftover.items(), *shard.state.take_dirty()])
        records = dict(shard.state.take_all()) if rewrite else changes
        marker = Marker(standing.sequence, shard.epoch, clean)
        shard.keeper.submit(
            lambda: self._write(standing, records, marker, rewrite),
            # Not what was to be written anew: that says nothing of keys which are gone.
            lambda room, failed: self._written(standing, changes, room, failed),
        )

    def _write(self, standing: _Standing, records: dict[bytes, bytes | None], marker: Marker, rewrite: bool) -> bool:
        """False when the state found no room, or no descriptor was free; a sync that fails is final and goes up."""
        try:
            self._shard.files.sync_all(standing.dirty)
        except OSError as error:
            if error.errno not in NO_FILES:  # for a folder, which stays on the list
                raise
            return False
        try:
            self._shard.state.write(list(records.items()), marker, rewrite=rewrite)
        except OSError as error:
            if not self._shard.committer.lacks_room(error):
                raise
            return False
        return True

    def _written(
        self, standing: _Standing, changes: dict[bytes, bytes | None], room: bool, error: BaseException | None
    ) -> None:
        shard = self._shard
        if error is not None:
            self._finish(error)
            return
        if not room:
            self._leftover = changes
            self._touched.update(log_id for log_id, _, _ in standing.ends)  # nothing of them is known to be synced
            shard.is_full = True
            self._finish(None, DiskFull("no room for a checkpoint"))
            return
        self._leftover = {}
        shard.counters.checkpoints += 1
        for log_id, _, next_offset in standing.ends:
            shard.intake.checkpointed(log_id, next_offset)
            log = shard.logs.get(log_id)
            if log is not None:
                self._is_durable(log, next_offset)
        shard.journal.release(standing.sequence)
        shard.intake.journal_freed()
        self._finish(None)

    def _finish(self, error: BaseException | None, refused: DiskFull | None = None) -> None:
        """`refused`: nothing broke, but whoever waits for this checkpoint did not get one."""
        self.is_running = False
        if error is not None:
            self._shard.fail(error)
        done, self._done = self._done, []
        again, self._again = self._again, False
        if error is not None:
            done, self._waiting = [*done, *self._waiting], []
        for callback in done:
            callback(error or refused)
        if again and error is None and not self._shard.is_closed:
            self.run()
        self._shard.checkpoint_finished()
