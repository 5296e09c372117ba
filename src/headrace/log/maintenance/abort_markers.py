"""When the marker of an aborted transaction may go from a compacted log.

Kafka's clients are told which transactions were aborted, and take all that such a producer has sent for aborted until
its marker comes: no marker may go as long as somebody is told of it. And who reads a segment that compaction replaced
meanwhile finds out in what follows how its transactions ended. So it takes two passes: one that leaves nothing of the
transaction, and one, `tombstone_retention` later, that finds nothing of it. Before what that one made takes its
place, whoever knows of aborted transactions has forgotten this one, durably.

For the owner thread.
"""

import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from headrace.errors import HeadraceError
from headrace.log.commit.round import Ticket
from headrace.log.log import Log

if TYPE_CHECKING:
    from headrace.log.maintenance.compaction import LatestByKey
    from headrace.log.shard import Shard

TABLE = "aborts"
_PASS = struct.Struct(">qq")  # before this offset nothing of an aborted transaction is left that has a key; since when

Forget = Callable[[Log, Sequence[int]], Ticket | None]


class Aborts:
    def __init__(self, shard: "Shard") -> None:
        self._shard = shard
        self.forget: Forget | None = None  # told the offsets of markers; the ticket says when they may go

    def may_go_before(self, log: Log) -> int:
        """The offset before which a marker goes that has no record of its transaction before it."""
        passed = self._shard.state.get(TABLE, log.id.to_bytes(8, "big"))
        if passed is None or self.forget is None:
            return 0
        until, since_ms = _PASS.unpack(passed)
        return until if self._shard.clock.now_ms() - since_ms >= log.settings.tombstone_retention_ms else 0

    def passed(self, log: Log, keep: "LatestByKey") -> None:
        """All of the log was rewritten by this filter."""
        key = log.id.to_bytes(8, "big")
        is_waiting = self._shard.state.get(TABLE, key) is not None and not self.may_go_before(log)
        if not keep.has_aborts or is_waiting or self.forget is None:
            return
        group = self._shard.group()
        group.put(TABLE, key, _PASS.pack(keep.until, self._shard.clock.now_ms()))
        with suppress(HeadraceError):  # the next pass says it
            group.commit(lazy=True)

    def let_go(self, log: Log, markers: Sequence[int]) -> Ticket | None:
        """What has to be stored before these are gone; None when nothing has."""
        return self.forget(log, markers) if markers and self.forget is not None else None
