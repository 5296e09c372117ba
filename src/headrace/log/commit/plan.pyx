# cython: nonecheck=True
"""Rounds as I/O chains: a few writes to open files and a sync or two, which run without the GIL.

The owner thread makes a plan, and finishes it, while it has the worker's turn. A plan holds files open and changes
none. `finish` applies the steps that were carried out to memory. If the chain stopped at an error, `resolve_partial`
runs as a job of the worker: a round that is not durable is refused if the disk was only full, and the rest of a durable
round is applied.
"""

from headrace.log.commit.file_ends cimport JournalEnd, SlotFile, TailEnd
from headrace.log.commit.round cimport LogEnd, RoundPart
from headrace.log.disk.io_chain cimport Step, new_step
from headrace.log.disk.open_files cimport OpenFile, OpenFiles
from headrace.log.segments.index cimport total

from headrace.errors import DiskFull, StorageFailed
from headrace.log.commit.journal_entry import CommittedRound
from headrace.log.commit.round import encode


cdef class Plan:
    cdef object _committer
    cdef readonly list runs     # (log, parts)
    cdef public list steps
    cdef list _data             # buffers of each run
    cdef list _held

    def __init__(self, committer, list runs not None):
        self._committer = committer
        self.runs = runs
        self.steps = []
        self._data = []
        self._held = []

    cdef list hold_segments(self):
        """One write per log. None, with nothing held, if a log needs more than a write: a new segment, an index."""
        cdef list steps = [], data
        cdef LogEnd log
        cdef TailEnd tail
        cdef OpenFile held
        cdef RoundPart part
        for log, parts in self.runs:
            data = [part.data for part in <list>parts]
            tail = log.tail
            held = tail.hold(total(data))
            if held is None:
                self.release_files(False)
                return None
            self._data.append(data)
            self._held.append(held)
            steps.append(new_step(held.file, data, tail.writer.walker.position))
        return steps

    cdef int release_files(self, bint dirty) except -1:
        cdef OpenFiles files = self._committer.files
        cdef OpenFile held
        for held in self._held:
            files.release(held, dirty)
        self._held = []
        return 0

    cdef Step slot_step(self, SlotFile slots, tuple run):
        cdef LogEnd log = run[0]
        cdef list parts = run[1]
        return slots.step(log.ends_at((<RoundPart>parts[len(parts) - 1]).next_offset))

    cdef int appended(self, Py_ssize_t count) except -1:
        """Record that the first `count` runs are in their segments."""
        cdef LogEnd log
        cdef Py_ssize_t number
        for number in range(count):
            log = self.runs[number][0]
            log.tail.writer.appended(self._data[number])
        return 0


cdef class InlinePlan(Plan):
    """Steps: the journal entry, its sync and the journal's slot; then a segment and a slot for each log."""

    _DURABLE = 2  # after this many steps the round is durable, and what fails later can be done again
    _APPLIED_FROM = 3

    @classmethod
    def of(cls, committer, batch, list runs not None):
        """None if the round takes more than a chain."""
        cdef JournalEnd journal = committer.journal
        cdef SlotFile slots = committer.slots
        cdef LogEnd log
        cdef InlinePlan plan
        cdef Step entry, sync
        cdef list segments
        cdef Py_ssize_t number
        for log, _ in runs:
            if log.tail._written:
                return None  # unsynced bytes of an async log come before this entry
        body = encode(batch.parts, batch.changes, batch.ends)
        entry = journal.step(body) if body else None
        sync = journal.sync_step()
        if entry is None or sync is None:
            return None
        plan = cls(committer, runs)
        segments = plan.hold_segments()
        if segments is None:
            return None
        plan.steps = [entry, sync, slots.sequence_step(journal.sequence + 1)]
        for number in range(len(runs)):
            plan.steps.append(segments[number])
            plan.steps.append(plan.slot_step(slots, runs[number]))
        return plan

    def finish(self, ran):
        """Apply the steps that were carried out to memory."""
        cdef JournalEnd journal = self._committer.journal
        cdef Py_ssize_t done = ran.done
        cdef Py_ssize_t applied = max(0, done - self._APPLIED_FROM + 1) // 2  # a slot that failed is only out of date
        self.release_files(True)
        result = CommittedRound(sync_s=ran.sync_s)
        self.appended(applied)
        if done >= self._DURABLE:
            journal.wrote(self.steps[0])
            journal.synced_all()
            result.syncs = 1
            result.has_entry = True
            self._committer.add_unapplied(self.runs[applied:])
        elif done == 1 and ran.error is not None:
            journal.sync_failed(ran.error)
        return result

    def resolve_partial(self, ran, result):
        """After a chain that stopped at an error: complete the round, or raise."""
        error = ran.error
        assert error is not None
        if ran.done == 0:
            if self._committer.journal.completed(self.steps[0], error):
                return self._committer.commit_written(self.steps[0], self.runs, result)
            if self._committer.lacks_room(error):
                raise DiskFull("the disk is full") from error
        if ran.done <= 1:
            raise error
        if not self._committer.lacks_room(error):
            if self.steps[ran.done].file == self._committer.slots.file:
                raise StorageFailed(f"the slots cannot be written: {error}") from error
            raise error
        return self._committer.apply_rest(result)


cdef class DirectPlan(Plan):
    """Bypasses the journal. Steps: a write for each log, a sync for each unless its write mode syncs later, the
    slots."""
    cdef bint _syncs

    @classmethod
    def of(cls, committer, list runs not None, bint syncs=True):
        """None if the round takes more than a chain."""
        cdef SlotFile slots = committer.slots
        cdef LogEnd log
        cdef DirectPlan plan
        cdef Step step
        cdef list segments
        if not runs:
            return None
        if syncs:
            for log, _ in runs:
                if log.tail._written or log.tail.has_new_names:
                    return None  # more than one file to sync
            if committer.journal.is_unsynced:
                return None  # unsynced settles must be covered by the next sync
        plan = cls(committer, runs)
        plan._syncs = syncs
        segments = plan.hold_segments()
        if segments is None:
            return None
        plan.steps = segments
        if syncs:
            plan.steps = segments + [new_step(step.file, None, 0) for step in segments]
        for run in runs:
            plan.steps.append(plan.slot_step(slots, run))
        return plan

    cdef Py_ssize_t commit_steps(self):
        """Number of steps after which the round is committed; only slots follow."""
        return len(self.runs) * (2 if self._syncs else 1)

    def finish(self, ran):
        """Apply the steps that were carried out to memory."""
        cdef Py_ssize_t count = len(self.runs)
        cdef bint is_committed = ran.done >= self.commit_steps()
        self.release_files(not self._syncs or not is_committed)
        result = CommittedRound(sync_s=ran.sync_s)
        if is_committed and not self._syncs:
            self.appended(count)
            for log, _ in self.runs:
                log.tail.wrote_past_journal()
        elif is_committed:
            self._committer.files.check()  # the kernel reports a failed sync once, perhaps to another caller
            result.syncs = count
            self.appended(count)
            result.direct_ends = [(log.id, log.epoch, log.tail.next_offset) for log, _ in self.runs]
        elif ran.done >= count and ran.error is not None:
            self._committer.files.sync_failed(ran.error)
        return result

    def resolve_partial(self, ran, result):
        """After a chain that stopped at an error: complete the round, or raise."""
        error = ran.error
        assert error is not None
        lacks_room = self._committer.lacks_room(error)
        if ran.done >= self.commit_steps():
            if lacks_room:
                return result  # only a slot is out of date
            raise StorageFailed(f"the slots cannot be written: {error}") from error
        if ran.done >= len(self.runs) or not lacks_room:
            raise error
        for log, _ in self.runs:
            log.tail.mark_torn()
        self._committer.roll_back([(log, log.tail.save()) for log, _ in self.runs])
        raise DiskFull("the disk is full") from error
