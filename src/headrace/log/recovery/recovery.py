"""Opening a data folder: find out what survived, keep it, and say what was done.

What is known to be on stable storage is trusted (its checksums are checked when it is read). What was written
since the last checkpoint is scanned, batch by batch, filled up from the journal, and *written again* to fresh files
that are synced before anything relies on them: after a failed write-back the page cache holds bytes that the disk
does not, and only a new write of them can be believed.

Nothing old is touched before the new files and the marker that names them are durable, so being killed here changes
nothing. Below the durable end a bad byte is damage: it is reported, the log serves what lies before it, takes
no appends, and no file of it is changed.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.errors import CorruptJournal
from headrace.log.commit import journal as journals
from headrace.log.commit import slots
from headrace.log.commit.journal import Journal
from headrace.log.commit.journal_entry import PUT, ReplayedEnd, ReplayedPart, decode
from headrace.log.commit.slots import Slots
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk
from headrace.log.log import LogSpec
from headrace.log.recovery.log_recovery import LogRecovery
from headrace.log.state.store import Marker
from headrace.log.state.tables import IDS, NEXT_LOG_ID, TRUNCATIONS
from headrace.log.tier.archive import remove_archived, remove_strays

if TYPE_CHECKING:
    from headrace.log.shard import Shard

STRAYS_NAMED = 10
ID_BLOCK = 1 << 32  # far more than one run can use; a block is simply not finished


@dataclass(slots=True)
class RecoveryReport:
    clean: bool = True
    new: bool = False  # there was nothing here before
    logs: int = 0
    records: int = 0  # kept of what was written since the last checkpoint
    bytes_kept: int = 0
    bytes_cut: int = 0  # torn tails; never a confirmed record
    indexes_rebuilt: int = 0
    journal_entries: int = 0
    damaged: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)  # files that were damaged and had a second copy
    strays: list[str] = field(default_factory=list)  # folders that belong to no log in the catalog
    seconds: float = 0.0

    def summary(self) -> str:
        text = self._start()
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
            return f"clean stop: {_logs(self.logs)}"
        return (
            f"recovered from an unclean stop: {_logs(self.logs)}, {self.records:,} records "
            f"({self.bytes_kept:,} bytes) kept since the last checkpoint, {self.bytes_cut:,} torn bytes cut"
        )


def _logs(count: int) -> str:
    return "1 log" if count == 1 else f"{count:,} logs"


def recover(shard: "Shard", specs: list[LogSpec]) -> RecoveryReport:
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
        # After a kill a name may be seen, or missed, that a power cut would change again: first make them last.
        # That of a log's folder, too, which its log takes for made.
        _sync_folders(shard, [f"{shard.root}/{paths.LOGS}", *folders.values()])
    recoveries: list[LogRecovery] = []
    try:
        _recover_logs(shard, specs, folders, hints, replayed, report, recoveries)
        # The state before the segments get their names: a start that finds no room for it leaves nothing behind.
        _prepare_state(shard, recoveries, replayed.sequence)
        _make_durable(shard, recoveries)
    except OSError:
        for recovery in recoveries:
            recovery.fresh.abandon()
        shard.state.abandon()
        raise
    _begin(shard, replayed.sequence)
    # Before the first append: a file of a former life that came back would be read as its continuation.
    _sync_folders(shard, [recovery.folder for recovery in recoveries if recovery.clean_up()])
    for recovery in recoveries:
        if recovery.log.damage is None:
            remove_strays(shard.disk, shard.tier_root, recovery.folder, recovery.log.segments)
    report.restored += shard.state.restored
    report.seconds = shard.clock.monotonic() - started
    return report


def _recover_logs(
    shard: "Shard",
    specs: list[LogSpec],
    folders: dict[int, str],
    hints: dict[int, slots.Ends],
    replayed: "_Replayed",
    report: RecoveryReport,
    recoveries: list[LogRecovery],
) -> None:
    for spec in specs:
        evidence = max(hints[spec.id].durable_end if spec.id in hints else 0, replayed.ends.get(spec.id, 0))
        recovery = LogRecovery(shard, spec, folders.get(spec.id), replayed.parts.get(spec.id, {}), evidence)
        recoveries.append(recovery)
        recovery.run(trust=report.clean)
        report.records += recovery.records
        report.bytes_kept += recovery.bytes_kept
        report.bytes_cut += recovery.bytes_cut
        report.indexes_rebuilt += recovery.indexes_rebuilt
        if recovery.log.damage is not None:
            report.damaged.append(str(recovery.log.damage))
        shard.logs[spec.id] = recovery.log


class _Replayed:
    """What the journal holds past the checkpoint: state changes are applied, batches sorted by log."""

    def __init__(self, shard: "Shard", marker: Marker) -> None:
        self.entries = 0
        self.sequence = marker.sequence
        self.parts: dict[int, dict[int, ReplayedPart]] = {}
        self.ends: dict[int, int] = {}
        self._unsure: list[journals.Entry] = []  # perhaps in the page cache only
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
            for log_id, offset in cuts.items():  # what was proved up to this entry is to be forgotten
                self.ends[log_id] = min(self.ends.get(log_id, 0), offset)

    def secure(self) -> None:
        """From here on the disk is changed: what was replayed is acted upon."""
        if self._unsure:
            journals.write_again(self._disk, self._folder, self._unsure)

    def _prove(self, log_id: int, end: int) -> None:
        self.ends[log_id] = max(self.ends.get(log_id, 0), end)


def check_witness(disk: Disk, root: str, sequence: int) -> None:
    """The last entries of a journal have none behind them to tell that they were synced: their slot does."""
    synced = slots.read_sequence(disk, f"{root}/{paths.SLOTS}")
    if synced > sequence:
        reason = f"entries {sequence + 1:,} to {synced:,} were synced and are gone"
        raise CorruptJournal(f"{root}/{paths.JOURNAL}", 0, reason)


def _folders(shard: "Shard", known: set[int], report: RecoveryReport) -> dict[int, str]:
    """Folder by log id. One that was being deleted goes; one that nobody knows is left for a person to judge."""
    root = f"{shard.root}/{paths.LOGS}"
    found = {}
    for name in shard.disk.listdir(root):
        log_id = paths.parse_log_folder(name)
        if name.endswith(paths.DELETED):
            if not remove_archived(shard.disk, shard.tier_root, f"{root}/{name}"):
                continue  # the tier is read-only for now: another start
            for inner in shard.disk.listdir(f"{root}/{name}"):
                shard.disk.unlink(f"{root}/{name}/{inner}")
            shard.disk.rmdir(f"{root}/{name}")
        elif log_id in known:
            found[log_id] = f"{root}/{name}"
            _remove_unfinished(shard, found[log_id])
        else:
            report.strays.append(name)
    return found


def _remove_unfinished(shard: "Shard", folder: str) -> None:
    """Of a compaction or a start that was killed. First of all: what follows may need its room."""
    for name in shard.disk.listdir(folder):
        if name.endswith(paths.UNFINISHED):
            shard.disk.unlink(f"{folder}/{name}")


def _sync_folders(shard: "Shard", folders: list[str]) -> None:
    if len(folders) > shard.disk.sync_each_max:
        shard.sync_filesystem()
        return
    for folder in folders:
        shard.disk.sync_dir(folder)


def _make_durable(shard: "Shard", recoveries: list[LogRecovery]) -> None:
    fresh = [recovery for recovery in recoveries if recovery.fresh]
    if sum(len(recovery.fresh) for recovery in fresh) > shard.disk.sync_each_max:
        shard.sync_filesystem()
    else:
        for recovery in fresh:
            recovery.fresh.sync()
    for recovery in fresh:
        recovery.fresh.seal()
    for recovery in fresh:
        recovery.fresh.put_in_place()
    if fresh:
        shard.disk.sync_dir(f"{shard.root}/{paths.LOGS}")


def _prepare_state(shard: "Shard", recoveries: list[LogRecovery], sequence: int) -> None:
    state = shard.state
    for recovery in recoveries:
        recovery.record_state()
    first = int.from_bytes(state.get(IDS, NEXT_LOG_ID) or b"\x01", "big")
    first = max(first, max(shard.logs, default=0) + 1)
    shard.ids = range(first, first + ID_BLOCK)
    state.apply_put(IDS, NEXT_LOG_ID, (first + ID_BLOCK).to_bytes(8, "big"))
    # To a fresh file: what was read may be in the page cache only, and nothing may be built on that.
    state.prepare(state.take_all(), Marker(sequence, shard.epoch, clean=False))


def _begin(shard: "Shard", sequence: int) -> None:
    """The marker makes the recovery final: epoch, ends and a fresh block of ids, in one durable step."""
    shard.state.put_in_place()
    journal = Journal(
        shard.disk,
        f"{shard.root}/{paths.JOURNAL}",
        shard.settings.journal_file_bytes,
        shard.settings.journal_files,
    )
    journal.start(sequence, shard.epoch)
    shard.begin(journal, Slots(shard.disk, f"{shard.root}/{paths.SLOTS}"))


__all__ = ["RecoveryReport", "recover"]
