"""Slots: 64 bytes per log with its offsets, so that other processes (Spark) can read them without asking the broker.

A slot is written after each sync and rarely synced itself. Its ends were durable before it was written, so an outdated
slot is harmless, except after a truncation, which syncs it. The file can be deleted: every start writes it again.

The first slot is the journal's. Its durable end is the last entry that a sync covered. No later entry can prove that
the last one was complete, so this slot tells a damaged entry from one that a crash tore.
"""

import struct
from collections.abc import Iterable
from typing import NamedTuple

from headrace.log.commit.file_ends import JOURNAL_ID, SlotFile
from headrace.log.disk.disk import Disk, FileId, read_whole
from headrace.log.segments import index
from headrace.record.batch.crc32c import crc32c

SLOT = struct.Struct(
    "<qqqqqqi8xI"
)  # id, epoch, start, visible end, durable end, stable end, flags, spare, crc of the rest
assert SLOT.size == 64
_CRC_AT = SLOT.size - 4
JOURNAL = JOURNAL_ID  # stands for a log's id in the first slot


class Ends(NamedTuple):
    log_id: int
    epoch: int
    start: int
    visible_end: int
    durable_end: int
    stable_end: int  # where readers of committed records stop: the visible end unless a transaction is open


def pack(ends: Ends) -> bytes:
    return index.pack_slot(*ends)


def unpack(raw: bytes | memoryview) -> Ends | None:
    """None for an empty slot, and for one that is just being written: the reader tries again."""
    if crc32c(raw[:_CRC_AT]) != int.from_bytes(raw[_CRC_AT : SLOT.size], "little"):
        return None
    log_id, epoch, start, visible_end, durable_end, stable_end, _flags, _crc = SLOT.unpack(raw)
    return Ends(log_id, epoch, start, visible_end, durable_end, stable_end)


class Slots(SlotFile):
    """The broker's side. A log keeps its place in the file; places of deleted logs are reused."""

    def __init__(self, disk: Disk, path: str) -> None:
        super().__init__()
        self._disk = disk
        self._path = path

    @property
    def file(self) -> FileId | None:
        return self._file

    def start(self, sequence: int, ends: Iterable[Ends]) -> None:
        """Write a new file. `sequence` is the journal's last entry, which is durable.

        The journal's slot is in the file's first, synced block: after a power cut, blocks that were added later may
        hold anything, even an old slot of another broker."""
        ends = [_journal(sequence), *ends]
        if self._disk.exists(self._path):
            self._disk.unlink(self._path)  # readers that have the old file open see ends that no longer move
        self._file = self._disk.open(self._path, create=True)
        for entry in ends:
            self._places[entry.log_id] = self._next
            self._next += 1
        self._disk.pwrite(self._file, [b"".join(map(pack, ends))], 0)
        # Otherwise a power cut could bring the old file back, with ends from before a truncation.
        self._disk.sync(self._file)
        self._disk.sync_dir(self._path.rpartition("/")[0])

    def write_sequence(self, sequence: int) -> None:
        """Only for entries that a sync has covered: a journal that ends before its slot is refused as damaged."""
        self.write(_journal(sequence))

    def write(self, ends: Ends) -> None:
        step = self.step(ends)
        assert step.buffers is not None
        self._disk.pwrite(step.file, step.buffers, step.position)

    def sync(self) -> None:
        assert self._file is not None
        self._disk.sync(self._file)

    def remove(self, log_id: int) -> None:
        place = self._places.pop(log_id, None)
        if place is not None and self._file is not None:
            self._disk.pwrite(self._file, [bytes(SLOT.size)], place * SLOT.size)
            self._free.append(place)

    def close(self) -> None:
        if self._file is not None:
            self._disk.close(self._file)
            self._file = None


def _journal(sequence: int) -> Ends:
    return Ends(JOURNAL, 0, 0, sequence, sequence, sequence)


def read_all(disk: Disk, path: str) -> dict[int, Ends]:
    return {ends.log_id: ends for ends in _read(disk, path) if ends is not None and ends.log_id > 0}


def read_sequence(disk: Disk, path: str) -> int:
    """The last journal entry that is known to have been synced; 0 if unknown."""
    first = next(iter(_read(disk, path)), None)
    return first.durable_end if first is not None and first.log_id == JOURNAL else 0


def rewrite_sequence(disk: Disk, path: str, sequence: int) -> None:
    """Set the journal's slot back, after a user has accepted the loss of later entries."""
    if read_sequence(disk, path) == 0:
        return
    file = disk.open(path)
    try:
        disk.pwrite(file, [pack(_journal(sequence))], 0)
        disk.sync(file)
    finally:
        disk.close(file)


def _read(disk: Disk, path: str) -> list[Ends | None]:
    if not disk.exists(path):
        return []
    raw = memoryview(read_whole(disk, path))
    return [unpack(raw[at : at + SLOT.size]) for at in range(0, len(raw) - SLOT.size + 1, SLOT.size)]
