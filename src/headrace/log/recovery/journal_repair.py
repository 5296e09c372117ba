"""Repairing a damaged journal, for `headrace log repair`.

The journal holds the records confirmed since the last checkpoint. When a synced entry cannot be read any more, the
broker refuses to start, because starting without it may lose confirmed records, and an operator has to decide that.
This module shows what is left and accepts the loss. Nothing is deleted: damaged files are renamed.
"""

from dataclasses import dataclass

from headrace.errors import CorruptJournal
from headrace.log.commit import journal, slots
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, RealDisk
from headrace.log.recovery.recovery import check_witness
from headrace.log.standby import follower
from headrace.log.state.store import DiskStateStore

SET_ASIDE = ".lost"


@dataclass(frozen=True, slots=True)
class JournalFacts:
    checkpoint: int  # the last entry that segments and state include durably
    readable: int  # the last entry that can be read
    synced: int  # the last entry that is known to have been synced
    problem: str | None
    set_aside: tuple[str, ...] = ()


def examine(root: str, disk: Disk | None = None) -> JournalFacts:
    """Report what is left of the journal, and change nothing. The broker must be stopped."""
    return _locked(root, disk or RealDisk(), accept=False)


def accept_loss(root: str, disk: Disk | None = None) -> JournalFacts:
    """Have the journal end before its first unreadable entry. A sound journal is not changed.

    A crash in between loses nothing more: the broker still refuses to start, and all readable entries are kept.
    """
    return _locked(root, disk or RealDisk(), accept=True)


def _locked(root: str, disk: Disk, *, accept: bool) -> JournalFacts:
    lock = disk.lock(f"{root}/{paths.LOCK}")
    try:
        follower.check_whole(disk, root)
        facts, entries = _read(root, disk)
        if not accept or facts.problem is None:
            return facts
        aside = _set_aside(disk, f"{root}/{paths.JOURNAL}", entries)
        slots.rewrite_sequence(disk, f"{root}/{paths.SLOTS}", facts.readable)
        return JournalFacts(facts.checkpoint, facts.readable, facts.synced, facts.problem, tuple(aside))
    finally:
        disk.close(lock)


def _read(root: str, disk: Disk) -> tuple[JournalFacts, list[journal.Entry]]:
    state = DiskStateStore(disk, f"{root}/{paths.STATE}")
    state.load()
    state.close()
    entries: list[journal.Entry] = []
    readable = state.marker.sequence
    problem = None
    try:
        for entry in journal.replay(disk, f"{root}/{paths.JOURNAL}", readable):
            entries.append(entry)
            readable = entry.sequence
        check_witness(disk, root, readable)
    except CorruptJournal as error:
        problem = f"{error.path} at byte {error.position:,}: {error.found}"
    synced = max([slots.read_sequence(disk, f"{root}/{paths.SLOTS}"), *(entry.synced for entry in entries)])
    return JournalFacts(state.marker.sequence, readable, synced, problem), entries


def _set_aside(disk: Disk, folder: str, entries: list[journal.Entry]) -> list[str]:
    names = [name for name in disk.listdir(folder) if paths.parse_journal(name) is not None]
    headers = {name: journal.read_header(disk, f"{folder}/{name}") for name in names}
    if entries:
        journal.write_again(disk, folder, entries, as_copy=False)
    # Newest first: if this is interrupted, the files that remain still hold all entries before the damage.
    moved = []
    for name in sorted(names, key=lambda name: headers[name] or (0, 0), reverse=True):
        path = f"{folder}/{name}"
        if headers[name] is None and journal.is_unused(disk, path):
            continue
        moved.append(_free_name(disk, path))
        disk.rename(path, moved[-1])
    disk.sync_dir(folder)
    return moved


def _free_name(disk: Disk, path: str) -> str:
    """A name that keeps the files of earlier repairs."""
    number = 1
    while disk.exists(f"{path}{SET_ASIDE}{number}"):
        number += 1
    return f"{path}{SET_ASIDE}{number}"
