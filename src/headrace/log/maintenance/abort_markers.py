"""When compaction may drop the marker of an aborted transaction.

Kafka's clients receive a list of aborted transactions, and skip everything from such a producer until its marker: a
marker must stay as long as the broker lists its transaction. And a reader of a segment that compaction has replaced
learns from the records behind it how its transactions ended. So it takes two passes: one that leaves no record of the
transaction, and one, `tombstone_retention` later, that finds none. Before the result of the second pass counts, the
registry of aborted transactions has forgotten this one, durably.

Owner thread only.
"""

import struct
from collections.abc import Callable, Sequence
from contextlib import suppress

from headrace.clock import Clock
from headrace.errors import HeadraceError
from headrace.log.commit.atomic_group import AtomicGroup
from headrace.log.commit.round import Ticket
from headrace.log.log import Log
from headrace.log.maintenance.compaction import LatestByKey
from headrace.log.state.store import StateStore

TABLE = "aborts"
_PASS = struct.Struct(">qq")  # no keyed record of an aborted transaction is left before this offset; since when

Forget = Callable[[Log, Sequence[int]], Ticket | None]


class AbortMarkers:
    def __init__(self, state: StateStore, group: Callable[[], AtomicGroup], clock: Clock) -> None:
        self._state = state
        self._group = group
        self._clock = clock
        self.forget: Forget | None = None  # receives marker offsets; its ticket resolves when they may be dropped

    def removable_before(self, log: Log) -> int:
        """The offset before which a marker is dropped that has no record of its transaction before it."""
        passed = self._state.get(TABLE, log.id.to_bytes(8, "big"))
        if passed is None or self.forget is None:
            return 0
        until, since_ms = _PASS.unpack(passed)
        return until if self._clock.now_ms() - since_ms >= log.settings.tombstone_retention_ms else 0

    def record_pass(self, log: Log, keep: LatestByKey) -> None:
        """A pass with this filter has rewritten the whole log."""
        key = log.id.to_bytes(8, "big")
        is_waiting = self._state.get(TABLE, key) is not None and not self.removable_before(log)
        if not keep.has_aborts or is_waiting or self.forget is None:
            return
        group = self._group()
        group.put(TABLE, key, _PASS.pack(keep.until, self._clock.now_ms()))
        with suppress(HeadraceError):  # the next pass records it
            group.commit(lazy=True)

    def forget_dropped(self, log: Log, markers: Sequence[int]) -> Ticket | None:
        """Resolves when the markers may be dropped; None when that is at once."""
        return self.forget(log, markers) if markers and self.forget is not None else None
