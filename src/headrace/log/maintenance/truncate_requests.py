"""Truncation: a log forgets its records from an offset on.

Durable as an intention before a file is touched (`truncation.py` has the deed), and withdrawn when all is done.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.errors import Conflict, DiskFull, OffsetOutOfRange
from headrace.log.commit.round import Ticket
from headrace.log.disk.file_cache import NO_ROOM
from headrace.log.log import Log
from headrace.log.maintenance import abort_markers
from headrace.log.maintenance.truncate import cut_back
from headrace.log.segments.segment import SavedWriter, Segment
from headrace.log.state.tables import ENDS, TRUNCATIONS

if TYPE_CHECKING:
    from headrace.log.maintenance.maintenance import Maintenance
    from headrace.log.shard import Shard

Done = Callable[[BaseException | None], object]


class TruncateRequests:
    def __init__(self, shard: "Shard", others: "Maintenance") -> None:
        self._shard = shard
        self._others = others  # one thing at a time is done to a log

    def truncate(self, log: Log, offset: int, done: Done) -> None:
        """Forget the records from offset on. Appends to this log are refused meanwhile.

        First a checkpoint, so that the journal holds nothing of what is cut; then the intention; then the files.
        """
        if not log.start_offset <= offset <= log.visible_end:
            raise OffsetOutOfRange(offset, log.start_offset, log.visible_end)
        if log.id in self._others.busy or log.next_offset != log.visible_end:
            raise Conflict(f"log {log.id} is being written or rewritten: try again")
        self._others.busy.add(log.id)
        log.is_frozen = True

        def intend(error: BaseException | None) -> None:
            if error is not None:
                self._truncated(log, error, done)
                return
            group = self._shard.group()
            group.put(TRUNCATIONS, log.id.to_bytes(8, "big"), offset.to_bytes(8, "big"))
            group.commit().add_callback(lambda t: self._cut(log, offset, t.error, done))

        self._shard.checkpoint(intend)

    def _cut(self, log: Log, offset: int, error: BaseException | None, done: Done) -> None:
        if error is not None:
            self._truncated(log, error, done)
            return
        if self._others.is_leaving(log):
            self._others.delay(lambda: self._cut(log, offset, None, done))
            return

        replaced = self._others.replaced_of(log)

        def cut() -> tuple[list[Segment], SavedWriter | None]:
            gone = cut_back(self._shard.files, log.tail, offset, replaced)
            return gone, log.tail.saved_writer()

        self._shard.worker.submit(cut, lambda result, failed: self._record_cut(log, offset, result, failed, done))

    def _record_cut(
        self,
        log: Log,
        offset: int,
        result: tuple[list[Segment], SavedWriter | None] | None,
        error: BaseException | None,
        done: Done,
    ) -> None:
        if isinstance(error, DiskFull) and self._shard.failure is None:
            self._give_up_cut(log, error, done)
            return
        if error is not None or result is None:
            self._shard.fail(error or AssertionError("a cut has a result or an error"))
            self._truncated(log, self._shard.failure, done)
            return
        gone, saved = result
        log.next_offset = log.visible_end = log.durable_end = offset
        log.compacted_until = min(log.compacted_until, offset)
        log.forget_positions()
        log.epochs = [entry for entry in log.epochs if entry[1] < offset]
        self._others.forget(log, gone)
        values = {ENDS: b"" if saved is None else saved.pack(), abort_markers.TABLE: b""}
        self._tell_cut(log, lambda: self._withdraw(log, values, lambda error: self._truncated(log, error, done)))

    def _tell_cut(self, log: Log, then: Callable[[], None]) -> None:
        """Write and sync the slot while the intention stands: afterwards its former end would prove a loss."""

        def tell() -> None:
            self._shard.committer.publish_ends(log, must=True)
            self._shard.slots.sync()

        def told(_result: object, error: BaseException | None) -> None:
            if isinstance(error, OSError) and error.errno in NO_ROOM:
                self._others.delay(lambda: self._tell_cut(log, then))
            elif error is not None:
                self._shard.fail(error)
            then() if error is None else None

        self._shard.worker.submit(tell, told)

    def _give_up_cut(self, log: Log, error: DiskFull, done: Done) -> None:
        """No room for what was to stay, and nothing was touched: withdraw the intention, then say no."""
        self._withdraw(log, {}, lambda failed: self._truncated(log, failed or error, done))

    def _withdraw(self, log: Log, values: dict[str, bytes], done: Done) -> None:
        """Take the intention back, durably. A full disk only delays it, and the log stays frozen meanwhile:
        with the intention in force, what was appended behind it would be cut off by the next start."""
        key = log.id.to_bytes(8, "big")
        group = self._shard.group()
        for table, value in values.items():
            group.put(table, key, value) if value else group.delete(table, key)
        group.delete(TRUNCATIONS, key)

        def withdrawn(ticket: Ticket) -> None:
            if isinstance(ticket.error, DiskFull):
                self._others.delay(lambda: self._withdraw(log, values, done))
            else:
                done(ticket.error)

        group.commit().add_callback(withdrawn)

    def _truncated(self, log: Log, error: BaseException | None, done: Done) -> None:
        self._others.busy.discard(log.id)
        log.is_frozen = False
        done(error)

    def finish(self) -> None:
        """Recovery found intentions that a crash interrupted: carry them out before anything else happens."""
        for log, offset in self._shard.pending_truncations:
            self._others.busy.add(log.id)
            log.is_frozen = True
            self._cut(log, min(offset, log.visible_end), None, lambda _error: None)
        self._shard.pending_truncations = []
