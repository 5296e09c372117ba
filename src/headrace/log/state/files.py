"""The state on disk: record batches that end with a marker, in two files with the same bytes.

A checkpoint takes effect once it is in both files; until then the journal keeps everything since the one before. So
either file is right up to its last marker, and if both can be read, the longer one is used. A damaged file is
quarantined once its copy has replaced it.
"""

import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from headrace.errors import CorruptBatch, CorruptLog, StorageFailed
from headrace.log.disk import paths
from headrace.log.disk.disk import Disk, FileId, read_whole
from headrace.log.disk.file_cache import NO_FILES
from headrace.log.disk.quarantine import quarantine
from headrace.record import codec
from headrace.record.layout import LAST_OFFSET_DELTA_AT, MAGIC, MAGIC_AT, RECORDS_AT

Records = list[tuple[bytes, bytes | None]]

_MARKER = struct.Struct("<QQ?Q")  # sequence, epoch, clean, position where the write that ends with this marker began
_MARKER_KEY = b"\0"
_BATCH_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Marker:
    sequence: int = 0
    epoch: int = 0
    clean: bool = True


class _Reading(NamedTuple):
    values: dict[bytes, bytes | None]
    marker: Marker
    next_offset: int
    end: int  # of the last marker: bytes after it were never committed


class _Written(NamedTuple):
    files: list[FileId]
    size: int
    marker: Marker


class StateFiles:
    """Used by one thread at a time: recovery's, then the keeper's."""

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._folder = folder
        self._data_dir = folder.rpartition("/")[0]
        self._current: _Written | None = None
        self._prepared: _Written | None = None
        self._generation = 0
        self._next_offset = 0
        self._damaged: list[str] = []
        self.marker = Marker()
        self.is_new = True
        self.was_interrupted = False  # a file of the next generation may exist: the next write must skip it
        self.restored: list[str] = []  # a message for each file that was damaged

    @property
    def size(self) -> int:
        return 0 if self._current is None else self._current.size

    # Writing.

    def append(self, records: Records, marker: Marker) -> None:
        """Make records and marker durable together, or leave the state as it was."""
        if self._current is None:
            self.prepare(records, marker)
            self.put_in_place()
            return
        assert not self.was_interrupted, "a start would read the files of the next generation"
        files, size, _ = self._current
        batches = self._numbered(_batches(records, marker, began=size))
        for file in files:
            written = self._disk.pwrite(file, batches, size)
            self._disk.sync(file)
        self._current = _Written(files, size + written, marker)
        self.marker = marker

    def prepare(self, records: Records, marker: Marker) -> None:
        """The first half of a rewrite, and the only one that needs disk space. Takes effect with `put_in_place`."""
        batches = self._numbered(_batches(records, marker, began=0))
        files: list[FileId] = []
        size = 0
        try:
            for path in self._pair(self._generation + 1):
                if self._disk.exists(path + paths.UNFINISHED):
                    self._disk.unlink(path + paths.UNFINISHED)
                files.append(self._disk.open(path + paths.UNFINISHED, create=True, exclusive=True))
                size = self._disk.pwrite(files[-1], batches, 0)
                self._disk.sync(files[-1])
        except OSError:
            self._close(files)
            self.abandon()  # a full disk needs the space
            raise
        self._prepared = _Written(files, size, marker)
        for path in self._damaged:  # nothing reads it any more
            self.restored.append(f"the damaged file is now {quarantine(self._disk, self._data_dir, path)}")
        self._damaged = []

    def put_in_place(self) -> None:
        assert self._prepared is not None
        prepared, self._prepared = self._prepared, None
        try:
            for path in self._pair(self._generation + 1):
                self._disk.rename(path + paths.UNFINISHED, path)
            self._sync_names()
        except OSError:
            self._close(prepared.files)
            with suppress(OSError):
                self.abandon()
            self._generation += 1
            self.was_interrupted = True
            raise
        self.was_interrupted = False
        if self._current is not None:
            self._close(self._current.files)
        self._current = prepared
        self._generation += 1
        self.marker = prepared.marker
        for name in self._disk.listdir(self._folder):
            if paths.parse_state(name) not in (None, self._generation):
                self._disk.unlink(f"{self._folder}/{name}")

    def _sync_names(self) -> None:
        try:
            self._disk.sync_dir(self._folder)
        except OSError as error:
            if error.errno not in NO_FILES:  # without a descriptor no sync was tried; any other error is final
                raise StorageFailed(f"{self._folder} cannot be synced: {error}") from error
            raise

    def abandon(self) -> None:
        """Undo `prepare`, even if it failed half-way."""
        if self._prepared is not None:
            self._close(self._prepared.files)
            self._prepared = None
        for path in self._pair(self._generation + 1):
            if self._disk.exists(path + paths.UNFINISHED):
                self._disk.unlink(path + paths.UNFINISHED)

    def close(self) -> None:
        if self._current is not None:
            self._close(self._current.files)
            self._current = None
        if self._prepared is not None:
            self.abandon()

    def _close(self, files: list[FileId]) -> None:
        for file in files:
            self._disk.close(file)

    def _numbered(self, batches: list[bytearray]) -> list[bytearray]:
        for batch in batches:
            codec.patch(batch, 0, self._next_offset, 0)
            self._next_offset += 1 + int.from_bytes(batch[LAST_OFFSET_DELTA_AT : LAST_OFFSET_DELTA_AT + 4], "big")
        return batches

    def _pair(self, generation: int) -> list[str]:
        name = f"{self._folder}/{paths.state_name(generation)}"
        return [name + paths.COPY, name]

    # Reading.

    def load(self) -> dict[bytes, bytes | None]:
        """The values of the newest generation. The next write must go to new files: after a kill these may be in the
        page cache only, and their names may not be durable."""
        self._disk.mkdir(self._folder)
        generations = []
        for name in self._disk.listdir(self._folder):
            generation = paths.parse_state(name)
            if generation is not None:
                generations.append(generation)
            elif name.endswith(paths.UNFINISHED):
                self._disk.unlink(f"{self._folder}/{name}")
        if not generations:
            return {}
        self.is_new = False
        self._generation = max(generations)
        reading = self._read_pair()
        self.marker, self._next_offset = reading.marker, reading.next_offset
        return reading.values

    def _read_pair(self) -> _Reading:
        there = [path for path in reversed(self._pair(self._generation)) if self._disk.exists(path)]
        contents = {path: read_whole(self._disk, path) for path in there}
        if len(set(contents.values())) == 1:
            return _read(there[0], contents[there[0]])
        readings: list[_Reading] = []
        damages: list[CorruptLog] = []
        for path, data in contents.items():
            try:
                readings.append(_read(path, data))
            except CorruptLog as error:
                damages.append(error)
        if not readings:
            raise damages[0]
        for damage in damages:
            self._damaged.append(damage.path)
            self.restored.append(f"{damage}; restored from its copy")
        return max(readings, key=lambda reading: reading.end)


def _read(path: str, data: bytes) -> _Reading:
    valid, _next, _records, _timestamp, reason = codec.valid_until(data)
    values: dict[bytes, bytes | None] = {}
    pending: dict[bytes, bytes | None] = {}
    marker: Marker | None = None
    next_offset = end = 0
    for info in codec.scan(memoryview(data)[:valid], verify_crc=False):
        for record in codec.records(data, info.position, info.position + info.size):
            if record.key == _MARKER_KEY:
                values.update(pending)
                pending = {}
                marker = Marker(*_MARKER.unpack(record.value or b"")[:3])
                next_offset, end = info.last_offset + 1, info.position + info.size
            else:
                pending[record.key or b""] = record.value
    if marker is None:
        # A state file gets its name only once it is complete, so one without a marker was damaged.
        raise CorruptLog(path, valid, reason or "the state file contains no checkpoint")
    if reason is not None and _has_later_checkpoint(data, valid):
        raise CorruptLog(path, valid, reason)
    return _Reading(values, marker, next_offset, end)


def _has_later_checkpoint(data: bytes, valid: int) -> bool:
    """A bad batch before a complete, later checkpoint was synced once: it is damage, not a torn write."""
    for at in range(valid + 1, len(data) - RECORDS_AT):
        if data[at + MAGIC_AT] != MAGIC:
            continue
        with suppress(CorruptBatch):
            for info in codec.scan(data, at, len(data)):
                for record in codec.records(data, info.position, info.position + info.size):
                    if record.key == _MARKER_KEY and _MARKER.unpack(record.value or b"")[3] > valid:
                        return True
    return False


def _batches(records: Sequence[tuple[bytes, bytes | None]], marker: Marker, began: int) -> list[bytearray]:
    """Batches of about a megabyte; the marker is the last record of the last one."""
    last = (_MARKER_KEY, _MARKER.pack(marker.sequence, marker.epoch, marker.clean, began))
    batches = []
    writer = codec.BatchWriter(0)
    for key, value in [*records, last]:
        writer.append(key, value)
        if writer.size >= _BATCH_BYTES:
            batches.append(writer.finish())
    if writer.count:
        batches.append(writer.finish())
    return batches
