"""The expected content of a shard in plain Python, with which every crash test compares.

Work is staged in units (an append or an atomic group), in order. A unit is confirmed when its ticket resolves.
After a crash a log must hold a prefix of the staged appends that includes all promised ones, and the changes of
a group are all there or none.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.log.log import LogSpec
from headrace.record import codec
from headrace.record.types import Record

Key = tuple[str, bytes]
Fold = Callable[[bytes | None, Sequence[bytes]], bytes | None]
MERGED = "sets"  # the table whose values are merged


class Broken(AssertionError):
    """An invariant does not hold. The text starts with its number in docs/testing.md."""


@dataclass(slots=True, eq=False)
class Piece:
    """Whole batches that one unit staged for one log. Their offset depends on the pieces before them."""

    raw: bytes
    count: int
    unit: int
    epoch: int
    atomic: bool = True
    base: int = -1
    data: bytes = b""

    def at(self, base: int) -> bytes:
        if base != self.base:
            buffer = bytearray(self.raw)
            codec.patch_run(buffer, 0, len(buffer), base, self.epoch)
            self.base, self.data = base, bytes(buffer)
        return self.data


class FoundLog(NamedTuple):
    """The content of a log, as read from start to end."""

    start: int
    end: int
    data: bytes
    epoch: int
    damage: str = ""


class Found(NamedTuple):
    logs: dict[int, FoundLog]
    tables: dict[Key, bytes]
    clean: bool


@dataclass(slots=True)
class Promise:
    """The part of a log that must survive: confirmed, readable at some time, or reported as durable."""

    pieces: int = 0  # confirmed
    visible_end: int = 0
    durable_end: int = 0


@dataclass(slots=True)
class LogModel:
    spec: LogSpec
    first: int = 0  # offset of the first piece
    pieces: list[Piece] = field(default_factory=list)
    promise: Promise = field(default_factory=Promise)
    start: int = 0  # confirmed start: no record before it may return
    start_max: int = 0  # requested start: no record from here on may be removed
    expendable: set[int] = field(default_factory=set)  # offsets that compaction may remove
    tombs: dict[bytes | None, int] = field(default_factory=dict)  # tombstones among them, by key
    former: list[Piece] | None = None  # the pieces before a truncation that is not confirmed yet
    former_least: int = 0
    epoch: int = 0

    @property
    def is_async(self) -> bool:
        return self.spec.settings.write_mode == "async"

    @property
    def end(self) -> int:
        return self.first + sum(piece.count for piece in self.pieces)

    def ends(self, pieces: list[Piece] | None = None) -> list[int]:
        """The end offset after 0, 1, 2, ... pieces."""
        ends = [self.first]
        for piece in self.pieces if pieces is None else pieces:
            ends.append(ends[-1] + piece.count)
        return ends

    def promised(self, *, power_cut: bool) -> int:
        """The number of pieces that must be stored."""
        ends = self.ends()
        if self.is_async and power_cut:
            return sum(end <= self.promise.durable_end for end in ends[1:])
        seen = sum(end <= self.promise.visible_end for end in ends[1:])
        return max(self.promise.pieces, seen)

    def check(self, found: FoundLog, *, power_cut: bool) -> int | None:
        """Return the number of pieces found, or None if an unconfirmed truncation did not happen."""
        name = f"log {self.spec.id}"
        if found.damage:
            raise Broken(f"L6 {name} is reported as damaged after a crash: {found.damage}")
        if not self.start <= found.start <= self.start_max:
            raise Broken(f"L10 {name} starts at {found.start}, not in [{self.start}, {self.start_max}]")
        ends = self.ends()
        promised = self.promised(power_cut=power_cut)
        for count in range(promised, len(ends)):
            if ends[count] == found.end or (found.start == found.end == self.start_max >= ends[count]):
                self._check_content(found, self.pieces[:count])
                return count
        if self.former is not None and self._is_former(found, power_cut):
            return None
        if found.end < ends[promised]:
            raise Broken(f"L1 {name} ends at {found.end}, but {ends[promised]} was promised (ends {ends})")
        raise Broken(f"L2 {name} ends at {found.end}, inside a piece or after the last one (ends {ends})")

    def _is_former(self, found: FoundLog, power_cut: bool) -> bool:
        """Whether the log is as before the truncation. An async log may also have lost unsynced pieces."""
        assert self.former is not None
        ends = self.ends(self.former)
        for count in range(self.former_least if power_cut and self.is_async else len(self.former), len(ends)):
            if ends[count] == found.end:
                self._check_content(found, self.former[:count])
                return True
        return False

    def _check_content(self, found: FoundLog, pieces: list[Piece]) -> None:
        offset = self.first
        wanted = []
        for piece in pieces:
            if offset + piece.count > found.start:
                wanted.append(piece.at(offset))
            offset += piece.count
        data = b"".join(wanted)
        if data == found.data:
            return
        name = f"log {self.spec.id}"
        if not self.expendable:
            detail = _difference(data, found.data)
            raise Broken(f"L4 {name} [{found.start}, {found.end}) differs from what was written: {detail}")
        self._check_compacted(name, found, data)

    def compaction_starts(self, end: int) -> None:
        """From now on, compaction may remove all records before end but the last of each key, and tombstones."""
        records = [record for record in self.records() if record.offset < end]
        last = {record.key: record.offset for record in records}
        for record in records:
            if last[record.key] != record.offset:
                self.expendable.add(record.offset)
            elif record.value is None:
                self.expendable.add(record.offset)
                self.tombs[record.key] = record.offset

    def forget_compaction_from(self, offset: int) -> None:
        """Forget what compaction may remove from offset on, because other records get these offsets."""
        self.expendable = {gone for gone in self.expendable if gone < offset}
        self.tombs = {key: tomb for key, tomb in self.tombs.items() if tomb < offset}

    def _check_compacted(self, name: str, found: FoundLog, data: bytes) -> None:
        written = [r for r in codec.records(data) if r.offset >= found.start]
        kept = {r.offset: r for r in codec.records(found.data, verify_crc=True) if r.offset >= found.start}
        for record in written:
            there = kept.pop(record.offset, None)
            if there is None:
                if record.offset not in self.expendable:
                    raise Broken(f"L10 {name} lacks {record.offset}, the last record of its key")
            elif there != record:
                raise Broken(f"L4 {name} holds another record at {record.offset}")
            elif self._is_resurrected(record, found):
                raise Broken(f"L10 {name} still has {record.offset}, but its tombstone was removed")
        if kept:
            raise Broken(f"L2 {name} holds records that were never written at {sorted(kept)[:5]}")

    def _is_resurrected(self, record: Record, found: FoundLog) -> bool:
        tomb = self.tombs.get(record.key, -1)
        if not record.offset < tomb < found.end or record.value is None:
            return False
        return tomb not in {r.offset for r in codec.records(found.data)}

    def settle(self, found: FoundLog, count: int | None) -> None:
        """After a crash: the content that was found is promised from now on."""
        if count is None:
            assert self.former is not None
            self.pieces = self.former[: self.ends(self.former).index(found.end)]
        else:
            del self.pieces[count:]
        self.former = None
        self.forget_compaction_from(found.end)
        if self.end < found.end:
            # An async log lost records that retention was to remove anyway. Nothing is left, and the log continues at
            # its start offset.
            assert found.start == found.end
            self.first, self.pieces = found.end, []
        self.promise = Promise(len(self.pieces), found.end, found.end)
        self.start = found.start
        self.start_max = max(self.start_max, found.start)
        assert self.end == found.end
        self.epoch = found.epoch

    def records(self) -> list[Record]:
        offset = self.first
        found: list[Record] = []
        for piece in self.pieces:
            found += codec.records(piece.at(offset))
            offset += piece.count
        return found


class Change(NamedTuple):
    unit: int
    value: bytes | None
    lazy: bool
    delta: bytes | None = None  # of a merge: the value depends on the previous one


@dataclass(slots=True)
class KeyModel:
    """The values of a key since the last settled one, oldest first. The first is settled."""

    changes: list[Change]
    confirmed: int = 0
    durable: int = 0

    def check(self, key: Key, value: bytes | None, *, power_cut: bool) -> int:
        least = self.durable if power_cut else self.confirmed
        for at in range(len(self.changes) - 1, least - 1, -1):
            if self.changes[at].value == value:
                return at
        if any(change.value == value for change in self.changes[:least]):
            raise Broken(f"L1 {key} is {value!r} again, but {self.changes[least].value!r} was promised")
        raise Broken(f"L2 {key} is {value!r}, which was never written; allowed: {self.changes[least:]}")


class Model:
    def __init__(self, fold: Fold) -> None:
        self._fold = fold
        self.logs: dict[int, LogModel] = {}
        self.keys: dict[Key, KeyModel] = {}
        self.units = 0
        self.ids_given: set[int] = set()
        self.epoch = 0

    def specs(self) -> list[LogSpec]:
        return [log.spec for log in self.logs.values()]

    # Called by the driver of the shard.

    def new_unit(self) -> int:
        self.units += 1
        return self.units

    def stage_append(self, log_id: int, raw: bytes, count: int, unit: int, *, atomic: bool = True) -> None:
        log = self.logs[log_id]
        log.pieces.append(Piece(raw, count, unit, log.epoch, atomic))

    def stage_change(self, key: Key, value: bytes | None, unit: int, *, lazy: bool) -> None:
        """Stage a value, None for a deletion, or the delta for a table that merges."""
        changes = self._key(key).changes
        if key[0] == MERGED and value is not None:
            changes.append(Change(unit, self._fold(changes[-1].value, [value]), lazy, value))
        else:
            changes.append(Change(unit, value, lazy))

    def _key(self, key: Key) -> KeyModel:
        known = self.keys.get(key)
        if known is None:
            known = self.keys[key] = KeyModel([Change(0, None, False)])
        return known

    def confirm(self, unit: int, *, lazy: bool) -> None:
        """The ticket of the unit was resolved. Rounds complete in order, so all earlier units are confirmed too."""
        for log in self.logs.values():
            while log.promise.pieces < len(log.pieces) and log.pieces[log.promise.pieces].unit <= unit:
                log.promise.pieces += 1
        for key in self.keys.values():
            while key.confirmed + 1 < len(key.changes) and key.changes[key.confirmed + 1].unit <= unit:
                key.confirmed += 1
            if not lazy:
                while key.durable + 1 < len(key.changes) and key.changes[key.durable + 1].unit <= unit:
                    key.durable += 1

    def refuse(self, unit: int) -> None:
        """The unit was refused: nothing of it may ever be found."""
        for log in self.logs.values():
            log.pieces = [piece for piece in log.pieces if piece.unit != unit]
        for key in self.keys.values():
            kept: list[Change] = []
            for change in key.changes:
                if change.unit == unit:
                    continue
                if change.delta is not None and kept:
                    change = change._replace(value=self._fold(kept[-1].value, [change.delta]))
                kept.append(change)
            key.changes = kept

    # Called with the content that was found.

    def check(self, found: Found, *, power_cut: bool) -> dict[int, int | None]:
        """Raise Broken, or return the number of pieces found in each log."""
        included: dict[int, int | None] = {}
        for log_id, log in self.logs.items():
            there = found.logs[log_id]
            included[log_id] = log.check(there, power_cut=power_cut)
            if there.epoch < self.epoch or (there.epoch == self.epoch and not found.clean):
                raise Broken(f"L5 the epoch of log {log_id} is {there.epoch} and was {self.epoch}")
        versions = {
            key: model.check(key, found.tables.get(key), power_cut=power_cut) for key, model in self.keys.items()
        }
        unknown = found.tables.keys() - self.keys.keys()
        if unknown:
            raise Broken(f"L2 values that were never written: {sorted(unknown)[:5]}")
        self._check_groups(included, versions)
        return included

    def _check_groups(self, included: dict[int, int | None], versions: dict[Key, int]) -> None:
        """L2: all changes of a group are stored, or none."""
        there: dict[int, str] = {}
        missing: dict[int, str] = {}
        for log_id, count in included.items():
            if count is None:
                continue
            log = self.logs[log_id]
            for at, piece in enumerate(log.pieces[log.promise.pieces :], log.promise.pieces):
                if piece.atomic:
                    (there if at < count else missing)[piece.unit] = f"log {log_id}"
        for key, version in versions.items():
            changes = self.keys[key].changes
            if changes[version].value is None:
                continue  # deletions cannot be told apart
            for at, change in enumerate(changes):
                (there if at <= version else missing)[change.unit] = f"key {key}"
        for unit in there.keys() & missing.keys():
            raise Broken(f"L2 unit {unit} is in {there[unit]} but not in {missing[unit]}")

    def settle(self, found: Found, included: dict[int, int | None]) -> None:
        """Continue from the content that was found."""
        for log_id, log in self.logs.items():
            log.settle(found.logs[log_id], included[log_id])
            self.epoch = max(self.epoch, found.logs[log_id].epoch)
        for key, model in self.keys.items():
            model.changes = [Change(0, found.tables.get(key), False)]
            model.confirmed = model.durable = 0


def _difference(wanted: bytes, got: bytes) -> str:
    pairs = enumerate(zip(wanted, got, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(wanted), len(got)))
    return f"{len(wanted)} bytes wanted, {len(got)} found, first difference at {at}"


def differences(left: Found, right: Found) -> Iterable[str]:
    """Yield the differences between two recoveries of one disk, ignoring epochs."""
    for log_id, log in left.logs.items():
        other = right.logs[log_id]
        if (log.start, log.end, log.data) != (other.start, other.end, other.data):
            yield f"log {log_id}: [{log.start}, {log.end}) and [{other.start}, {other.end})"
    if left.tables != right.tables:
        yield f"tables: {left.tables} and {right.tables}"
