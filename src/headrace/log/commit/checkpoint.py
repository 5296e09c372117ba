"""Checkpoints: sync the segments that the journal covers, so that the journal's files can be recycled.

A checkpoint has three steps, because three threads own what it needs:
1. the worker, between two rounds, captures where each log's writer stands and which files are dirty;
2. the owner thread takes the state as of exactly the rounds before that;
3. the keeper syncs the files and writes state and marker, while further rounds run.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from headrace.errors import DiskFull, LogClosed
from headrace.log.commit.background_writes import BackgroundWrites
from headrace.log.commit.committer import Committer
from headrace.log.commit.context import CommitContext
from headrace.log.commit.flusher import mark_durable
from headrace.log.commit.round import LogEnd
from headrace.log.disk.file_cache import NO_FILES, Dirty
from headrace.log.state.store import DiskStateStore, Marker
from headrace.log.state.tables import ENDS

Done = Callable[[BaseException | None], object]
Records = dict[bytes, bytes | None]


class WriterPosition(NamedTuple):
    log_id: int
    saved: bytes  # SavedWriter
    next_offset: int


class _Capture(NamedTuple):
    sequence: int
    positions: list[WriterPosition]
    dirty: Dirty


class Checkpoints:
    def __init__(
        self,
        context: CommitContext,
        committer: Committer,
        state: DiskStateStore,
        logs: Mapping[int, LogEnd],
        epoch: int,
        *,
        on_durable: Callable[[Iterable[WriterPosition]], object],
    ) -> None:
        self._context = context
        self._committer = committer
        self._space = committer.space
        self._state = state
        self._logs = logs
        self._epoch = epoch
        self._on_durable = on_durable
        self._background = BackgroundWrites(context, committer)
        self._live_files_max = max(2, context.settings.journal_files - 1)  # journal files before a checkpoint is due
        self.is_running = False
        self._runs_again = False
        self._is_last = False  # the clean checkpoint has begun: none may follow
        self._done: list[Done] = []  # waiters of the checkpoint that runs
        self._waiting: list[Done] = []  # waiters of the next one
        self.touched: set[int] = set()  # logs that were written to since the last checkpoint began
        self.bytes_since = 0
        self._last = context.clock.monotonic()
        self._leftover: Records = {}  # state changes that the last checkpoint found no room for

    def round_committed(self, size: int, logs: Iterable[LogEnd], *, is_synced: bool) -> None:
        for log in logs:
            self.touched.add(log.id)
        self.bytes_since += size
        self._space.logs = len(self.touched)
        if not is_synced:
            self._background.write_back(size, logs)
        self._background.make_journal_file()
        is_due = self.bytes_since >= self._context.settings.checkpoint_bytes or self._journal_is_filling()
        if is_due or (self._space.wants_checkpoint and not self.is_running):
            self.run()

    def include(self, log: LogEnd) -> None:
        """Have the next checkpoint record this log's writer: a round that is under way may have moved it."""
        self.touched.add(log.id)

    def _journal_is_filling(self) -> bool:
        return self._committer.journal.files_live >= self._live_files_max

    def run_if_due(self, now: float) -> None:
        """Called from the tick."""
        is_due = (now - self._last) * 1000 >= self._context.settings.checkpoint_interval_ms
        if (is_due or self._space.wants_checkpoint) and (self.touched or self._state.is_dirty or self._leftover):
            self.run()

    def run(self, *, clean: bool = False, done: Done | None = None) -> None:
        """Start a checkpoint. If one is running, another follows it: the running one may have begun too early for the
        caller. `clean`: the last one, which marks the stop as clean."""
        if done is not None:
            self._waiting.append(done)
        status = self._context.status
        refusal = status.failure
        if (self._is_last or status.is_closed) and refusal is None:
            refusal = LogClosed("the broker is stopping")  # another marker would make the stop look unclean
        if refusal is not None:
            waiting, self._waiting = self._waiting, []
            for callback in waiting:
                callback(refusal)
            return
        if self.is_running:
            self._runs_again = True
            return
        self.is_running = True
        self._is_last = clean
        self._done, self._waiting = self._waiting, []
        touched, self.touched = self.touched, set()
        self.bytes_since = 0
        self._space.checkpoint_began()
        self._last = self._context.clock.monotonic()
        logs = [self._logs[log_id] for log_id in touched if log_id in self._logs]
        self._context.worker.submit(
            lambda: self._capture(logs), lambda capture, error: self._collect(capture, error, clean)
        )

    def _capture(self, logs: list[LogEnd]) -> _Capture:
        """Step 1, on the worker."""
        positions = []
        for log in logs:
            saved = log.tail.saved_writer()
            if saved is not None:
                positions.append(WriterPosition(log.id, saved.pack(), saved.next_offset))
        # A round that found no disk space is only in the journal: the marker must not include it.
        return _Capture(self._committer.applied, positions, self._context.files.take_dirty())

    def _collect(self, capture: _Capture, error: BaseException | None, clean: bool) -> None:
        """Step 2, on the owner thread."""
        # After a failure the files hold less than their writers believe: no marker may include that.
        error = error or self._context.status.failure
        if error is not None:
            self._finish(error)
            return
        state = self._state
        for log_id, saved, _ in capture.positions:
            if log_id in self._logs:
                state.apply_put(ENDS, log_id.to_bytes(8, "big"), saved)
        rewrite = state.needs_rewrite
        changes = dict([*self._leftover.items(), *state.take_dirty()])
        records = dict(state.take_all()) if rewrite else changes
        marker = Marker(capture.sequence, self._epoch, clean)
        self._context.keeper.submit(
            lambda: self._write(capture, records, marker, rewrite),
            # `changes`, not `records`: after a rewrite that found no room, deleted keys must still be deleted.
            lambda has_room, failed: self._written(capture, changes, has_room, failed),
        )

    def _write(self, capture: _Capture, records: Records, marker: Marker, rewrite: bool) -> bool:
        """Step 3, on the keeper. False if the state found no room or no descriptor was free; a failed sync is final and
        raised."""
        try:
            self._context.files.sync_all(capture.dirty)
        except OSError as error:
            if error.errno not in NO_FILES:  # only for a folder, which stays dirty
                raise
            return False
        try:
            self._state.write(list(records.items()), marker, rewrite=rewrite)
        except OSError as error:
            if not self._committer.lacks_room(error):
                raise
            return False
        return True

    def _written(self, capture: _Capture, changes: Records, has_room: bool, error: BaseException | None) -> None:
        if error is not None:
            self._finish(error)
            return
        if not has_room:
            self._leftover = changes
            self.touched.update(position.log_id for position in capture.positions)  # not known to be synced
            self._context.status.is_full = True
            self._finish(None, DiskFull("no room for a checkpoint"))
            return
        self._leftover = {}
        self._context.counters.checkpoints += 1
        self._space.logs = len(self.touched)
        self._space.checkpoint_ended()
        for position in capture.positions:
            log = self._logs.get(position.log_id)
            if log is not None:
                mark_durable(log, position.next_offset)
        self._committer.journal.release(capture.sequence)
        self._on_durable(capture.positions)
        self._finish(None)

    def _finish(self, error: BaseException | None, refused: DiskFull | None = None) -> None:
        """`refused`: nothing failed, but the waiters of this checkpoint did not get one."""
        self.is_running = False
        if error is not None:
            self._context.status.fail(error)
        done, self._done = self._done, []
        again, self._runs_again = self._runs_again, False
        if error is not None:
            done, self._waiting = [*done, *self._waiting], []
        for callback in done:
            callback(error or refused)
        if again and error is None and not self._context.status.is_closed:
            self.run()
        self._context.status.report_idle()
