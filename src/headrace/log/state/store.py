"""State that changes often: cursors, settle sets, producer states, ledgers, starts and ends of logs.

A change is written in a journal entry together with everything that must be committed with it (AtomicGroup). A
checkpoint appends the changed values to the state files as record batches and ends them with a marker that names the
last journal entry they include. Recovery takes the values up to the last marker, then the journal after it.

`put` and `delete` replace a value. `merge` adds a delta, for values too large to write whole each time; the table's
fold function (pure) folds deltas into the value when it is read or checkpointed. Values and deltas are bytes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Protocol

from headrace.log.disk.disk import Disk
from headrace.log.state.changes import DELETE, MERGE, PUT, StateChange
from headrace.log.state.files import Marker, StateFiles

Fold = Callable[[bytes | None, Sequence[bytes]], bytes | None]
Key = tuple[str, bytes]

_REWRITE_BYTES_MIN = 1 << 20


class StateStore(Protocol):
    """The state as the broker sees it: the values that committed rounds have left. AtomicGroup changes them."""

    def get(self, table: str, key: bytes) -> bytes | None: ...
    def items(self, table: str) -> Iterator[tuple[bytes, bytes]]: ...


class DiskStateStore:
    """The state in memory, and its files. Owned by the shard.

    The owner thread applies changes after each round; the keeper calls `write`.
    """

    def __init__(self, disk: Disk, folder: str, folds: Mapping[str, Fold] | None = None) -> None:
        self._files = StateFiles(disk, folder)
        self._folds = dict(folds or {})
        self._tables: dict[str, dict[bytes, bytes]] = {}
        self._deltas: dict[Key, list[bytes]] = {}
        self._dirty: dict[Key, None] = {}
        self._live_bytes = 0

    # Reading.

    def get(self, table: str, key: bytes) -> bytes | None:
        if (table, key) in self._deltas:
            self._fold((table, key))
        return self._tables.get(table, {}).get(key)

    def items(self, table: str) -> Iterator[tuple[bytes, bytes]]:
        for key in [key for name, key in self._deltas if name == table]:
            self._fold((table, key))
        yield from list(self._tables.get(table, {}).items())

    # Changes, in the order of the journal.

    def apply(self, changes: Iterable[StateChange]) -> None:
        for change in changes:
            if change.kind == PUT:
                self.apply_put(change.table, change.key, change.value)
            elif change.kind == DELETE:
                self.apply_delete(change.table, change.key)
            else:
                assert change.kind == MERGE
                self.apply_merge(change.table, change.key, change.value)

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
        """The values that changed since the last call, folded, as records. On the owner thread, between rounds."""
        for where in [w for w in self._dirty if w in self._deltas]:
            self._fold(where)
        taken = [(_record_key(table, key), self._tables.get(table, {}).get(key)) for table, key in self._dirty]
        self._dirty = {}
        return taken

    @property
    def is_dirty(self) -> bool:
        return bool(self._dirty)

    @property
    def file_bytes(self) -> int:
        """Size of each of the two files."""
        return self._files.size

    @property
    def needs_rewrite(self) -> bool:
        return self._files.was_interrupted or self._files.size > max(4 * self._live_bytes, _REWRITE_BYTES_MIN)

    def take_all(self) -> list[tuple[bytes, bytes | None]]:
        self.take_dirty()
        return [(_record_key(t, key), value) for t, values in self._tables.items() for key, value in values.items()]

    def write(self, records: list[tuple[bytes, bytes | None]], marker: Marker, *, rewrite: bool = False) -> None:
        """Make records and marker durable together, or leave the state as it was."""
        if rewrite:
            self.prepare(records, marker)
            self.put_in_place()
        else:
            self._files.append(records, marker)

    def prepare(self, records: list[tuple[bytes, bytes | None]], marker: Marker) -> None:
        """The first half of a rewrite, and the only one that needs disk space. Takes effect with `put_in_place`."""
        self._files.prepare(records, marker)

    def put_in_place(self) -> None:
        self._files.put_in_place()

    def abandon(self) -> None:
        """Undo `prepare`."""
        self._files.abandon()

    # Opening.

    def load(self) -> None:
        for raw, value in self._files.load().items():
            table, _, key = raw.partition(b"\0")
            self._set(table.decode(), key, value)

    @property
    def marker(self) -> Marker:
        return self._files.marker

    @property
    def is_new(self) -> bool:
        return self._files.is_new

    @property
    def restored(self) -> list[str]:
        """A message for each damaged file that was restored from its copy."""
        return self._files.restored

    def close(self) -> None:
        self._files.close()


def _record_key(table: str, key: bytes) -> bytes:
    return table.encode() + b"\0" + key


__all__ = ["DiskStateStore", "Fold", "Marker", "StateStore"]
