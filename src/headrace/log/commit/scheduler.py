"""Schedules rounds: one at a time, from the staged units to the resolved tickets. Runs on the owner thread."""

from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from functools import partial
from itertools import islice

from headrace.errors import DiskFull, HeadraceError, LogClosed, StorageError
from headrace.log.commit.checkpoint import Checkpoints
from headrace.log.commit.committer import Committer
from headrace.log.commit.context import CommitContext
from headrace.log.commit.journal import JournalFull
from headrace.log.commit.journal_entry import END_BYTES, CommittedRound, LogEpochEnd
from headrace.log.commit.plan import Plan
from headrace.log.commit.round import LogEnd, Round, Staging, Unit, resolve_all
from headrace.log.disk.disk import Ran
from headrace.log.segments import epochs
from headrace.log.state.changes import PUT, StateChange
from headrace.log.state.store import DiskStateStore
from headrace.log.state.tables import STARTS


class RoundState(Enum):
    """State of the round that is under way (`Staging.in_flight`).

    IDLE -> WRITING -> IDLE is the normal course. A round leaves WAITING_FOR_JOURNAL when a checkpoint has freed a
    journal file (back to WRITING), and WAITING_FOR_SPACE when a retry found room (IDLE). A failure leads to IDLE.
    """

    IDLE = auto()  # no round is under way
    WRITING = auto()  # queued for the worker, or being written by it or by an I/O chain
    WAITING_FOR_JOURNAL = auto()  # not written: no journal file is free
    WAITING_FOR_SPACE = auto()  # durable in the journal, and the disk has no room for it in the segments


class RoundScheduler:
    def __init__(
        self,
        context: CommitContext,
        staging: Staging,
        committer: Committer,
        checkpoints: Checkpoints,
        state: DiskStateStore,
    ) -> None:
        self._staging = staging
        self._committer = committer
        self._checkpoints = checkpoints
        self._values = state
        self._worker = context.worker
        self._status = context.status
        self._counters = context.counters
        self._clock = context.clock
        # Half of a journal file: headers, ends and epochs that the entry adds to the parts have the other half.
        self._bytes_max = min(context.settings.round_bytes_max, committer.journal.capacity // 2)
        self._settle_sync_interval_ms = context.settings.settle_sync_interval_ms
        self.state = RoundState.IDLE
        # Result of the round that is WAITING_FOR_SPACE. `Committer.unapplied` cannot stand for that state: while the
        # worker applies any round, its runs are in there, too.
        self._result: CommittedRound | None = None
        self._is_moving_starts = False  # an entry is being written beside a round that is WAITING_FOR_SPACE
        self._drained: list[Callable[[], object]] = []
        self._direct_ends: dict[int, LogEpochEnd] = {}  # by log: synced, and in no journal entry or checkpoint yet
        self._unsynced_since: float | None = None  # since when the journal holds lazy changes that no sync has covered
        staging.start_round = self.start_round

    @property
    def is_idle(self) -> bool:
        return self.state is RoundState.IDLE and not self._staging.pending and not self._is_moving_starts

    @property
    def waits_for_room(self) -> bool:
        """A round waits for disk space, or for a place in the journal."""
        return self.state in (RoundState.WAITING_FOR_SPACE, RoundState.WAITING_FOR_JOURNAL)

    @property
    def has_unsynced_changes(self) -> bool:
        return self._unsynced_since is not None

    def on_drain(self, callback: Callable[[], object]) -> None:
        """Call back, once, when nothing waits for the disk any more."""
        if self._staging.pending_bytes == 0:
            self._staging.defer(callback)
        else:
            self._drained.append(callback)

    # The course of a round.

    def start_round(self) -> None:
        """Called in the event-loop iteration after the first append, or at once by a caller that knows that nothing
        more comes."""
        staging = self._staging
        staging.is_scheduled = False
        is_blocked = self.state is not RoundState.IDLE or self._is_moving_starts or self._status.failure is not None
        if is_blocked or not staging.pending:
            return
        batch = Round()
        dropped = batch.fill(staging.pending, self._bytes_max)
        for unit in dropped:
            staging.pending_bytes -= unit.size
        if batch.units:
            if self._direct_ends:
                ends_max = self._committer.journal.capacity // 8 // END_BYTES
                batch.ends = list(islice(self._direct_ends.values(), ends_max))
            for log in batch.assign_offsets():
                batch.changes.append(StateChange(PUT, epochs.TABLE, epochs.log_key(log.id), epochs.pack(log.epochs)))
            staging.in_flight = batch
            self._submit(batch)
        try:  # only once the round is under way: a callback may stage something else
            resolve_all(dropped, LogClosed("the log was deleted"))
        finally:
            if staging.in_flight is None:
                self._next()

    def _submit(self, batch: Round) -> None:
        self.state = RoundState.WRITING
        self._worker.take_turn(partial(self._write, batch))

    def _write(self, batch: Round) -> None:
        """In the round's turn: run it as an I/O chain if possible, else on the worker thread."""
        if batch is not self._staging.in_flight:
            self._worker.release_turn()  # a failure came first and has resolved its tickets
            return
        try:
            plan = self._committer.plan(batch)
            if plan is not None:
                self._worker.run(plan.steps, partial(self._written, batch, plan))
        except BaseException as error:  # noqa: BLE001 - handled as if the worker had raised it
            self._worker.release_turn()
            self._round_done(batch, None, error)
            return
        if plan is None:
            self._worker.submit_in_turn(lambda: self._committer.commit(batch), partial(self._round_done, batch))

    def _written(self, batch: Round, plan: Plan, ran: Ran | None, error: BaseException | None) -> None:
        result = None
        try:
            if ran is not None:
                result = plan.finish(ran)
        except BaseException as bug:  # noqa: BLE001 - handled as if the worker had raised it
            error = bug
        if ran is not None and result is not None and ran.error is not None:
            self._worker.submit_in_turn(lambda: plan.resolve_partial(ran, result), partial(self._round_done, batch))
        else:
            self._worker.release_turn()
            self._round_done(batch, result, error)

    def _round_done(self, batch: Round, result: CommittedRound | None, error: BaseException | None) -> None:
        if batch is not self._staging.in_flight:
            # Its tickets are resolved already, by the failure of another job or by the first of two retries. The round
            # in flight is another one, which has not been written.
            return
        self._result = None
        if error is None and not self._committer.is_stuck:
            assert result is not None
            touched = self._apply(batch, result).values()
            self._notify(batch, None, touched, is_synced=len(result.direct_ends) == len(touched))
            return
        if isinstance(error, JournalFull):
            # Back-pressure: the round waits for the checkpoint that frees a journal file.
            self.state = RoundState.WAITING_FOR_JOURNAL
            self._checkpoints.run()
            return
        if isinstance(error, DiskFull):
            self._status.is_full = True
            self._undo_offsets(batch)
            self._notify(batch, error, (), self._take_pending_appends())
        elif error is not None:
            self._status.fail(error)
        else:
            assert result is not None
            self.state = RoundState.WAITING_FOR_SPACE
            self._result = result
            self._status.is_full = True  # it is durable but not readable yet; retry_apply() is called from the tick
            self._status.report_idle()

    def retry_apply(self) -> None:
        """There may be disk space again for a round that is WAITING_FOR_SPACE."""
        batch, result = self._staging.in_flight, self._result
        if batch is not None and result is not None:
            self._worker.submit(lambda: self._committer.apply_rest(result), partial(self._round_done, batch))

    def on_journal_freed(self) -> None:
        if self.state is RoundState.WAITING_FOR_JOURNAL and self._staging.in_flight is not None:
            self._submit(self._staging.in_flight)

    def _next(self) -> None:
        self.state = RoundState.IDLE
        self._staging.in_flight = None
        if self._is_moving_starts:
            return  # _starts_moved() goes on: no later start may be stored before these
        if self._staging.pending:
            self.start_round()
        elif self._drained:
            drained, self._drained = self._drained, []
            for callback in drained:
                callback()
        self._status.report_idle()

    def fail(self, failure: StorageError) -> None:
        """Resolve all tickets with the failure. A job that the worker still has may end in any way."""
        staging = self._staging
        units = [*(staging.in_flight.units if staging.in_flight else ()), *staging.pending]
        self.state = RoundState.IDLE
        staging.in_flight = None
        staging.pending.clear()
        staging.pending_bytes = 0
        drained, self._drained = self._drained, []
        try:
            resolve_all(units, failure)
        finally:
            for callback in drained:
                callback()

    # The outcome of a round.

    def _notify(
        self,
        batch: Round,
        error: HeadraceError | None,
        touched: Iterable[LogEnd],
        refused: Sequence[Unit] = (),
        *,
        is_synced: bool = False,
    ) -> None:
        """Resolve the tickets and wake the readers. An error of a callback is raised, for the event loop to log, after
        all others were called. `is_synced`: all of the round is durable in its segments, not only in the journal."""
        self._staging.pending_bytes -= batch.size
        try:
            resolve_all([*batch.units, *refused] if refused else batch.units, error)
        finally:
            try:
                _wake_all(touched)
            finally:
                if error is None:
                    self._checkpoints.round_committed(batch.size, touched, is_synced=is_synced)
                self._next()

    def _apply(self, batch: Round, result: CommittedRound) -> dict[int, LogEnd]:
        """Apply a committed round to memory; returns the logs it wrote to, by id."""
        if result.has_entry and batch.ends:
            self._forget_ends(batch.ends)
        for end in result.direct_ends:
            self._direct_ends[end[0]] = end
        if batch.must_sync:
            self._unsynced_since = None
        elif batch.changes and self._unsynced_since is None:
            self._unsynced_since = self._clock.monotonic()
        if batch.changes:
            self._values.apply(batch.changes)
        records, touched = batch.apply()
        self._count(batch, records, result)
        return touched

    def _count(self, batch: Round, records: int, result: CommittedRound) -> None:
        counters = self._counters
        counters.rounds += 1
        counters.records_written += records
        counters.bytes_written += batch.size
        counters.segments_created += result.segments_created
        counters.syncs += result.syncs
        counters.round_records.observe(records)
        if result.syncs:
            counters.sync_s.observe(result.sync_s)

    def _undo_offsets(self, batch: Round) -> None:
        """The round was refused as a whole and left nothing on the disk: the next one gets its offsets."""
        self._counters.refused_full += 1
        for log in {part.log.id: part.log for part in batch.parts}.values():
            log.next_offset = log.visible_end
            while log.epochs and log.epochs[-1][1] >= log.next_offset:
                log.epochs.pop()

    def _take_pending_appends(self) -> list[Unit]:
        """Appends that were staged behind a refused round are refused with it, as new ones are from now on. A producer
        numbered them as if the round had been stored: stored without it, its records would be out of order."""
        refused = [unit for unit in self._staging.pending if unit.parts]
        self._set_pending(unit for unit in self._staging.pending if not unit.parts)
        self._staging.pending_bytes -= sum(unit.size for unit in refused)
        return refused

    def _set_pending(self, units: Iterable[Unit]) -> None:
        units = list(units)
        self._staging.pending.clear()
        self._staging.pending.extend(units)

    # Ends of logs that were synced without the journal.

    def _forget_ends(self, ends: Iterable[LogEpochEnd]) -> None:
        """They are in the journal. An end that has moved since stays."""
        for end in ends:
            if self._direct_ends.get(end[0]) == end:
                del self._direct_ends[end[0]]

    def on_checkpointed(self, log_id: int, next_offset: int) -> None:
        """A checkpoint has recorded the log's end."""
        end = self._direct_ends.get(log_id)
        if end is not None and end[2] <= next_offset:
            del self._direct_ends[log_id]

    # Called from the tick.

    def sync_changes(self, now: float) -> None:
        """Sync lazy changes that have waited for the settle interval."""
        interval, since = self._settle_sync_interval_ms, self._unsynced_since
        if since is not None and interval and (now - since) * 1000 >= interval:
            self._unsynced_since = None
            self._worker.submit(self._committer.sync_journal, self._changes_synced)

    def _changes_synced(self, _result: object, error: BaseException | None) -> None:
        if error is not None:
            self._status.fail(error)

    def move_starts(self) -> None:
        """Commit pending moves of log starts while a round is WAITING_FOR_SPACE: they need no space and make some.

        Not those of logs whose start the round itself moves: the round's move would be applied last."""
        batch = self._staging.in_flight
        if batch is None or self.state is not RoundState.WAITING_FOR_SPACE or self._is_moving_starts:
            return
        moved = {change.key for change in batch.changes if change.table == STARTS}
        moves: list[Unit] = []
        others: list[Unit] = []
        room = self._committer.journal.capacity // 2  # as in a round: the rest of them wait for the next tick
        for unit in self._staging.pending:
            may_go = _only_moves_starts(unit, moved)
            room -= unit.size if may_go else 0
            (moves if may_go and room >= 0 else others).append(unit)
        if not moves:
            return
        self._is_moving_starts = True
        self._set_pending(others)
        changes = [change for unit in moves for change in unit.changes]
        self._worker.submit(
            lambda: self._committer.commit_changes(changes), partial(self._starts_moved, moves, changes)
        )

    def _starts_moved(
        self, moves: list[Unit], changes: list[StateChange], _result: object, error: BaseException | None
    ) -> None:
        self._is_moving_starts = False
        failure = self._status.failure or error
        try:
            if failure is None:
                self._staging.pending_bytes -= sum(unit.size for unit in moves)
                self._values.apply(changes)
                resolve_all(moves)
                return
            self._set_pending([*moves, *self._staging.pending])
            if not isinstance(failure, JournalFull | DiskFull):
                self._status.fail(failure)  # perhaps again: these units were not pending when it failed first
        finally:
            if self._staging.in_flight is None:
                self._next()


def _only_moves_starts(unit: Unit, excluded: set[bytes]) -> bool:
    return not unit.parts and all(
        change.table == STARTS and change.kind == PUT and change.key not in excluded for change in unit.changes
    )


def _wake_all(logs: Iterable[LogEnd]) -> None:
    """Wake the readers of every log even if a callback raises, then raise the first error."""
    raised: Exception | None = None
    for log in logs:
        try:
            log.wake()
        except Exception as bug:  # noqa: BLE001 - see above
            raised = raised or bug
    if raised is not None:
        raise raised
