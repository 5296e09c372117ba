"""The slow half of a round: journal, syncs, segments. One round at a time, in the worker's turn.

A round that needs nothing but a few writes to open files and a sync, as nearly all small ones do, becomes a chain of
them: `plan` and `finish` take place on the owner thread, and the interpreter is not needed in between. Every
other round is a job for the worker thread: `commit`.

Order matters, in both:
1. make sure the journal has room (or give up before anything is touched);
2. parts too large for the journal go straight to their segments;
3. one entry with everything else into the journal;
4. sync: the large parts' files, then the journal. Only now is the round durable;
5. apply the entry to the segments (plain writes), and tell other processes through the slots.

What belongs to a group is always in the entry, never written ahead: a crash before step 4 must leave
nothing of it behind.
"""

import errno
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.errors import DiskFull, StorageFailed
from headrace.log.disk import Ran, Step
from headrace.log.files import NO_ROOM, Files, OpenFile
from headrace.log.journal import Journal, JournalFull
from headrace.log.log import Log
from headrace.log.rounds import Bytes, Part, Round, encode
from headrace.log.slots import Ends, Slots
from headrace.record import codec

Run = tuple[Log, list[Part]]
NO_FILES = (errno.EMFILE, errno.ENFILE)
CHAIN_LOGS_MAX = 128  # more are planned off the owner thread, which has others to serve


@dataclass(slots=True)
class Committed:
    """What a round cost, for the counters."""

    syncs: int = 0
    sync_s: float = 0.0
    segments_created: int = 0
    sequence: int = 0  # of the last journal entry
    direct_ends: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass(slots=True)
class Plan:
    """A round as a chain: the journal's entry, its sync, the journal's slot; then for each log its segment and slot."""

    steps: list[Step]
    runs: list[Run]
    held: list[OpenFile]


DURABLE_AT = 2  # so many steps make it safe: what fails behind them can be done again
APPLIED_FROM = 3


def by_log(parts: list[Part]) -> list[Run]:
    """One run per log, in the order of their first part: one write each. A deleted log has no place to write to."""
    runs: dict[int, Run] = {}
    for part in parts:
        if part.log.is_deleted:
            continue
        runs.setdefault(part.log.id, (part.log, []))[1].append(part)
    return list(runs.values())


class Committer:
    def __init__(
        self,
        journal: Journal,
        slots: Slots,
        files: Files,
        inline_bytes_max: int,
        monotonic: Callable[[], float],
    ) -> None:
        self._journal = journal
        self._files = files
        self._slots = slots
        self._inline_bytes_max = min(inline_bytes_max, journal.capacity // 8)
        self._monotonic = monotonic
        self._unapplied: deque[Run] = deque()  # in the journal, not in the segments yet: the disk is full

    @property
    def is_stuck(self) -> bool:
        return bool(self._unapplied)

    def commit(self, batch: Round) -> Committed:
        result = Committed()
        direct, inline = self._divide(batch)
        body = encode(inline, batch.changes, batch.ends) if inline or batch.changes else []
        if body:
            self._reserve(sum(map(len, body)))
        runs = by_log(direct)
        if batch.has_async:
            self._secure_async(inline, result)
        self._write(runs, body, result)
        self._sync(batch, runs, result)
        result.sequence = self._journal.sequence
        self._unapplied.extend(by_log(inline))
        self.apply_rest(result)
        for log, _ in runs:
            self.tell(log)
        return result

    def plan(self, batch: Round) -> Plan | None:
        """The round as a chain; None when it takes more than that. Nothing is changed yet but the files held."""
        if self._unapplied or batch.has_async or batch.size > self._inline_bytes_max:
            return None
        if not batch.must_sync:
            return None  # nobody waits for it: the sooner it is done, the less is done at once
        runs = by_log(batch.parts)
        if len(runs) > CHAIN_LOGS_MAX:
            return None
        if len({id(part.data) for part in batch.parts}) < len(batch.parts):
            return None  # the same bytes for several logs are patched for each in turn, between the writes
        body = encode(batch.parts, batch.changes, batch.ends)
        entry = self._journal.step(body) if body else None
        sync = self._journal.sync_step()
        if entry is None or sync is None:
            return None
        steps = [entry, sync, self._slots.sequence_step(self._journal.sequence + 1)]
        held: list[OpenFile] = []
        for log, parts in runs:
            data = [part.data for part in parts]
            step = log.tail.append_step(data, sum(map(len, data)))
            if step is None:
                self._let_go(held)
                return None
            held.append(step[1])
            steps += [step[0], self._slots.step(self._ends(log, parts[-1].next_offset))]
        return Plan(steps, runs, held)

    def _let_go(self, held: list[OpenFile]) -> None:
        for file in held:
            self._files.let_go(file)

    def finish(self, plan: Plan, ran: Ran) -> Committed:
        """Take in what the chain has done. If it broke off, `mend` says what that means."""
        self._let_go(plan.held)
        result = Committed(sync_s=ran.sync_s)
        applied = max(0, ran.done - APPLIED_FROM + 1) // 2  # a slot that failed is merely old
        for log, parts in plan.runs[:applied]:
            log.tail.appended([part.data for part in parts])
        if ran.done >= DURABLE_AT:
            self._journal.wrote(plan.steps[0])
            self._journal.synced_all()
            result.syncs = 1
            self._unapplied.extend(plan.runs[applied:])
        elif ran.done == 1 and ran.error is not None:
            self._journal.sync_failed(ran.error)
        result.sequence = self._journal.sequence
        return result

    def mend(self, plan: Plan, ran: Ran, result: Committed) -> Committed:
        """A job for the worker, after a chain that broke off. Whatever is not durable is refused, if the disk only
        lacks room for it; what is durable is brought to its end, or waits for room as any other round does."""
        error = ran.error
        assert error is not None
        has_no_room = error.errno in NO_ROOM + NO_FILES
        if ran.done == 0:
            self._journal.blank()
            if has_no_room:
                raise DiskFull("the disk is full") from error
        if ran.done == 1:
            raise error
        if not has_no_room:
            if plan.steps[ran.done].file == self._slots.file:
                raise StorageFailed(f"the slots cannot be written: {error}") from error
            raise error
        return self.apply_rest(result)

    def _divide(self, batch: Round) -> tuple[list[Part], list[Part]]:
        """(direct, inline): a log's parts stay on one side, in order. A group is inline whatever its size."""
        if batch.size <= self._inline_bytes_max and not batch.has_async:
            return [], batch.parts
        sizes: dict[int, int] = {}
        bound: set[int] = set()
        for part in batch.parts:
            sizes[part.log.id] = sizes.get(part.log.id, 0) + len(part.data)
            if part.atomic:
                bound.add(part.log.id)
        direct: list[Part] = []
        inline: list[Part] = []
        for part in batch.parts:
            past_journal = sizes[part.log.id] > self._inline_bytes_max or part.log.is_async
            (direct if past_journal and part.log.id not in bound else inline).append(part)
        return direct, inline

    def _reserve(self, size: int) -> None:
        try:
            self._journal.reserve(size)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise DiskFull("no room for another journal file") from error
            raise

    def _write(self, runs: list[Run], body: list[Bytes], result: Committed) -> None:
        saved = [(log, log.tail.save()) for log, _ in runs]
        try:
            for log, parts in runs:
                self._write_parts(log, parts, result, direct=True)
            if body:
                self._journal.append(body)
        except OSError as error:
            if error.errno not in NO_ROOM + NO_FILES:
                raise
            # Nothing of this round is in the journal (a part of an entry is none): take it all back and refuse it
            # cleanly. If taking it back fails, the error goes up and the shard stops: better than a log that
            # holds what it refused.
            for log, state in saved:
                log.tail.undo_to(state)
                log.tail.secure_undo()
            reason = "the disk is full" if error.errno in NO_ROOM else "no file descriptor is free"
            raise DiskFull(reason) from error

    @staticmethod
    def _write_parts(log: Log, parts: list[Part], result: Committed, *, direct: bool) -> None:
        for part in parts:
            if int.from_bytes(part.data[:8], "big") != part.base_offset:
                # The same bytes went to another log of this round first.
                codec.patch_run(part.data, 0, len(part.data), part.base_offset, log.epoch)
        data = [part.data for part in parts]
        result.segments_created += log.tail.append(data, sum(map(len, data)), parts[0].base_offset, direct=direct)

    @staticmethod
    def _secure_async(inline: list[Part], result: Committed) -> None:
        """A group's part of an async log is durable with its entry: what lies before it has to be, earlier."""
        for log in {part.log.id: part.log for part in inline if part.log.is_async}.values():
            result.syncs += log.tail.sync()

    def _sync(self, batch: Round, runs: list[Run], result: Committed) -> None:
        started = self._monotonic()
        for log, _ in runs:
            if not log.is_async:
                result.syncs += log.tail.sync()
                result.direct_ends.append((log.id, log.epoch, log.tail.next_offset))
        if batch.must_sync and self._journal.is_unsynced:
            self._journal.sync()
            result.syncs += 1
            self._tell_sequence()
        result.sync_s = self._monotonic() - started

    def apply_rest(self, result: Committed) -> Committed:
        """Bring what the journal holds into the segments. With a full disk it stays there and is tried again:
        it is durable, so refusing it would be a lie, and nothing may overtake it."""
        while self._unapplied:
            log, parts = self._unapplied[0]
            if log.is_deleted:
                self._unapplied.popleft()
                continue
            saved = log.tail.save()
            try:
                self._write_parts(log, parts, result, direct=False)
            except OSError as error:
                if error.errno not in NO_ROOM + NO_FILES:
                    raise
                log.tail.undo_to(saved)
                return result
            self._unapplied.popleft()
            self.tell(log)
        return result

    def tell(self, log: Log, *, must: bool = False) -> None:
        """Write the log's slot: other processes see its new ends. An old slot is merely old, unless it must go."""
        try:
            self._slots.write(self._ends(log, log.tail.next_offset))
        except OSError as error:
            if must:
                raise
            if error.errno not in NO_ROOM + NO_FILES:
                raise StorageFailed(f"the slots cannot be written: {error}") from error

    @staticmethod
    def _ends(log: Log, next_offset: int) -> Ends:
        end = max(next_offset, log.start_offset)
        durable = min(log.durable_end, end) if log.is_async else end
        return Ends(log.id, log.epoch, log.start_offset, end, durable, log.stable_below(end))

    def _tell_sequence(self) -> None:
        try:
            self._slots.write_sequence(self._journal.synced)
        except OSError as error:
            if error.errno not in NO_ROOM + NO_FILES:
                raise StorageFailed(f"the slots cannot be written: {error}") from error

    def sync_journal(self) -> None:
        self._journal.sync()
        self._tell_sequence()


__all__ = ["Committed", "Committer", "JournalFull"]
