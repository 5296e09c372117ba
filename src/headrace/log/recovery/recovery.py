"""Recovery: opening a data folder, keeping everything that survived, and reporting what was done.

Bytes that are known to be on stable storage are trusted; their checksums are verified when they are read. Batches
written since the last checkpoint are scanned, completed from the journal and *written again* to new files, which are
synced before anything relies on them: after a failed write-back the page cache holds bytes that the disk does not
have, and only writing them again makes them durable.

No old file is changed before the new files and the state marker that covers them are durable, so a crash during
recovery changes nothing. A bad byte below the durable end is damage: it is reported, the log serves the records before
it and takes no appends, and none of its files is changed.
"""

from dataclasses import dataclass, field
from typing import Protocol

from headrace.clock import Clock
from headrace.errors import CorruptJournal
from headrace.log.commit import journal as journals
from headrace.log.commit import slots
from headrace.log.commit.journal import Journal
from headrace.log.commit.journal_entry import PUT, ReplayedEnd, ReplayedPart, StateChange, decode
from headrace.log.commit.slots import Slots
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk
from headrace.log.disk.file_cache import FileCache
from headrace.log.log import Log, LogSpec
from headrace.log.recovery.log_recovery import LogRecovery
from headrace.log.settings import LogSettings
from headrace.log.state.store import DiskStateStore, Marker
from headrace.log.state.tables import IDS, NEXT_LOG_ID, TRUNCATIONS
from headrace.log.tier.archive import remove_archived, remove_strays
from headrace.log.tier.sources import Archives

STRAYS_NAMED = 10
ID_BLOCK = 1 << 32  # log ids reserved by every start: far more than one run can use; the rest is never assigned


class OpeningShard(Protocol):
    """A shard that is being opened. Recovery sets `epoch`, `ids`, `logs` and `pending_truncations`, and calls `begin`
    once everything on disk is known."""

    root: str
    settings: LogSettings
    clock: Clock
    disk: Disk
    files: FileCache
    archives: Archives
    state: DiskStateStore
    tier_root: str
    epoch: int
    ids: range
    logs: dict[int, Log]
    pending_truncations: list[tuple[Log, int]]

    def new_log(self, spec: LogSpec) -> Log: ...
    def apply_changes(self, changes: list[StateChange]) -> None: ...
    def sync_filesystem(self) -> None: ...
    def begin(self, journal: Journal, slots: Slots) -> None: ...


@dataclass(slots=True)
class RecoveryReport:
    clean: bool = True
    new: bool = False  # the data folder was empty
    logs: int = 0
    records: int = 0  # recovered of those written since the last checkpoint
    bytes_kept: int = 0
    bytes_cut: int = 0  # torn tails; never a confirmed record
    indexes_rebuilt: int = 0  # segments whose indexes were wrong or missing
    journal_entries: int = 0
    damaged: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)  # damaged files that were replaced by their second copy
    strays: list[str] = field(default_factory=list)  # folders that belong to no log in the catalog
    seconds: float = 0.0

    def summary(self) -> str:
        text = self._start()
        if self.indexes_rebuilt:
            text += f"; indexes of {_count(self.indexes_rebuilt, 'segment')} rebuilt"
        if self.damaged:
            text += f"; DAMAGED: {'; '.join(self.damaged)}"
        if self.restored:
            text += f"; RESTORED: {'; '.join(self.restored)}"
        if self.strays:
            more = f" and {len(self.strays) - STRAYS_NAMED:,} more" if len(self.strays) > STRAYS_NAMED else ""
            text += f"; STRAY: of no topic or queue in {paths.LOGS}/: {', '.join(self.strays[:STRAYS_NAMED])}{more}"
        return text

    def _start(self) -> str:
        if self.new:
            return "new data folder"
        if self.clean:
            return f"clean stop: {_count(self.logs, 'log')}"
        return (
            f"recovered from an unclean stop: {_count(self.logs, 'log')}, {self.records:,} records "
            f"({self.bytes_kept:,} bytes) kept since the last checkpoint, {self.bytes_cut:,} torn bytes cut"
        )


def _count(count: int, what: str) -> str:
    return f"1 {what}" if count == 1 else f"{count:,} {what}s"


def recover(shard: OpeningShard, specs: list[LogSpec]) -> RecoveryReport:
    started = shard.clock.monotonic()
    shard.state.load()
    marker = shard.state.marker
    hints = slots.read_all(shard.disk, f"{shard.root}/{paths.SLOTS}")
    replayed = _Replayed(shard, marker)
    check_witness(shard.disk, shard.root, replayed.sequence)
    report = RecoveryReport(clean=marker.clean and not replayed.entries, logs=len(specs))
    report.new = shard.state.is_new
    report.journal_entries = replayed.entries
    shard.epoch = marker.epoch if report.clean else marker.epoch + 1
    folders = _folders(shard, {spec.id for spec in specs}, report)
    replayed.secure()
    if not report.clean:
        # After a kill, file names in the page cache may differ from those on disk: make them durable before relying
        # on them. That includes the names of the logs' folders, which their logs take for durable.
        _sync_folders(shard, [f"{shard.root}/{paths.LOGS}", *folders.values()])
    recoveries: list[LogRecovery] = []
    try:
        _recover_logs(shard, specs, folders, hints, replayed, report, recoveries)
        # The state comes before the renaming of segments, so that a start on a full disk leaves nothing behind.
        _prepare_state(shard, recoveries, replayed.sequence)
        _make_durable(shard, recoveries)
    except OSError:
        for recovery in recoveries:
            recovery.new_files.abandon()
        shard.state.abandon()
        raise
    _begin(shard, replayed.sequence)
    # Before the first append: an old file that came back after a crash would be read as the log's continuation.
    _sync_folders(shard, [recovery.folder for recovery in recoveries if recovery.clean_up()])
    for recovery in recoveries:
        report.indexes_rebuilt += recovery.indexes.rebuilt
        if recovery.log.damage is None:
            remove_strays(shard.disk, shard.tier_root, recovery.folder, recovery.log.segments)
    report.restored += shard.state.restored
    report.seconds = shard.clock.monotonic() - started
    return report


def _recover_logs(
    shard: OpeningShard,
    specs: list[LogSpec],
    folders: dict[int, str],
    hints: dict[int, slots.Ends],
    replayed: "_Replayed",
    report: RecoveryReport,
    recoveries: list[LogRecovery],
) -> None:
    for spec in specs:
        evidence = max(hints[spec.id].durable_end if spec.id in hints else 0, replayed.ends.get(spec.id, 0))
        recovery = LogRecovery(
            shard.new_log(spec),
            folders.get(spec.id),
            replayed.parts.get(spec.id, {}),
            evidence,
            files=shard.files,
            archives=shard.archives,
            state=shard.state,
            clock=shard.clock,
            batch_bytes_max=shard.settings.batch_bytes_max,
        )
        recoveries.append(recovery)
        recovery.run(trust=report.clean)
        if recovery.pending_truncation is not None:
            shard.pending_truncations.append((recovery.log, recovery.pending_truncation))
        report.records += recovery.records
        report.bytes_kept += recovery.bytes_kept
        report.bytes_cut += recovery.bytes_cut
        if recovery.log.damage is not None:
            report.damaged.append(str(recovery.log.damage))
        shard.logs[spec.id] = recovery.log


class _Replayed:
    """The journal's entries since the checkpoint: state changes are applied, batches sorted by log."""

    def __init__(self, shard: OpeningShard, marker: Marker) -> None:
        self.entries = 0
        self.sequence = marker.sequence
        self.parts: dict[int, dict[int, ReplayedPart]] = {}
        self.ends: dict[int, int] = {}
        self._unsure: list[journals.Entry] = []  # entries that may be in the page cache only
        self._disk = shard.disk
        self._folder = f"{shard.root}/{paths.JOURNAL}"
        for entry in journals.replay(shard.disk, self._folder, marker.sequence):
            self.entries += 1
            self.sequence = entry.sequence
            self._unsure = [*(one for one in self._unsure if one.sequence > entry.synced), entry]
            cuts: dict[int, int] = {}
            for item in decode(entry.body):
                if isinstance(item, ReplayedPart):
                    self.parts.setdefault(item.log_id, {})[item.base_offset] = item
                    self._prove(item.log_id, item.next_offset)
                elif isinstance(item, ReplayedEnd):
                    self._prove(item.log_id, item.end)
                else:
                    shard.apply_changes([item])
                    if item.table == TRUNCATIONS and item.kind == PUT:
                        cuts[int.from_bytes(item.key, "big")] = int.from_bytes(item.value, "big")
            for log_id, offset in cuts.items():  # records behind a truncation are no longer expected
                self.ends[log_id] = min(self.ends.get(log_id, 0), offset)

    def secure(self) -> None:
        """Make the replayed entries durable before recovery changes files because of them."""
        if self._unsure:
            journals.write_again(self._disk, self._folder, self._unsure)

    def _prove(self, log_id: int, end: int) -> None:
        self.ends[log_id] = max(self.ends.get(log_id, 0), end)


def check_witness(disk: Disk, root: str, sequence: int) -> None:
    """CorruptJournal if synced entries are missing at the journal's end. No later entry can say that they were synced,
    but the slots do."""
    synced = slots.read_sequence(disk, f"{root}/{paths.SLOTS}")
    if synced > sequence:
        reason = f"entries {sequence + 1:,} to {synced:,} were synced and are gone"
        raise CorruptJournal(f"{root}/{paths.JOURNAL}", 0, reason)


def _folders(shard: OpeningShard, known: set[int], report: RecoveryReport) -> dict[int, str]:
    """Folders by log id. Removes those of deleted logs; reports those that no log in the catalog owns."""
    root = f"{shard.root}/{paths.LOGS}"
    found = {}
    for name in shard.disk.listdir(root):
        log_id = paths.parse_log_folder(name)
        if name.endswith(paths.DELETED):
            if not remove_archived(shard.disk, shard.tier_root, f"{root}/{name}"):
                continue  # the tier cannot be changed at the moment: a later start tries again
            for inner in shard.disk.listdir(f"{root}/{name}"):
                shard.disk.unlink(f"{root}/{name}/{inner}")
            shard.disk.rmdir(f"{root}/{name}")
        elif log_id in known:
            found[log_id] = f"{root}/{name}"
            _remove_unfinished(shard, found[log_id])
        else:
            report.strays.append(name)
    return found


def _remove_unfinished(shard: OpeningShard, folder: str) -> None:
    """Remove the temporary files of an interrupted compaction or start, first of all: recovery may need the space."""
    for name in shard.disk.listdir(folder):
        if name.endswith(paths.UNFINISHED):
            shard.disk.unlink(f"{folder}/{name}")


def _sync_folders(shard: OpeningShard, folders: list[str]) -> None:
    if len(folders) > shard.disk.sync_each_max:
        shard.sync_filesystem()
        return
    for folder in folders:
        shard.disk.sync_dir(folder)


def _make_durable(shard: OpeningShard, recoveries: list[LogRecovery]) -> None:
    changed = [recovery for recovery in recoveries if recovery.new_files]
    if sum(len(recovery.new_files) for recovery in changed) > shard.disk.sync_each_max:
        shard.sync_filesystem()
    else:
        for recovery in changed:
            recovery.new_files.sync()
    for recovery in changed:
        recovery.new_files.seal()
    for recovery in changed:
        recovery.new_files.put_in_place()
    if changed:
        shard.disk.sync_dir(f"{shard.root}/{paths.LOGS}")


def _prepare_state(shard: OpeningShard, recoveries: list[LogRecovery], sequence: int) -> None:
    state = shard.state
    for recovery in recoveries:
        recovery.record_state()
    first = int.from_bytes(state.get(IDS, NEXT_LOG_ID) or b"\x01", "big")
    first = max(first, max(shard.logs, default=0) + 1)
    shard.ids = range(first, first + ID_BLOCK)
    state.apply_put(IDS, NEXT_LOG_ID, (first + ID_BLOCK).to_bytes(8, "big"))
    # To a new file: the one that was read may be in the page cache only.
    state.prepare(state.take_all(), Marker(sequence, shard.epoch, clean=False))


def _begin(shard: OpeningShard, sequence: int) -> None:
    """Put the state in place: its marker commits epoch, ends and a new block of log ids in one durable step."""
    shard.state.put_in_place()
    journal = Journal(
        shard.disk,
        f"{shard.root}/{paths.JOURNAL}",
        shard.settings.journal_file_bytes,
        shard.settings.journal_files,
    )
    journal.start(sequence, shard.epoch)
    shard.begin(journal, Slots(shard.disk, f"{shard.root}/{paths.SLOTS}"))


__all__ = ["OpeningShard", "RecoveryReport", "check_witness", "recover"]
