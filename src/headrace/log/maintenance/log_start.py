"""Where a log begins: moved by retention, and by those who delete records by name.

The start is durable before a segment goes (`Maintenance.drop_before` has the deed). While it is under way a pin may
come: what retention asked for gives way to it, by another move that lies in the journal before the pin does.
"""

from typing import TYPE_CHECKING

from headrace.errors import DiskFull, OffsetOutOfRange
from headrace.log.commit.round import Ticket
from headrace.log.log import Log
from headrace.log.maintenance.retention import Limits, new_start
from headrace.log.segments.segment import Segment
from headrace.log.state.tables import STARTS

if TYPE_CHECKING:
    from headrace.log.maintenance.maintenance import Maintenance
    from headrace.log.shard import Shard


class StartOffsets:
    def __init__(self, shard: "Shard", others: "Maintenance") -> None:
        self._shard = shard
        self._others = others
        self._asked: dict[int, list[tuple[int, Ticket]]] = {}  # log -> starts under way, in the order of the journal
        self._deleted: dict[int, int] = {}  # log -> the highest of them that is not retention's

    def apply_retention(self, log: Log, now_ms: int) -> Ticket | None:
        """Drop what is too old or too much. None when nothing is."""
        limits = Limits.of(log.settings, log.holds.values())

        def last_ms(segment: Segment) -> int:
            """As Kafka does it: records that came without a time are as old as their file, and not older than all."""
            if segment.max_timestamp >= 0:
                return segment.max_timestamp
            try:
                return self._shard.disk.modified_ms(segment.data_path)
            except OSError:
                return now_ms  # another time

        start = new_start(log.segments, limits, log.start_offset, log.visible_end, now_ms, last_ms=last_ms)
        return self.retire_before(log, start) if start > log.start_offset else None

    def retire_before(self, log: Log, offset: int) -> Ticket:
        """Move the start of the log to where nobody needs what lies before it: segments wholly before it go once that
        is durable. For a pin that comes until then it is moved back."""
        if not log.start_offset <= offset <= log.visible_end:
            raise OffsetOutOfRange(offset, log.start_offset, log.visible_end)
        asked = self._asked.get(log.id)
        if asked is not None and asked[-1][0] >= offset:
            return asked[-1][1]  # a later one must not move the start back, and the same is not stored again and again
        return self._move(log, offset)

    def delete_before(self, log: Log, offset: int) -> Ticket:
        """As retire_before, because somebody wants it so: whoever needs it."""
        ticket = self.retire_before(log, offset)
        self._deleted[log.id] = max(offset, self._deleted.get(log.id, 0))
        return ticket

    def give_way(self, log: Log) -> None:
        """A pin was set, and is to be stored: what is confirmed after this holds, whatever retention had begun."""
        if log.id not in self._asked or not log.holds:
            return
        needed = min(log.holds.values())
        start = max((segment.base for segment in log.segments if segment.base <= needed), default=0)
        start = max(start, log.start_offset, self._deleted.get(log.id, 0))
        if start < self._asked[log.id][-1][0]:
            self._move(log, start)

    def _move(self, log: Log, offset: int) -> Ticket:
        group = self._shard.group()
        group.put(STARTS, log.id.to_bytes(8, "big"), offset.to_bytes(8, "big"))
        ticket = group.commit()
        self._asked.setdefault(log.id, []).append((offset, ticket))
        ticket.add_callback(lambda done: self._moved(log, offset, done))
        return ticket

    def _moved(self, log: Log, offset: int, done: Ticket) -> None:
        asked = self._asked[log.id]
        asked.remove((offset, done))
        # Never more than what the journal says from here on: a start would take a missing segment for damage.
        start = min([offset, *(later for later, _ in asked)])
        if not asked:
            del self._asked[log.id]
            self._deleted.pop(log.id, None)
        if done.error is None:
            self._others.drop_before(log, start)
        elif isinstance(done.error, DiskFull):
            # A start that was moved back for a pin may be refused, and the one before it be durable.
            self._others.delay(lambda: self._say_again(log))

    def _say_again(self, log: Log) -> None:
        if not log.is_closed and log.id not in self._asked and self._shard.failure is None:
            self._move(log, log.start_offset)
