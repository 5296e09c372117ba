"""A group: appends and state changes that happen together, or not at all."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.errors import BatchTooLarge, LogClosed
from headrace.log.commit.journal_entry import DELETE, MERGE, PART_BYTES, PUT, StateChange
from headrace.log.commit.round import RoundPart, Ticket, Unit, resolve_all
from headrace.record.types import BatchInfo

if TYPE_CHECKING:
    from headrace.log.log import Log
    from headrace.log.shard import Shard


class AtomicGroup:
    """Collects, then commits as one journal entry. The same buffer may be appended to several logs.

    Tables are short names, keys up to 64 KB. A merge is folded into the value by the table's fold function.
    """

    __slots__ = ("_parts", "_shard", "_stored", "_unit")

    def __init__(self, shard: "Shard") -> None:
        self._shard = shard
        self._unit = Unit(shard.new_ticket())
        self._parts: list[RoundPart] = []  # also those that a deletion took out of the unit
        self._stored: set[int] = set()  # buffers counted already: the journal holds each once

    def append(self, log: "Log", batch: bytearray | memoryview, infos: Sequence[BatchInfo] | None = None) -> Ticket:
        """The ticket has this part's offsets once the group's own ticket is resolved."""
        log.check_append(batch, infos)
        ticket = self._shard.new_ticket()
        part = RoundPart(log, batch, ticket, atomic=True)
        self._unit.parts.append(part)
        self._parts.append(part)
        self._unit.size += PART_BYTES
        if id(batch) not in self._stored:
            self._stored.add(id(batch))
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
        self._unit.size += change.size  # as the journal stores it: many small changes must not overflow an entry

    def commit(self, *, lazy: bool = False) -> Ticket:
        """Stage it all. `lazy`, without appends only: journaled at once, synced with the next round that is,
        or after the settle interval: for changes whose loss in a power cut only repeats work."""
        unit = self._unit
        largest = self._shard.journal.capacity // 2
        if unit.size > largest:
            raise BatchTooLarge(unit.size, largest)
        unit.lazy = lazy and not unit.parts
        if len(unit.parts) == 1 and not unit.changes:
            unit.parts[0].atomic = False  # nothing it must happen together with
        unit.ticket.add_callback(self._pass_on)
        self._shard.stage(unit)
        return unit.ticket

    def _pass_on(self, ticket: Ticket) -> None:
        written = self._unit.parts
        if written:
            ticket.base_offset = written[0].ticket.base_offset
            ticket.next_offset = written[0].ticket.next_offset
        try:
            resolve_all(written, ticket.error)
        finally:
            if len(written) < len(self._parts):
                left_out = [part for part in self._parts if part not in written]
                resolve_all(left_out, ticket.error or LogClosed("the log was deleted"))
