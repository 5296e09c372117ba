"""State that changes often: cursors, settle sets, producer states, ledgers, where logs begin and end.

A change rides in a journal entry with whatever must happen together with it. A checkpoint appends the
changed values to the state log as record batches and ends them with a marker that names the journal entry they
include. So recovery is: values up to the last marker, then the journal after it.

`put` and `delete` replace a value. `merge` adds a delta, for values too large to write whole each time; the
table's fold function (pure) makes one value of them at the next checkpoint. Values and deltas are bytes.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headrace.errors import CorruptBatch, CorruptLog
from headrace.log import paths
from headrace.log.disk import Disk, FileId, read_whole
from headrace.record import codec
from headrace.record.layout import LAST_OFFSET_DELTA_AT, MAGIC, MAGIC_AT, RECORDS_AT

Fold = Callable[[bytes | None, Sequence[bytes]], bytes | None]
Key = tuple[str, bytes]

_MARKER = struct.Struct("<QQ?Q")  # sequence, epoch, clean, where the write that ends here began
_MARKER_KEY = b"\0"
_BATCH_BYTES = 1 << 20
_REWRITE_BYTES_MIN = 1 << 20


@dataclass(frozen=True, slots=True)
class Marker:
    sequence: int = 0
    epoch: int = 0
    clean: bool = True


class StateStore:
    """Owned by the shard. `apply_*` on the owner thread after a round; `write` on the keeper's."""

    def __init__(self, disk: Disk, folder: str, folds: Mapping[str, Fold] | None = None) -> None:
        self._disk = disk
        self._folder = folder
        self._folds = dict(folds or {})
        self._tables: dict[str, dict[bytes, bytes]] = {}
        self._deltas: dict[Key, list[bytes]] = {}
        self._dirty: dict[Key, None] = {}
        self._file: FileId | None = None
        self._prepared: tuple[FileId, int, Marker] | None = None
        self._generation = 0
        self._position = 0
        self._next_offset = 0
        self._live_bytes = 0
        self.marker = Marker()
        self.is_new = True

    # Reading: what completed rounds have made of it.

    def get(self, table: str, key: bytes) -> bytes | None:
        if (table, key) in self._deltas:
            self._fold((table, key))
        return self._tables.get(table, {}).get(key)

    def items(self, table: str) -> Iterator[tuple[bytes, bytes]]:
        for key in [key for name, key in self._deltas if name == table]:
            self._fold((table, key))
        yield from list(self._tables.get(table, {}).items())

    # Changes, in the order of the journal.

    def apply_put(self, table: str, key: bytes, value: bytes) -> None:
        self._deltas.pop((table, key), None)
        self._set(table, key, value)
        self._dirty[table, key] = None

    def apply_delete(self, table: str, key: bytes) -> None:
        self._deltas.pop((table, key), None)
        self._set(table, key, None)
        self._dirty[table, key] = None

    def apply_merge(self, table: str, key: bytes, delta: bytes) -> None:
        self._deltas.setdefault((table, key), []).append(delta)
        self._dirty[table, key] = None

    def _fold(self, where: Key) -> None:
        deltas = self._deltas.pop(where)
        table, key = where
        self._set(table, key, self._folds[table](self._tables.get(table, {}).get(key), deltas))

    def _set(self, table: str, key: bytes, value: bytes | None) -> None:
        values = self._tables.setdefault(table, {})
        old = values.pop(key, None)
        if old is not None:
            self._live_bytes -= len(key) + len(old)
        if value is not None:
            values[key] = value
            self._live_bytes += len(key) + len(value)

    # Checkpoints.

    def take_dirty(self) -> list[tuple[bytes, bytes | None]]:
        """The changed values as records, folded. On the owner thread, between rounds."""
        for where in [w for w in self._dirty if w in self._deltas]:
            self._fold(where)
        taken = [
            (_record_key(table, key), self._tables.get(table, {}).get(key)) for table, key in self._dirty
        ]
        self._dirty = {}
        return taken

    @property
    def is_dirty(self) -> bool:
        return bool(self._dirty)

    @property
    def needs_rewrite(self) -> bool:
        return self._position > max(4 * self._live_bytes, _REWRITE_BYTES_MIN)

    def take_all(self) -> list[tuple[bytes, bytes | None]]:
        self.take_dirty()
        return [
            (_record_key(t, key), value)
            for t, values in self._tables.items()
            for key, value in values.items()
        ]

    def write(
        self, records: list[tuple[bytes, bytes | None]], marker: Marker, *, rewrite: bool = False
    ) -> None:
        """Make records and marker durable together: whole, or as if never written."""
        if rewrite or self._file is None:
            self.prepare(records, marker)
            self.put_in_place()
            return
        batches = self._numbered(_batches(records, marker, began=self._position))
        self._position += self._disk.pwrite(self._file, batches, self._position)
        self._disk.sync(self._file)
        self.marker = marker

    def prepare(self, records: list[tuple[bytes, bytes | None]], marker: Marker) -> None:
        """The first half of a rewrite, and all of it that needs room. It counts once it is put in place."""
        temporary = self._path(self._generation + 1) + paths.UNFINISHED
        if self._disk.exists(temporary):
            self._disk.unlink(temporary)
        batches = self._numbered(_batches(records, marker, began=0))
        file = self._disk.open(temporary, create=True, exclusive=True)
        try:
            size = self._disk.pwrite(file, batches, 0)
            self._disk.sync(file)
        except OSError:
            self._disk.close(file)
            raise
        self._prepared = file, size, marker

    def put_in_place(self) -> None:
        assert self._prepared is not None
        (file, size, marker), self._prepared = self._prepared, None
        path = self._path(self._generation + 1)
        try:
            self._disk.rename(path + paths.UNFINISHED, path)
            self._disk.sync_dir(self._folder)
        except OSError:
            self._disk.close(file)
            raise
        if self._file is not None:
            self._disk.close(self._file)
        self._file, self._position = file, size
        self._generation += 1
        self.marker = marker
        for name in self._disk.listdir(self._folder):
            if paths.parse_state(name) not in (None, self._generation):
                self._disk.unlink(f"{self._folder}/{name}")

    def abandon(self) -> None:
        """Take back what was prepared."""
        if self._prepared is not None:
            self._disk.close(self._prepared[0])
            self._disk.unlink(self._path(self._generation + 1) + paths.UNFINISHED)
            self._prepared = None

    def _numbered(self, batches: list[bytearray]) -> list[bytearray]:
        for batch in batches:
            codec.patch(batch, 0, self._next_offset, 0)
            self._next_offset += 1 + int.from_bytes(
                batch[LAST_OFFSET_DELTA_AT : LAST_OFFSET_DELTA_AT + 4], "big"
            )
        return batches

    def _path(self, generation: int) -> str:
        return f"{self._folder}/{paths.state_name(generation)}"

    # Opening.

    def load(self) -> None:
        """Read the newest state log; what follows its last marker never happened and is overwritten."""
        self._disk.mkdir(self._folder)
        found = {}
        for name in self._disk.listdir(self._folder):
            generation = paths.parse_state(name)
            if generation is not None:
                found[generation] = name
            elif name.endswith(paths.UNFINISHED):
                self._disk.unlink(f"{self._folder}/{name}")
        if not found:
            return
        self.is_new = False
        self._generation = max(found)
        path = self._path(self._generation)
        end = self._load_file(path)
        # Older ones go with the next rewrite: after a kill the newest may have a name that is not durable yet.
        self._file = self._disk.open(path)
        self._position = end

    def _load_file(self, path: str) -> int:
        data = read_whole(self._disk, path)
        valid, _next, _records, _timestamp, reason = codec.valid_until(data)
        pending: list[tuple[bytes, bytes | None]] = []
        end = 0
        markers = 0
        for info in codec.scan(memoryview(data)[:valid], verify_crc=False):
            for record in codec.records(data, info.position, info.position + info.size):
                if record.key == _MARKER_KEY:
                    self._take(pending)
                    pending = []
                    self.marker = Marker(*_MARKER.unpack(record.value or b"")[:3])
                    self._next_offset = info.last_offset + 1
                    end = info.position + info.size
                    markers += 1
                else:
                    pending.append((record.key or b"", record.value))
        if markers == 0:
            # A state log gets its name only once it is whole: one without a marker has been damaged.
            raise CorruptLog(path, valid, reason or "the state log has no checkpoint in it")
        self._check_tail(path, data, valid, reason)
        return end

    @staticmethod
    def _check_tail(path: str, data: bytes, valid: int, reason: str | None) -> None:
        """A bad batch with a whole, later checkpoint behind it was synced once: damage, not a torn write."""
        if reason is None:
            return
        for at in range(valid + 1, len(data) - RECORDS_AT):
            if data[at + MAGIC_AT] != MAGIC:
                continue
            try:
                later = codec.scan(data, at, len(data))
            except CorruptBatch:
                continue
            for info in later:
                for record in codec.records(data, info.position, info.position + info.size):
                    if record.key == _MARKER_KEY and _MARKER.unpack(record.value or b"")[3] > valid:
                        raise CorruptLog(path, valid, reason)

    def _take(self, records: list[tuple[bytes, bytes | None]]) -> None:
        for raw, value in records:
            table, _, key = raw.partition(b"\0")
            self._set(table.decode(), key, value)

    def close(self) -> None:
        if self._file is not None:
            self._disk.close(self._file)
            self._file = None
        self.abandon()


def _record_key(table: str, key: bytes) -> bytes:
    return table.encode() + b"\0" + key


def _batches(records: list[tuple[bytes, bytes | None]], marker: Marker, began: int) -> list[bytearray]:
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
