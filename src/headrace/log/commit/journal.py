"""The journal: the write-ahead file that all logs of a shard share, so that one sync makes a whole round durable.

    file   = block(magic, number, first sequence, crc) entry*
    entry  = header(crc, magic, file number, sequence, synced, body bytes) body, padded to 512 bytes

A new file is filled with zeros and recycled afterwards, so that a sync never has to update the file size. Old entries
in a recycled file are never mistaken for new ones: an entry's CRC covers the file's number and the entry's sequence
number, and both only grow.

Every entry starts on a new sector, so that a torn write never damages an entry that was synced before.
"""

import struct
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.errors import CorruptJournal, StorageError
from headrace.log.commit.file_ends import JournalEnd
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, FileId, read_whole
from headrace.log.disk.file_cache import NO_ROOM
from headrace.log.disk.io_chain import Step
from headrace.log.segments import index
from headrace.record.batch.crc32c import crc32c

Bytes = bytes | bytearray | memoryview

SECTOR = 512
FILE_MAGIC = b"HRJOURN1"
FILE_HEADER = struct.Struct("<8sQQI")  # magic, number, first sequence, crc of the rest
ENTRY_MAGIC = 0x48524A45
# crc of the rest and the body, magic, file number, sequence, last sequence synced before it, body bytes
ENTRY_HEADER = struct.Struct("<IIQQQI")
_CRC_BYTES = 4
_COPY = b"copy"  # follows the header of a file that recovery wrote


def padded(size: int) -> int:
    return -(-size // SECTOR) * SECTOR


@dataclass(frozen=True, slots=True)
class Entry:
    sequence: int
    body: memoryview
    synced: int = 0  # the last entry that was synced when this one was written


class JournalFull(Exception):
    """No journal file is free until a checkpoint ends. Nothing was written; the caller waits."""


class Journal(JournalEnd):
    """Written in the worker's turn only. The owner thread may call `release`, and any thread `make_ahead`."""

    def __init__(self, disk: Disk, folder: str, file_bytes: int, files_max: int) -> None:
        super().__init__(padded(file_bytes))
        self._disk = disk
        self._folder = folder
        self.capacity = self._file_bytes - SECTOR - ENTRY_HEADER.size  # the largest body that fits an entry
        self._files_max = max(files_max, 2)
        self._free: list[str] = []
        self._live: list[tuple[int, str, int]] = []  # number, path, last sequence; oldest first
        self._path = ""
        self._making = threading.Lock()

    def start(self, sequence: int, epoch: int = 0) -> None:
        """Begin after recovery: everything in the folder has been replayed and may be overwritten.

        File numbers also grow with the epoch: the number in a torn header is unknown, and entries after such a header
        must not be mistaken for later ones.
        """
        self._disk.mkdir(self._folder)
        self.sequence = self._synced = sequence
        numbers = [n for n in map(paths.parse_journal, self._disk.listdir(self._folder)) if n is not None]
        for number in numbers:
            path = f"{self._folder}/{paths.journal_name(number)}"
            if self._disk.file_size(path) == self._file_bytes and len(self._free) < self._files_max:
                self._free.append(path)
            else:
                self._disk.unlink(path)
        self._number = max((self._header_number(path) for path in self._free), default=0)
        self._number = max(self._number, epoch << 32)
        self._next_name = max(numbers, default=-1) + 1
        self.make_ahead()

    @property
    def wants_another(self) -> bool:
        """Half of the file is used, and no other is ready: a round that needs one would wait until it is made."""
        return not self._free and 2 * self._position > self._file_bytes and self.files_live < self._files_max

    def make_ahead(self) -> None:
        """Make a file, unless one is ready."""
        with self._making:
            if not self._free:
                self._make()

    def _header_number(self, path: str) -> int:
        header = read_header(self._disk, path)
        return header[0] if header else 0

    def _make(self) -> None:
        path = f"{self._folder}/{paths.journal_name(self._next_name)}"
        self._next_name += 1
        file = self._disk.open(path, create=True, exclusive=True)
        try:
            try:
                chunk = bytes(min(self._file_bytes, 1 << 20))
                for position in range(0, self._file_bytes, len(chunk)):
                    self._disk.pwrite(file, [chunk[: self._file_bytes - position]], position)
                self._disk.sync(file)
            finally:
                self._disk.close(file)
            self._disk.sync_dir(self._folder)
        except OSError:
            # A partial file would look like one of a smaller setting, and every retry would leave another file.
            self._disk.unlink(path)
            raise
        self._free.append(path)

    @property
    def live_bytes(self) -> int:
        return len(self._live) * self._file_bytes + self._position

    @property
    def files_live(self) -> int:
        return len(self._live) + (self._file is not None)

    @property
    def is_full(self) -> bool:
        return not self._free and self.files_live >= self._files_max

    @property
    def file_bytes(self) -> int:
        return self._file_bytes

    def _fits(self, size: int) -> bool:
        """Whether an entry with a body of `size` bytes fits the file."""
        return self._file is not None and self._position + padded(ENTRY_HEADER.size + size) <= self._file_bytes

    def makes_file_for(self, size: int) -> bool:
        """Whether `reserve` would make a new file, which takes disk space."""
        return not self._free and not self.is_full and not self._fits(size)

    def reserve(self, size: int) -> None:
        """Make sure that an entry with a body of `size` bytes fits; raises JournalFull before anything is changed."""
        if not self._fits(size):
            self._next_file()

    def append(self, buffers: list[Bytes]) -> None:
        """Write one entry without a sync. Call `reserve` first."""
        step = self.step(buffers)
        assert step is not None and step.buffers is not None, "room was reserved"
        try:
            self._disk.pwrite(step.file, step.buffers, step.position)
        except OSError as error:
            if not self.completed(step, error):
                raise
        self.wrote(step)

    def completed(self, step: Step, error: OSError) -> bool:
        """Whether the write of an entry, which raised `error`, has written all of it except its padding.

        A full disk cuts a write short anywhere, even though the file has its size already: filesystems that copy on
        write or leave holes need space for an overwrite. An entry that was cut short has a wrong checksum, so recovery
        never finds it, and the next entry overwrites it. A complete one would be found, so it cannot be refused: it
        counts as written. Nothing has to be removed, which might need space, too.
        """
        if error.errno not in NO_ROOM:
            return False
        assert step.buffers is not None
        data = self._disk.pread(step.file, sum(map(len, step.buffers)), step.position)
        entry = _entry_at(memoryview(data), 0, self._number)
        return entry is not None and entry[0] == self.sequence + 1

    def sync_failed(self, error: OSError) -> None:
        self._failure = error

    def _next_file(self) -> None:
        if not self._free:
            if self.files_live >= self._files_max:
                raise JournalFull
            self.make_ahead()
        if self._file is not None:
            # The old file may hold unsynced entries (lazy changes), and later syncs cover only the new file.
            self.sync()
            self._disk.close(self._file)
            self._live.append((self._number, self._path, self.sequence))
            self._file = None
        path = self._free[0]
        file = self._disk.open(path)
        try:
            self._disk.pwrite(file, [_header(self._number + 1, self.sequence + 1)], 0)
        except OSError:
            self._disk.close(file)  # a file without a header holds no entries
            raise
        self._free.pop(0)
        self._path, self._file = path, file
        self._number += 1
        self._position = SECTOR

    def sync(self) -> None:
        if self._failure is not None:
            # This job was queued before the failure: another sync would report success without writing anything.
            raise OSError(self._failure.errno, f"an earlier sync failed: {self._failure}") from self._failure
        if self._file is not None and self.is_unsynced:
            covered = self.sequence  # read before the sync, which may not cover entries written while it runs
            self._sync_file(self._file)
            self._synced = covered

    def _sync_file(self, file: FileId) -> None:
        try:
            self._disk.sync(file)
        except OSError as error:
            self._failure = error
            raise

    def release(self, sequence: int) -> None:
        """Recycle the files whose entries, up to `sequence`, are durable in segments and state files."""
        while self._live and self._live[0][2] <= sequence:
            self._free.append(self._live.pop(0)[1])

    def close(self) -> None:
        if self._file is not None:
            self._disk.close(self._file)
            self._file = None


def _header(number: int, first: int) -> bytes:
    rest = FILE_HEADER.pack(FILE_MAGIC, number, first, 0)[:-_CRC_BYTES]
    return rest + crc32c(rest).to_bytes(_CRC_BYTES, "little")


def write_again(disk: Disk, folder: str, entries: Sequence[Entry], *, as_copy: bool = True) -> None:
    """Write entries, which may have been read from the page cache only, to a new file and sync it.

    Recovery acts on them log by log. If a power cut in between lost them, an atomic group could be in some of its logs
    and not in others. A sync of the file they were read from is not enough: after a failed sync the next one reports
    success without writing anything. `as_copy`: the file they were read from stays.
    """
    names = [number for number in map(paths.parse_journal, disk.listdir(folder)) if number is not None]
    headers = [read_header(disk, f"{folder}/{paths.journal_name(name)}") for name in names]
    number = max((header[0] for header in headers if header), default=0) + 1
    path = f"{folder}/{paths.journal_name(max(names, default=-1) + 1)}"
    mark = _COPY if as_copy else b""
    blocks: list[Bytes] = [(_header(number, entries[0].sequence) + mark).ljust(SECTOR, b"\0")]
    for entry in entries:
        blocks += index.journal_entry(number, entry.sequence, entry.synced, [entry.body])
    file = disk.open(path, create=True, exclusive=True)
    try:
        disk.pwrite(file, blocks, 0)
        disk.sync(file)
    except OSError:
        disk.close(file)
        disk.unlink(path)  # otherwise every start on a full disk would use up more space
        raise
    disk.close(file)
    disk.sync_dir(folder)
    # Remove the copies of starts that were interrupted: their entries are in this file, too.
    for name in names if as_copy else ():
        former = f"{folder}/{paths.journal_name(name)}"
        if _is_copy(disk, former):
            disk.unlink(former)


def _is_copy(disk: Disk, path: str) -> bool:
    file = disk.open(path, readonly=True)
    try:
        return disk.pread(file, len(_COPY), FILE_HEADER.size) == _COPY
    finally:
        disk.close(file)


def read_header(disk: Disk, path: str) -> tuple[int, int] | None:
    """(number, first sequence) of a journal file; None if it was never used or its header is torn."""
    file = disk.open(path, readonly=True)
    try:
        raw = disk.pread(file, FILE_HEADER.size, 0)
    finally:
        disk.close(file)
    if len(raw) < FILE_HEADER.size:
        return None
    magic, number, first, crc = FILE_HEADER.unpack(raw)
    if crc != crc32c(raw[:-_CRC_BYTES]):
        return None
    if magic != FILE_MAGIC:  # intact but of another format: not damage, so nothing of it may be dropped
        raise StorageError(f"{path} is of a newer version of Headrace: start that version, or restore an older backup")
    return number, first


def is_unused(disk: Disk, path: str) -> bool:
    """Whether the file holds only zeros, as when it was made."""
    return not any(read_whole(disk, path))


def replay(disk: Disk, folder: str, after: int) -> Iterator[Entry]:
    """Every entry after sequence number `after`, in order, up to the first incomplete one.

    The journal ends with a torn entry or none. A damaged entry that was synced, according to a later one, is neither:
    that raises CorruptJournal.
    """
    if not disk.exists(folder):
        return
    found = []
    for name in disk.listdir(folder):
        header = read_header(disk, f"{folder}/{name}") if paths.parse_journal(name) is not None else None
        if header is not None:
            found.append((*header, f"{folder}/{name}"))
    expected = after + 1
    for number, first, path in sorted(found):
        if first > expected:
            raise CorruptJournal(path, 0, f"entries {expected} to {first - 1} of the journal are missing")
        for entry in _entries(disk, path, number, first, after):
            if entry.sequence == expected:
                expected += 1
                yield entry


def _entries(disk: Disk, path: str, number: int, sequence: int, after: int) -> Iterator[Entry]:
    raw = read_whole(disk, path)
    data = memoryview(raw)
    position = SECTOR
    while (entry := _entry_at(data, position, number)) is not None and entry[0] == sequence:
        yield Entry(sequence, entry[2], entry[1])
        sequence += 1
        position += padded(ENTRY_HEADER.size + len(entry[2]))
    if sequence <= after:
        return  # the checkpoint covers it
    magic = ENTRY_MAGIC.to_bytes(4, "little")
    at = raw.find(magic, position)
    while at != -1:
        later = _entry_at(data, at - _CRC_BYTES, number)
        if later is not None and later[0] > sequence and later[1] >= sequence:
            raise CorruptJournal(path, position, f"entry {sequence} of the journal was synced and is damaged")
        at = raw.find(magic, at + 1)


def _entry_at(data: memoryview, position: int, number: int) -> tuple[int, int, memoryview] | None:
    """(sequence, synced, body) of the entry at position, if it is complete and belongs to this file number."""
    if position + ENTRY_HEADER.size > len(data):
        return None
    crc, magic, entry_number, sequence, synced, size = ENTRY_HEADER.unpack_from(data, position)
    end = position + ENTRY_HEADER.size + size
    if magic != ENTRY_MAGIC or entry_number != number or end > len(data):
        return None
    if crc32c(data[position + _CRC_BYTES : end]) != crc:
        return None
    return sequence, synced, data[position + ENTRY_HEADER.size : end]
