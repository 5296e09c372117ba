"""An atomic group: appends and state changes that are committed together or not at all."""

from collections.abc import Sequence

from headrace.errors import BatchTooLarge, LogClosed
from headrace.log.commit.journal_entry import PART_BYTES
from headrace.log.commit.round import LogEnd, RoundPart, Staging, Ticket, Unit, resolve_all
from headrace.log.state.changes import DELETE, MERGE, PUT, StateChange
from headrace.record.types import BatchInfo


class AtomicGroup:
    """Collects appends and state changes, then commits them as one journal entry.

    The same buffer may be appended to several logs. Table names are short, keys have up to 64 KB. The table's fold
    function folds a merge into the value.
    """

    __slots__ = ("_bytes_max", "_counted", "_parts", "_staging", "_unit")

    def __init__(self, staging: Staging, bytes_max: int) -> None:
        self._staging = staging
        self._bytes_max = bytes_max
        self._unit = Unit(Ticket(staging.make_future))
        self._parts: list[RoundPart] = []  # includes those that the unit dropped because their log was deleted
        self._counted: set[int] = set()  # ids of the buffers in the unit's size: the journal holds each once

    def append(self, log: LogEnd, batch: bytearray | memoryview, infos: Sequence[BatchInfo] | None = None) -> Ticket:
        """The ticket has this part's offsets once the group's own ticket is resolved."""
        log.check_append(batch, infos)
        ticket = Ticket(self._staging.make_future)
        part = RoundPart(log, batch, ticket, atomic=True)
        self._unit.parts.append(part)
        self._parts.append(part)
        self._unit.size += PART_BYTES
        if id(batch) not in self._counted:
            self._counted.add(id(batch))
            self._unit.size += len(batch)
        return ticket

    def put(self, table: str, key: bytes, value: bytes) -> None:
        self._change(StateChange(PUT, table, key, value))

    def delete(self, table: str, key: bytes) -> None:
        self._change(StateChange(DELETE, table, key, b""))

    def merge(self, table: str, key: bytes, delta: bytes) -> None:
        self._change(StateChange(MERGE, table, key, delta))

    def _change(self, change: StateChange) -> None:
        assert 0 < len(change.table) < 256 and len(change.key) < 65536, "a table's or key's length fits its field"
        self._unit.changes.append(change)
        self._unit.size += change.size  # its size in the journal: many small changes must not overflow an entry

    def commit(self, *, lazy: bool = False) -> Ticket:
        """Stage the group. `lazy` applies to groups without appends, for changes whose loss in a power cut only repeats
        work: they are journaled at once and synced with the next synced round, or after the settle interval."""
        unit = self._unit
        if unit.size > self._bytes_max:
            raise BatchTooLarge(unit.size, self._bytes_max)
        unit.lazy = lazy and not unit.parts
        if len(unit.parts) == 1 and not unit.changes:
            unit.parts[0].atomic = False  # a single append is atomic by itself
        unit.ticket.add_callback(self._resolve_parts)
        self._staging.stage(unit)
        return unit.ticket

    def _resolve_parts(self, ticket: Ticket) -> None:
        written = self._unit.parts
        if written:
            ticket.base_offset = written[0].ticket.base_offset
            ticket.next_offset = written[0].ticket.next_offset
        try:
            resolve_all(written, ticket.error)
        finally:
            if len(written) < len(self._parts):
                dropped = [part for part in self._parts if part not in written]
                resolve_all(dropped, ticket.error or LogClosed("the log was deleted"))
