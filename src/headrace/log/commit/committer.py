"""Writes rounds to the disk: journal, syncs, segments, slots. One round at a time, in the worker's turn.

Nearly every round needs only a few writes to open files and a sync: `plan` makes an I/O chain of it (plan.pyx). Every
other round is a job for the worker thread: `commit`.

Both keep to this order:
1. make sure that the journal has room, or refuse before any file is touched;
2. write parts that are too large for the journal straight to their segments, and sync them there;
3. write one journal entry with everything else. Up to here the round can be rolled back;
4. sync the journal. Only now is the round durable;
5. apply the entry to the segments (plain writes), and publish the new ends through the slots.

Parts of an atomic group are always in the entry and never written ahead of it: a crash before step 4 must leave nothing
of the group behind.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from headrace.errors import DiskFull, StorageFailed
from headrace.log.commit.journal import Journal, JournalFull
from headrace.log.commit.journal_entry import Bytes, CommittedRound, StateChange
from headrace.log.commit.log_writer import SavedTail
from headrace.log.commit.plan import DirectPlan, InlinePlan, Plan
from headrace.log.commit.recovery_space import RecoverySpace
from headrace.log.commit.round import LogEnd, Round, RoundPart, by_log, encode
from headrace.log.commit.slots import Ends, Slots
from headrace.log.disk.file_cache import NO_FILES, NO_ROOM, FileCache
from headrace.log.disk.io_chain import Step
from headrace.record import codec

Run = tuple[LogEnd, list[RoundPart]]

# Larger rounds are planned, and their journal entries checksummed, by the worker: the owner thread has clients to
# serve.
CHAIN_LOGS_MAX = 128
CHAIN_ENTRY_BYTES_MAX = 1 << 20
# A round of one log bypasses the journal above this fraction of `inline_bytes_max`. Below 64 KB a sync of the journal
# is faster, because its file does not grow.
ALONE_DIVISOR = 4


class Committer:
    def __init__(
        self,
        journal: Journal,
        slots: Slots,
        files: FileCache,
        space: RecoverySpace,
        inline_bytes_max: int,
        monotonic: Callable[[], float],
    ) -> None:
        self.journal = journal
        self.files = files
        self.slots = slots
        self.space = space
        self._inline_bytes_max = min(inline_bytes_max, journal.capacity // 8)
        self._monotonic = monotonic
        self.unapplied: deque[Run] = deque()  # durable in the journal, not in the segments yet: the disk is full
        self._entry = 0  # sequence number of the entry that holds them

    @property
    def is_stuck(self) -> bool:
        return bool(self.unapplied)

    @property
    def applied(self) -> int:
        """The last entry that is in the segments completely, as are all entries before it."""
        return self._entry - 1 if self.unapplied else self.journal.sequence

    def commit(self, batch: Round) -> CommittedRound:
        result = CommittedRound()
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
        self.add_unapplied(by_log(inline))
        self.apply_rest(result)
        for log, _ in runs:
            self.publish_ends(log)
        return result

    def add_unapplied(self, runs: Sequence[Run]) -> None:
        """Runs of the last entry that `apply_rest` has to bring into the segments."""
        self._entry = self.journal.sequence
        self.unapplied.extend(runs)

    def commit_written(self, entry: Step, runs: Sequence[Run], result: CommittedRound) -> CommittedRound:
        """Go on with a round whose entry is in the journal's file, but neither synced nor applied."""
        self.journal.wrote(entry)
        with self._timed(result):
            self.sync_journal()
        result.syncs += 1
        result.has_entry = True
        self.add_unapplied(runs)
        return self.apply_rest(result)

    def commit_changes(self, changes: list[StateChange]) -> None:
        """Commit changes in an entry of their own, even while a round waits for disk space. Durable on return."""
        body = encode([], changes, [])
        self._reserve(sum(map(len, body)))
        self._write([], [], body, CommittedRound())
        self.sync_journal()

    def plan(self, batch: Round) -> Plan | None:
        """The round as an I/O chain; None if it takes more than that. DiskFull if there is no room for it."""
        if batch.parts:
            self.space.admit(batch.size)
        if self.unapplied:
            return None
        if batch.bypasses_journal:
            return self._plan_unsynced(batch)
        if not batch.must_sync:
            return None  # only lazy changes, which need no sync: InlinePlan always has one
        direct, inline = self._divide(batch)
        if (inline or batch.changes) and (direct or batch.size > CHAIN_ENTRY_BYTES_MAX):
            return None
        runs = by_log(batch.parts)
        if len(runs) > CHAIN_LOGS_MAX:
            return None
        if batch.shares_bytes:
            return None  # the buffer is patched for each log in turn, between the writes
        return DirectPlan.of(self, runs) if direct else InlinePlan.of(self, batch, runs)

    def _plan_unsynced(self, batch: Round) -> Plan | None:
        """Only for purely unsynced rounds: no state changes, no log that syncs before the confirm, no groups."""
        if batch.changes or batch.must_sync or batch.has_groups or batch.shares_bytes:
            return None
        runs = by_log(batch.parts)
        return None if len(runs) > CHAIN_LOGS_MAX else DirectPlan.of(self, runs, syncs=False)

    def _divide(self, batch: Round) -> tuple[list[RoundPart], list[RoundPart]]:
        """(direct, inline): parts that bypass the journal, and parts that go into the entry. The parts of one log stay
        together, in order. Atomic groups are always inline."""
        if not batch.bypasses_journal and batch.size <= self._inline_bytes_max:
            # A single log costs one sync either way, and through the journal its bytes would be written twice.
            is_direct = batch.size > self._inline_bytes_max // ALONE_DIVISOR and not batch.changes and batch.has_one_log
            return (batch.parts, []) if is_direct else ([], batch.parts)
        if batch.has_one_log and not batch.changes:
            return batch.parts, []
        sizes: dict[int, int] = {}
        in_groups: set[int] = set()
        for part in batch.parts:
            sizes[part.log.id] = sizes.get(part.log.id, 0) + len(part.data)
            if part.atomic:
                in_groups.add(part.log.id)
        direct: list[RoundPart] = []
        inline: list[RoundPart] = []
        for part in batch.parts:
            is_direct = sizes[part.log.id] > self._inline_bytes_max or not part.log.write_mode.goes_through_journal
            (direct if is_direct and part.log.id not in in_groups else inline).append(part)
        return direct, inline

    def _reserve(self, size: int) -> None:
        if self.journal.makes_file_for(size) and not self.space.has_room_for(self.journal.file_bytes):
            raise DiskFull("no room for another journal file")
        try:
            self.journal.reserve(size)
        except OSError as error:
            if not self.lacks_room(error):
                raise
            lacking = "room" if error.errno in NO_ROOM else "file descriptor"
            raise DiskFull(f"no {lacking} for another journal file") from error

    def _write(self, inline: list[RoundPart], runs: list[Run], body: list[Bytes], result: CommittedRound) -> None:
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
                        held.enter_context(
                            self.files.held(path)
                        )  # a rollback truncates it, perhaps without a free descriptor
            with self._refused_for(NO_FILES, saved):  # any other error of a sync is final
                self._sync_direct(runs, result)
            with self._refused_for(NO_ROOM + NO_FILES, saved):
                if body:
                    self.journal.append(body)

    @contextmanager
    def _refused_for(self, reasons: tuple[int, ...], saved: Sequence[tuple[LogEnd, SavedTail]]) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in reasons or self.files.failure is not None:
                raise
            self.roll_back(saved)
            reason = "the disk is full" if error.errno in NO_ROOM else "no file descriptor is free"
            raise DiskFull(reason) from error

    @staticmethod
    def roll_back(saved: Sequence[tuple[LogEnd, SavedTail]]) -> None:
        """Remove the round from the segments so that it can be refused; the journal holds at most a torn entry of it.
        If this fails, the error stops the shard: a log must not hold records that it refused."""
        for log, state in saved:
            log.tail.secure_undo(log.tail.undo_to(state))

    @staticmethod
    def lacks_room(error: OSError) -> bool:
        return error.errno in NO_ROOM + NO_FILES

    @staticmethod
    def _write_parts(log: LogEnd, parts: list[RoundPart], result: CommittedRound, *, direct: bool) -> None:
        for part in parts:
            if int.from_bytes(part.data[:8], "big") != part.base_offset:
                # The same buffer was written to another log of this round first.
                codec.patch_run(part.data, 0, len(part.data), part.base_offset, log.epoch)
        data = [part.data for part in parts]
        result.segments_created += log.tail.append(data, sum(map(len, data)), parts[0].base_offset, direct=direct)

    @staticmethod
    def _secure_tails(inline: list[RoundPart], result: CommittedRound) -> None:
        """Sync the records that precede this round's in their logs. They are not synced if the log is async, or was
        until a moment ago, and records in a synced entry must not become durable before them."""
        for log in {part.log.id: part.log for part in inline}.values():
            if log.tail.is_unsynced:
                result.syncs += log.tail.sync()

    def _sync_direct(self, runs: list[Run], result: CommittedRound) -> None:
        with self._timed(result):
            for log, _ in runs:
                if log.write_mode.syncs_before_confirm:
                    result.syncs += log.tail.sync()
                    result.direct_ends.append((log.id, log.epoch, log.tail.next_offset))

    @contextmanager
    def _timed(self, result: CommittedRound) -> Iterator[None]:
        started = self._monotonic()
        yield
        result.sync_s += self._monotonic() - started

    def apply_rest(self, result: CommittedRound) -> CommittedRound:
        """Bring the unapplied runs of the journal into the segments. On a full disk they stay in the journal and are
        retried: they are durable, so they cannot be refused any more, and no later record may overtake them."""
        while self.unapplied:
            log, parts = self.unapplied[0]
            if log.is_deleted:
                self.unapplied.popleft()
                continue
            saved = log.tail.save()
            try:
                # The entry of a group of async logs may be unsynced: then only a sync of the segment makes it durable.
                self._write_parts(log, parts, result, direct=not log.write_mode.syncs_before_confirm)
            except OSError as error:
                if not self.lacks_room(error):
                    raise
                log.tail.undo_to(saved)
                return result
            self.unapplied.popleft()
            self.publish_ends(log)
        return result

    def publish_ends(self, log: LogEnd, *, must: bool = False) -> None:
        """Write the log's slot, so that other processes see its new ends. On a full disk the slot stays out of date,
        which is harmless, unless `must`."""
        try:
            self.slots.write(self.ends(log, log.tail.next_offset))
        except OSError as error:
            if must:
                raise
            if not self.lacks_room(error):
                raise StorageFailed(f"the slots cannot be written: {error}") from error

    @staticmethod
    def ends(log: LogEnd, next_offset: int) -> Ends:
        return Ends(*log.ends_at(next_offset))

    def _publish_sequence(self) -> None:
        try:
            self.slots.write_sequence(self.journal.synced)
        except OSError as error:
            if not self.lacks_room(error):
                raise StorageFailed(f"the slots cannot be written: {error}") from error

    def sync_journal(self) -> None:
        self.journal.sync()
        self._publish_sequence()


__all__ = ["CommittedRound", "Committer", "JournalFull"]
