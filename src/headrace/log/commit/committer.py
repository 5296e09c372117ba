"""The slow half of a round: journal, syncs, segments. One round at a time, in the worker's turn.

A round that needs nothing but a few writes to open files and a sync, as nearly all do, becomes a chain of them: `plan`
(see plans.pyx). Every other round is a job for the worker thread: `commit`.

Order matters, in both:
1. make sure the journal has room (or give up before anything is touched);
2. parts too large for the journal go straight to their segments, and are synced there;
3. one entry with everything else into the journal. Up to here the round can be taken back;
4. sync the journal. Only now is the round durable;
5. apply the entry to the segments (plain writes), and tell other processes through the slots.

What belongs to a group is always in the entry, never written ahead: a crash before step 4 must leave
nothing of it behind.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from headrace.errors import DiskFull, StorageFailed
from headrace.log.commit.journal import Journal, JournalFull
from headrace.log.commit.journal_entry import Bytes, Committed, StateChange
from headrace.log.commit.log_writer import SavedTail
from headrace.log.commit.plan import DirectPlan, InlinePlan, Plan
from headrace.log.commit.round import Round, RoundPart, by_log, encode
from headrace.log.commit.slots import Ends, Slots
from headrace.log.disk.file_cache import NO_FILES, NO_ROOM, FileCache
from headrace.log.log import Log
from headrace.record import codec

if TYPE_CHECKING:
    from headrace.log.commit.round import Run

# More is planned, and what goes through the journal checksummed, off the owner thread, which has others to serve.
CHAIN_LOGS_MAX = 128
# Of `inline_bytes_max`, for a round of one log. Below 64 KB the journal, which does not grow, is synced sooner.
ALONE_DIVISOR = 4
CHAIN_ENTRY_BYTES_MAX = 1 << 20


class Committer:
    def __init__(
        self,
        journal: Journal,
        slots: Slots,
        files: FileCache,
        inline_bytes_max: int,
        monotonic: Callable[[], float],
    ) -> None:
        self.journal = journal
        self.files = files
        self.slots = slots
        self._inline_bytes_max = min(inline_bytes_max, journal.capacity // 8)
        self._monotonic = monotonic
        self.unapplied: deque[Run] = deque()  # in the journal, not in the segments yet: the disk is full
        self._entry = 0  # that holds them

    @property
    def is_stuck(self) -> bool:
        return bool(self.unapplied)

    @property
    def applied(self) -> int:
        """The last entry of which all is in the segments, and of every one before it."""
        return self._entry - 1 if self.unapplied else self.journal.sequence

    def commit(self, batch: Round) -> Committed:
        result = Committed()
        direct, inline = self._divide(batch)
        body = encode(inline, batch.changes, batch.ends) if inline or batch.changes else []
        if body:
            self._reserve(sum(map(len, body)))
        runs = by_log(direct)
        self._write(inline, runs, body, result)
        if batch.must_sync and self.journal.is_unsynced:
            with self._timed(result):
                self.sync_journal()
            result.syncs += 1
        result.has_entry = bool(body)
        self.leave_unapplied(by_log(inline))
        self.apply_rest(result)
        for log, _ in runs:
            self.tell(log)
        return result

    def leave_unapplied(self, runs: "Sequence[Run]") -> None:
        """Of the last entry."""
        self._entry = self.journal.sequence
        self.unapplied.extend(runs)

    def note(self, changes: list[StateChange]) -> None:
        """Durable on return, in an entry of their own, also behind a round that waits for room."""
        body = encode([], changes, [])
        self._reserve(sum(map(len, body)))
        self._write([], [], body, Committed())
        self.sync_journal()

    def plan(self, batch: Round) -> Plan | None:
        """The round as a chain; None when it takes more than that."""
        if self.unapplied:
            return None
        if batch.bypasses_journal:
            return self._plan_unsynced(batch)
        if not batch.must_sync:
            return None  # nobody waits for it: the sooner it is done, the less is done at once
        direct, inline = self._divide(batch)
        if (inline or batch.changes) and (direct or batch.size > CHAIN_ENTRY_BYTES_MAX):
            return None
        runs = by_log(batch.parts)
        if len(runs) > CHAIN_LOGS_MAX:
            return None
        if batch.shares_bytes:
            return None  # they are patched for each log in turn, between the writes
        return DirectPlan.of(self, runs) if direct else InlinePlan.of(self, batch, runs)

    def _plan_unsynced(self, batch: Round) -> Plan | None:
        """Only what is nothing else besides: no change of state, no log that is synced at once, no group."""
        if batch.changes or batch.must_sync or batch.has_groups or batch.shares_bytes:
            return None
        runs = by_log(batch.parts)
        return None if len(runs) > CHAIN_LOGS_MAX else DirectPlan.of(self, runs, syncs=False)

    def _divide(self, batch: Round) -> tuple[list[RoundPart], list[RoundPart]]:
        """(direct, inline): a log's parts stay on one side, in order. A group is inline whatever its size."""
        if not batch.bypasses_journal and batch.size <= self._inline_bytes_max:
            # One log alone costs one sync either way: through the journal the disk would have twice the bytes to write.
            is_alone = batch.size > self._inline_bytes_max // ALONE_DIVISOR and not batch.changes and batch.has_one_log
            return (batch.parts, []) if is_alone else ([], batch.parts)
        if batch.has_one_log and not batch.changes:
            return batch.parts, []
        sizes: dict[int, int] = {}
        bound: set[int] = set()
        for part in batch.parts:
            sizes[part.log.id] = sizes.get(part.log.id, 0) + len(part.data)
            if part.atomic:
                bound.add(part.log.id)
        direct: list[RoundPart] = []
        inline: list[RoundPart] = []
        for part in batch.parts:
            past_journal = sizes[part.log.id] > self._inline_bytes_max or not part.log.write_mode.goes_through_journal
            (direct if past_journal and part.log.id not in bound else inline).append(part)
        return direct, inline

    def _reserve(self, size: int) -> None:
        try:
            self.journal.reserve(size)
        except OSError as error:
            if not self.lacks_room(error):
                raise
            what = "room" if error.errno in NO_ROOM else "file descriptor"
            raise DiskFull(f"no {what} for another journal file") from error

    def _write(self, inline: list[RoundPart], runs: "list[Run]", body: list[Bytes], result: Committed) -> None:
        saved = [(log, log.tail.save()) for log, _ in runs]
        with ExitStack() as held:
            with self._refused_for(NO_FILES, saved):
                self._secure_tails(inline, result)
            with self._refused_for(NO_ROOM + NO_FILES, saved):
                for number, (log, parts) in enumerate(runs):
                    may_hold = number < self.files.held_max
                    if may_hold:
                        held.enter_context(log.tail.names_held(sum(len(part.data) for part in parts)))
                    self._write_parts(log, parts, result, direct=True)
                    path = log.tail.grown_since(saved[number][1])
                    if path is not None and may_hold:
                        held.enter_context(self.files.held(path))  # closed for others it could not be cut off again
            with self._refused_for(NO_FILES, saved):  # whatever else a sync says is the end
                self._sync_direct(runs, result)
            with self._refused_for(NO_ROOM + NO_FILES, saved):
                if body:
                    self.journal.append(body)

    @contextmanager
    def _refused_for(self, reasons: tuple[int, ...], saved: Sequence[tuple[Log, SavedTail]]) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in reasons or self.files.failure is not None:
                raise
            self.take_back(saved)
            reason = "the disk is full" if error.errno in NO_ROOM else "no file descriptor is free"
            raise DiskFull(reason) from error

    @staticmethod
    def take_back(saved: Sequence[tuple[Log, SavedTail]]) -> None:
        """Nothing of the round is in the journal (a part of an entry is none): leave nothing of it in the segments,
        so that it can be refused cleanly. If that fails, the error goes up and the shard stops: better than a log
        that holds what it refused."""
        for log, state in saved:
            log.tail.secure_undo(log.tail.undo_to(state))

    @staticmethod
    def lacks_room(error: OSError) -> bool:
        return error.errno in NO_ROOM + NO_FILES

    @staticmethod
    def _write_parts(log: Log, parts: list[RoundPart], result: Committed, *, direct: bool) -> None:
        for part in parts:
            if int.from_bytes(part.data[:8], "big") != part.base_offset:
                # The same bytes went to another log of this round first.
                codec.patch_run(part.data, 0, len(part.data), part.base_offset, log.epoch)
        data = [part.data for part in parts]
        result.segments_created += log.tail.append(data, sum(map(len, data)), parts[0].base_offset, direct=direct)

    @staticmethod
    def _secure_tails(inline: list[RoundPart], result: Committed) -> None:
        """What the journal holds is durable with its entry: what lies before it in its log has to be, earlier. It may
        not be if the log is async, or was so until a moment ago."""
        for log in {part.log.id: part.log for part in inline}.values():
            if log.tail.is_unsynced:
                result.syncs += log.tail.sync()

    def _sync_direct(self, runs: "list[Run]", result: Committed) -> None:
        with self._timed(result):
            for log, _ in runs:
                if log.write_mode.syncs_before_confirm:
                    result.syncs += log.tail.sync()
                    result.direct_ends.append((log.id, log.epoch, log.tail.next_offset))

    @contextmanager
    def _timed(self, result: Committed) -> Iterator[None]:
        started = self._monotonic()
        yield
        result.sync_s += self._monotonic() - started

    def apply_rest(self, result: Committed) -> Committed:
        """Bring what the journal holds into the segments. With a full disk it stays there and is tried again:
        it is durable, so refusing it would be a lie, and nothing may overtake it."""
        while self.unapplied:
            log, parts = self.unapplied[0]
            if log.is_deleted:
                self.unapplied.popleft()
                continue
            saved = log.tail.save()
            try:
                # The entry of a group of async logs need not be synced: then only the segment's sync makes it durable.
                self._write_parts(log, parts, result, direct=not log.write_mode.syncs_before_confirm)
            except OSError as error:
                if not self.lacks_room(error):
                    raise
                log.tail.undo_to(saved)
                return result
            self.unapplied.popleft()
            self.tell(log)
        return result

    def tell(self, log: Log, *, must: bool = False) -> None:
        """Write the log's slot: other processes see its new ends. An old slot is merely old, unless it must go."""
        try:
            self.slots.write(self.ends(log, log.tail.next_offset))
        except OSError as error:
            if must:
                raise
            if not self.lacks_room(error):
                raise StorageFailed(f"the slots cannot be written: {error}") from error

    @staticmethod
    def ends(log: Log, next_offset: int) -> Ends:
        return Ends(*log.ends_at(next_offset))

    def _tell_sequence(self) -> None:
        try:
            self.slots.write_sequence(self.journal.synced)
        except OSError as error:
            if not self.lacks_room(error):
                raise StorageFailed(f"the slots cannot be written: {error}") from error

    def sync_journal(self) -> None:
        self.journal.sync()
        self._tell_sequence()


__all__ = ["Committed", "Committer", "JournalFull"]
