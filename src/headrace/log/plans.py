"""Rounds as chains: a few writes to open files and a sync or two, which need no interpreter between them.

They are planned and taken in on the owner thread, in the worker's turn. A plan holds files and changes none; what
became of its steps is taken in by `finish`, and where they broke off, a job for the worker, `mend`, says what that
means: what is not durable is refused if the disk only lacks room for it, what is durable is brought to its end.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.errors import DiskFull, StorageFailed
from headrace.log import kernel
from headrace.log.chain import Step
from headrace.log.disk import Ran
from headrace.log.files import OpenFile
from headrace.log.rounds import Committed
from headrace.log.staging import Round, encode

if TYPE_CHECKING:
    from headrace.log.commit import Committer
    from headrace.log.staging import Run


class Plan(ABC):
    def __init__(self, committer: "Committer", runs: "list[Run]") -> None:
        self._committer = committer
        self.runs = runs
        self.steps: list[Step] = []
        self._held: list[OpenFile] = []

    @abstractmethod
    def finish(self, ran: Ran) -> Committed:
        """Take in what the chain has done."""

    @abstractmethod
    def mend(self, ran: Ran, result: Committed) -> Committed:
        """After a chain that broke off."""

    def _hold_segments(self) -> list[Step] | None:
        """A write for each log. None, and nothing held, when one takes more than that: a new segment, an index."""
        steps = []
        for log, parts in self.runs:
            data = [part.data for part in parts]
            step = log.tail.append_step(data, kernel.total(data))
            if step is None:
                self._let_go(dirty=False)
                return None
            steps.append(step[0])
            self._held.append(step[1])
        return steps

    def _let_go(self, *, dirty: bool) -> None:
        for file in self._held:
            self._committer.files.let_go(file, dirty=dirty)
        self._held = []

    def _slot_step(self, run: "Run") -> Step:
        log, parts = run
        return self._committer.slots.step(self._committer.ends(log, parts[-1].next_offset))

    def _appended(self, runs: "Sequence[Run]") -> None:
        for log, parts in runs:
            log.tail.appended([part.data for part in parts])


class InlinePlan(Plan):
    """The journal's entry, its sync, the journal's slot; then for each log its segment and its slot."""

    _DURABLE = 2  # so many steps make it safe: what fails behind them can be done again
    _APPLIED_FROM = 3

    @classmethod
    def of(cls, committer: "Committer", batch: Round, runs: "list[Run]") -> "InlinePlan | None":
        for log, _ in runs:
            if log.tail.is_unsynced:
                return None  # it was async until a moment ago
        plan = cls(committer, runs)
        body = encode(batch.parts, batch.changes, batch.ends)
        entry = committer.journal.step(body) if body else None
        sync = committer.journal.sync_step()
        if entry is None or sync is None:
            return None
        segments = plan._hold_segments()
        if segments is None:
            return None
        plan.steps = [entry, sync, committer.slots.sequence_step(committer.journal.sequence + 1)]
        for run, segment in zip(runs, segments, strict=True):
            plan.steps += [segment, plan._slot_step(run)]
        return plan

    def finish(self, ran: Ran) -> Committed:
        self._let_go(dirty=True)
        journal = self._committer.journal
        result = Committed(sync_s=ran.sync_s)
        applied = max(0, ran.done - self._APPLIED_FROM + 1) // 2  # a slot that failed is merely old
        self._appended(self.runs[:applied])
        if ran.done >= self._DURABLE:
            journal.wrote(self.steps[0])
            journal.synced_all()
            result.syncs = 1
            result.has_entry = True
            self._committer.leave_unapplied(self.runs[applied:])
        elif ran.done == 1 and ran.error is not None:
            journal.sync_failed(ran.error)
        return result

    def mend(self, ran: Ran, result: Committed) -> Committed:
        error = ran.error
        assert error is not None
        if ran.done == 0:
            self._committer.journal.blank()
            if self._committer.lacks_room(error):
                raise DiskFull("the disk is full") from error
        if ran.done == 1:
            raise error
        if not self._committer.lacks_room(error):
            if self.steps[ran.done].file == self._committer.slots.file:
                raise StorageFailed(f"the slots cannot be written: {error}") from error
            raise error
        return self._committer.apply_rest(result)


class DirectPlan(Plan):
    """Past the journal: a write for each log, then a sync for each unless that comes later (async), then their
    slots."""

    def __init__(self, committer: "Committer", runs: "list[Run]", *, is_async: bool) -> None:
        super().__init__(committer, runs)
        self._is_async = is_async

    @classmethod
    def of(cls, committer: "Committer", runs: "list[Run]", *, is_async: bool = False) -> "DirectPlan | None":
        if not runs:
            return None
        if not is_async and any(log.tail.is_unsynced or log.tail.has_new_names for log, _ in runs):
            return None  # more to sync than one file
        if not is_async and committer.journal.is_unsynced:
            return None  # settles were promised the next sync there is
        plan = cls(committer, runs, is_async=is_async)
        segments = plan._hold_segments()
        if segments is None:
            return None
        syncs = [] if is_async else [Step(segment.file, None) for segment in segments]
        plan.steps = [*segments, *syncs, *map(plan._slot_step, runs)]
        return plan

    @property
    def _whole(self) -> int:
        """So many steps and the round is kept, as its logs keep it; what fails behind them are slots."""
        return len(self.runs) * (1 if self._is_async else 2)

    def finish(self, ran: Ran) -> Committed:
        count = len(self.runs)
        is_kept = ran.done >= self._whole
        self._let_go(dirty=self._is_async or not is_kept)
        result = Committed(sync_s=ran.sync_s)
        if is_kept and self._is_async:
            self._appended(self.runs)
            for log, _ in self.runs:
                log.tail.wrote_past_journal()
        elif is_kept:
            self._committer.files.check()  # the error of a sync goes to one caller: perhaps it was another
            result.syncs = count
            self._appended(self.runs)
            result.direct_ends = [(log.id, log.epoch, log.tail.next_offset) for log, _ in self.runs]
        elif ran.done >= count and ran.error is not None:
            self._committer.files.sync_failed(ran.error)
        return result

    def mend(self, ran: Ran, result: Committed) -> Committed:
        error = ran.error
        assert error is not None
        lacks_room = self._committer.lacks_room(error)
        if ran.done >= self._whole:
            if lacks_room:
                return result  # a slot: an old one is merely old
            raise StorageFailed(f"the slots cannot be written: {error}") from error
        if ran.done >= len(self.runs) or not lacks_room:
            raise error
        for log, _ in self.runs:
            log.tail.broke_off()
        self._committer.take_back([(log, log.tail.save()) for log, _ in self.runs])
        raise DiskFull("the disk is full") from error
