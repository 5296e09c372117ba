"""What is staged, the round that is under way, and what became of it: one round at a time, on the owner thread."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from headrace.errors import DiskFull, HeadraceError, LogClosed, StorageError
from headrace.log.commit.journal import JournalFull
from headrace.log.commit.journal_entry import END_BYTES, PUT, Committed, StateChange
from headrace.log.commit.plan import Plan
from headrace.log.commit.round import Round, Staging, Unit, resolve_all
from headrace.log.disk.disk import Ran
from headrace.log.log import Log, wake_all
from headrace.log.segments import epochs
from headrace.log.state.tables import STARTS

if TYPE_CHECKING:
    from headrace.log.shard import Shard


class RoundScheduler(Staging):
    def __init__(self, shard: "Shard") -> None:
        super().__init__(shard)
        self._waits_for_journal = False
        self._drained: list[Callable[[], object]] = []
        self._direct_ends: dict[int, tuple[int, int, int]] = {}  # by log: proven, in no entry and no checkpoint yet
        self._is_passing = False
        # What became of a round that waits for room in its segments. The committer's own list says less: while the
        # worker brings a round there, it is on it, too.
        self._stuck: Committed | None = None

    @property
    def is_idle(self) -> bool:
        return self.in_flight is None and not self.pending and not self._is_passing

    @property
    def waits_for_room(self) -> bool:
        """On the disk: for a round that lies in the journal and not in its segments, or has no place in the journal."""
        return self.in_flight is not None and (self._stuck is not None or self._waits_for_journal)

    def begin(self) -> None:
        """For who knows that nothing more comes in this turn of the loop: the disk need not wait for the next."""
        self.start_round()

    def on_drain(self, callback: Callable[[], object]) -> None:
        """Call back, once, when nothing is waiting for the disk any more."""
        if self.pending_bytes == 0:
            self.shard.defer(callback)
        else:
            self._drained.append(callback)

    def start_round(self) -> None:
        self.is_scheduled = False
        if self.in_flight is not None or self._is_passing or self.shard.failure is not None or not self.pending:
            return
        batch = Round()
        # Half the journal's file: what the entry adds to the parts (headers, ends, epochs) has the other half.
        limit = min(self.shard.settings.round_bytes_max, self.shard.journal.capacity // 2)
        gone = batch.fill(self.pending, limit)
        for unit in gone:
            self.pending_bytes -= unit.size
        if batch.units:
            if self._direct_ends:
                batch.ends = list(islice(self._direct_ends.values(), self.shard.journal.capacity // 8 // END_BYTES))
            for log in batch.number():
                batch.changes.append(StateChange(PUT, epochs.TABLE, epochs.log_key(log.id), epochs.pack(log.epochs)))
            self.in_flight = batch
            self._submit(batch)
        try:  # not before the round is under way: who is told may stage something else
            resolve_all(gone, LogClosed("the log was deleted"))
        finally:
            if self.in_flight is None:
                self._next()

    def _submit(self, batch: Round) -> None:
        self.shard.worker.enter(partial(self._write, batch))

    def _write(self, batch: Round) -> None:
        """In the round's turn: as a chain if it can be one, else by the worker."""
        if batch is not self.in_flight:
            self.shard.worker.leave()  # a failure was faster, and was told
            return
        try:
            plan = self.shard.committer.plan(batch)
            if plan is not None:
                self.shard.worker.run(plan.steps, partial(self._written, batch, plan))
        except BaseException as error:  # noqa: BLE001 - as if the worker had met it
            self.shard.worker.leave()
            self._round_done(batch, None, error)
            return
        if plan is None:
            self.shard.worker.give(lambda: self.shard.committer.commit(batch), partial(self._round_done, batch))

    def _written(self, batch: Round, plan: Plan, ran: Ran | None, error: BaseException | None) -> None:
        result = None
        try:
            if ran is not None:
                result = plan.finish(ran)
        except BaseException as bug:  # noqa: BLE001 - as if the worker had met it
            error = bug
        if ran is not None and result is not None and ran.error is not None:
            self.shard.worker.give(lambda: plan.mend(ran, result), partial(self._round_done, batch))
        else:
            self.shard.worker.leave()
            self._round_done(batch, result, error)

    def _round_done(self, batch: Round, result: Committed | None, error: BaseException | None) -> None:
        if batch is not self.in_flight:
            # It was told already: by a failure of another job, or by the first of two retries. What is in flight
            # by now has not been written, and must not be taken for this one.
            return
        self._stuck = None
        if error is None and not self.shard.committer.is_stuck:
            assert result is not None
            touched = self._complete(batch, result).values()
            self._tell(batch, None, touched, is_synced=len(result.direct_ends) == len(touched))
            return
        if isinstance(error, JournalFull):
            # Back-pressure: the round waits for the checkpoint that frees a journal file.
            self._waits_for_journal = True
            self.shard.checkpoints.run()
            return
        if isinstance(error, DiskFull):
            self.shard.is_full = True
            self._take_back(batch)
            self._tell(batch, error, (), self._take_behind())
        elif error is not None:
            self.shard.fail(error)
        else:
            assert result is not None
            self._stuck = result
            self.shard.is_full = True  # durable, but not readable yet: tick() tries again
            self.shard.close_when_idle()

    def retry_stuck(self) -> None:
        committer, stuck = self.shard.committer, self._stuck
        if self.in_flight is not None and stuck is not None:
            self.shard.worker.submit(lambda: committer.apply_rest(stuck), partial(self._round_done, self.in_flight))

    def let_starts_pass(self) -> None:
        """While a round waits for room in its segments: to move the start of a log takes none, and makes some.

        Unless the round moves it, too: what that one says would be applied last."""
        if self.in_flight is None or self._stuck is None or self._is_passing:
            return
        moved = {change.key for change in self.in_flight.changes if change.table == STARTS}
        passing: list[Unit] = []
        others: list[Unit] = []
        room = self.shard.journal.capacity // 2  # as in a round: the rest of them have the next turn
        for unit in self.pending:
            may_pass = _moves_starts(unit, moved)
            room -= unit.size if may_pass else 0
            (passing if may_pass and room >= 0 else others).append(unit)
        if not passing:
            return
        self._is_passing = True
        self._set_pending(others)
        changes = [change for unit in passing for change in unit.changes]
        self.shard.worker.submit(lambda: self.shard.committer.note(changes), partial(self._passed, passing, changes))

    def _passed(
        self, passing: list[Unit], changes: list[StateChange], _result: object, error: BaseException | None
    ) -> None:
        self._is_passing = False
        failure = self.shard.failure or error
        try:
            if failure is None:
                self.pending_bytes -= sum(unit.size for unit in passing)
                self.shard.apply_changes(changes)
                resolve_all(passing)
                return
            self._set_pending([*passing, *self.pending])
            if not isinstance(failure, JournalFull | DiskFull):
                self.shard.fail(failure)  # maybe not for the first time: these were not told then
        finally:
            if self.in_flight is None:
                self._next()

    def _set_pending(self, units: Iterable[Unit]) -> None:
        units = list(units)
        self.pending.clear()
        self.pending.extend(units)

    def journal_freed(self) -> None:
        if self._waits_for_journal and self.in_flight is not None:
            self._waits_for_journal = False
            self._submit(self.in_flight)

    def _next(self) -> None:
        self.in_flight = None
        if self._is_passing:
            return  # it goes on when that is known: no later start may be stored before
        if self.pending:
            self.start_round()
        elif self._drained:
            drained, self._drained = self._drained, []
            for callback in drained:
                callback()
        self.shard.close_when_idle()

    def _take_behind(self) -> list[Unit]:
        """Appends that wait behind a round that was refused go with it, as those do that come now: they were numbered
        as if it were there, and what a producer sent first must not be stored last, or never."""
        behind = [unit for unit in self.pending if unit.parts]
        self._set_pending(unit for unit in self.pending if not unit.parts)
        self.pending_bytes -= sum(unit.size for unit in behind)
        return behind

    def _tell(
        self,
        batch: Round,
        error: HeadraceError | None,
        touched: Iterable[Log],
        behind: Sequence[Unit] = (),
        *,
        is_synced: bool = False,
    ) -> None:
        """What became of it. A bug in somebody's callback is for the loop's log, and holds up nobody else.
        `is_synced`: all of it lies durably where it belongs, not only in the journal."""
        self.pending_bytes -= batch.size
        try:
            resolve_all([*batch.units, *behind] if behind else batch.units, error)
        finally:
            try:
                wake_all(touched)
            finally:
                if error is None:
                    self.shard.checkpoints.wrote(batch.size, touched, is_synced=is_synced)
                self._next()

    def _complete(self, batch: Round, result: Committed) -> dict[int, Log]:
        """Take in that it is durable. The logs that it wrote to, by id."""
        if result.has_entry and batch.ends:
            self._forget_ends(batch.ends)
        for end in result.direct_ends:
            self._direct_ends[end[0]] = end
        if batch.must_sync:
            self.shard.unsynced_since = None
        elif batch.changes and self.shard.unsynced_since is None:
            self.shard.unsynced_since = self.shard.clock.monotonic()
        if batch.changes:
            self.shard.apply_changes(batch.changes)
        records, touched = batch.take_in()
        self._count(batch, records, result)
        return touched

    def _forget_ends(self, ends: Iterable[tuple[int, int, int]]) -> None:
        """They are in the journal. An end that has moved on meanwhile is another one."""
        for end in ends:
            if self._direct_ends.get(end[0]) == end:
                del self._direct_ends[end[0]]

    def checkpointed(self, log_id: int, next_offset: int) -> None:
        """A checkpoint proves the log up to there."""
        proven = self._direct_ends.get(log_id)
        if proven is not None and proven[2] <= next_offset:
            del self._direct_ends[log_id]

    def _count(self, batch: Round, records: int, result: Committed) -> None:
        counters = self.shard.counters
        counters.rounds += 1
        counters.records_written += records
        counters.bytes_written += batch.size
        counters.segments_created += result.segments_created
        counters.syncs += result.syncs
        counters.round_records.observe(records)
        if result.syncs:
            counters.sync_s.observe(result.sync_s)

    def _take_back(self, batch: Round) -> None:
        """The round was refused as a whole and left nothing behind: its offsets go to the next one."""
        self.shard.counters.refused_full += 1
        for log in {part.log.id: part.log for part in batch.parts}.values():
            log.next_offset = log.visible_end
            while log.epochs and log.epochs[-1][1] >= log.next_offset:
                log.epochs.pop()

    def fail(self, failure: StorageError) -> None:
        """Whoever waits is told; what is under way in the worker's lane may end as it likes."""
        units = [*(self.in_flight.units if self.in_flight else ()), *self.pending]
        self.in_flight = None
        self.pending.clear()
        self.pending_bytes = 0
        drained, self._drained = self._drained, []
        try:
            resolve_all(units, failure)
        finally:
            for callback in drained:
                callback()


def _moves_starts(unit: Unit, without: set[bytes]) -> bool:
    """And does nothing else."""
    return not unit.parts and all(
        change.table == STARTS and change.kind == PUT and change.key not in without for change in unit.changes
    )
