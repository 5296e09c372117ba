"""A log: the append-only record sequence of one partition, kept in segments. This is its public side.

A log is owned by one shard, and all methods run on the owner thread; the shard's worker does the disk writes that they
cause. Reads see only records below the visible end, whatever is being written after it.
"""

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple, Protocol, TypeVar

from headrace.errors import CorruptLog, LogClosed, OffsetOutOfRange, StorageError
from headrace.log.commit.log_writer import Tail
from headrace.log.commit.round import LogEnd, Staging
from headrace.log.read.cold_reads import Loader, ReadWaits
from headrace.log.read.file_range import FileRange
from headrace.log.read.reader import Chunk, LogReader
from headrace.log.segments.segment import Segment
from headrace.log.settings import StreamSettings
from headrace.record.types import Slice

READ_BYTES = 1 << 20

T = TypeVar("T")


class LogSpec(NamedTuple):
    """A log as the catalog describes it. Its id is never reused; the slug makes the folder's name readable."""

    id: int
    slug: str
    settings: StreamSettings


class Waiter:
    """A callback for when an offset can be read."""

    __slots__ = ("callback", "committed", "offset")

    def __init__(self, offset: int, callback: Callable[[], object] | None, committed: bool) -> None:
        self.offset = offset
        self.callback = callback
        self.committed = committed

    def cancel(self) -> None:
        self.callback = None


class LogOwner(Protocol):
    """What a log needs of its shard."""

    def defer(self, callback: Callable[[], object], /) -> object:
        """Call back in a later event-loop iteration of the owner thread."""

    def publish_ends(self, log: "Log") -> None:
        """Have the log's slot written: an end moved without an append."""

    def pin_added(self, log: "Log") -> None:
        """Stop retention that is under way from deleting records that a new pin needs."""

    def planned_segment(self, log: "Log", base: int, generation: int) -> tuple[Segment, bool]:
        """A segment in the generation that a reader planned on, and whether a lease keeps it unchanged."""


class Log(LogEnd):
    __slots__ = (
        "__dict__",  # empty, so it does not exist: tests replace methods
        "_owner",
        "_reader",
        "_waiters",
        "_waiters_max",
        "compacted_until",
        "loader",
        "pins",
        "unsettled_from",
    )

    loader: Loader  # the threads that load and decompress what readers of this log need; set by the shard

    def __init__(
        self,
        owner: LogOwner,
        staging: Staging,
        spec: LogSpec,
        epoch: int,
        tail: Tail,
        reader: LogReader,
        start_offset: int = 0,
    ) -> None:
        super().__init__(staging, spec.id, spec.slug, spec.settings, epoch)
        self._owner = owner
        self._reader = reader
        self.tail = tail
        self.start_offset = start_offset
        self.next_offset = max(tail.next_offset, start_offset)
        self.visible_end = self.durable_end = self.next_offset
        self.pins: dict[str, int] = {}  # pins: name -> first offset that is needed
        self.unsettled_from: Callable[[], int] | None = None  # first offset that a queue over this log has not settled
        self.compacted_until = 0  # before it each key occurs once; only known for compactions since the start
        self._waiters: list[Waiter] = []
        self._waiters_max = 64

    # Facts.

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.tail.segments

    @property
    def size_bytes(self) -> int:
        return sum(segment.stored_bytes for segment in self.tail.segments)

    @property
    def stable_end(self) -> int:
        """Where readers of committed records stop: the first offset of the oldest open transaction, but never below the
        log's start."""
        return self.stable_below(self.visible_end)

    def set_stable_limit(self, offset: int | None) -> None:
        before = self.stable_end
        self._stable_limit = offset
        if self.stable_end != before and not self.is_closed:  # it may move back: open transactions load after a start
            self._owner.publish_ends(self)
        if offset is None or offset > self.stable_end:
            self.wake()

    # Reading.

    def read(self, offset: int, max_bytes: int = READ_BYTES, *, end: int | None = None) -> Chunk:
        """Like read_now, but waits for the disk."""
        while True:
            try:
                return self.read_now(offset, max_bytes, end=end)
            except ReadWaits as cold:
                cold.load()

    def read_now(self, offset: int, max_bytes: int = READ_BYTES, *, end: int | None = None) -> Chunk:
        """Whole batches, beginning with the one that contains offset: up to max_bytes, but at least one. Raises
        ReadWaits if they are not in memory.

        The chunk is empty at the visible end, or at `end` if that comes first. The first batch may begin before offset,
        because batches are never cut.
        """
        stop = self.visible_end if end is None else min(end, self.visible_end)
        if offset < self.start_offset or offset > self.visible_end:
            raise OffsetOutOfRange(offset, self.start_offset, self.visible_end)
        if self.is_closed:
            raise LogClosed(f"log {self.id} ({self.slug}) is closed")
        if offset >= stop:
            if self.damage is not None and offset >= self.visible_end:
                raise self.damage
            return Chunk(b"", offset, offset)
        try:
            return self._reader.read(offset, stop, max_bytes)
        except OSError as error:
            raise self._unreadable(error) from error

    def next_readable_now(self, offset: int) -> int:
        """The next readable offset after damage at `offset`, or the visible end. Raises ReadWaits if the data to search
        is not in memory."""
        try:
            return self._reader.next_readable(offset, self.visible_end)
        except OSError as error:
            raise self._unreadable(error) from error

    def file_range_now(self, offset: int, max_bytes: int = READ_BYTES, *, end: int | None = None) -> FileRange | None:
        """Like read_now, but returns a range of the file, to be sent as it is. None if the batches have to be read, or
        if read_now would raise or return nothing."""
        stop = self.visible_end if end is None else min(end, self.visible_end)
        if self.is_closed or not self.start_offset <= offset < stop:
            return None
        try:
            return self._reader.file_range(offset, stop, max_bytes)
        except OSError as error:
            raise self._unreadable(error) from error

    def read_planned_now(self, base: int, generation: int, offset: int, max_bytes: int = READ_BYTES) -> Chunk:
        """Like read_now, but from a segment in the generation that the reader planned on. While a lease holds it,
        neither retention nor a rewrite changes it. Raises SegmentGone if it no longer exists."""
        if self.is_closed:
            raise LogClosed(f"log {self.id} ({self.slug}) is closed")
        segment, is_held = self._owner.planned_segment(self, base, generation)
        start = segment.base if is_held else max(segment.base, self.start_offset)
        stop = min(segment.next_offset, self.visible_end)
        if not start <= offset <= stop:
            raise OffsetOutOfRange(offset, start, stop)
        try:
            return self._reader.read_segment(segment, offset, stop, max_bytes)
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> StorageError:
        return StorageError(f"log {self.id} ({self.slug}) cannot be read: {error}")

    def _waiting(self, read: Callable[[], T]) -> T:
        while True:
            try:
                return read()
            except ReadWaits as cold:
                cold.load()
            except OSError as error:
                raise self._unreadable(error) from error

    def read_slice(self, piece: Slice) -> bytes:
        return self._waiting(lambda: self._reader.read_slice(piece))

    def slices(self, start: int, end: int, split_bytes: int) -> list[Slice]:
        """Cut [start, end) into slices of about split_bytes, at batch boundaries that the index knows."""
        start, end = max(start, self.start_offset), min(end, self.visible_end)
        return self._waiting(lambda: self._reader.slices(self.id, start, end, split_bytes))

    def offset_for_timestamp(self, timestamp_ms: int) -> tuple[int, int] | None:
        """Like offset_for_timestamp_now, but waits for the disk."""
        return self._waiting(lambda: self.offset_for_timestamp_now(timestamp_ms))

    def offset_for_timestamp_now(self, timestamp_ms: int, start: int = 0) -> tuple[int, int] | None:
        """(offset, timestamp) of the first record at or after both timestamp_ms and the offset `start`; None if there
        is none. Raises ReadWaits if the data to search is not in memory."""
        start = max(start, self.start_offset)
        try:
            return self._reader.offset_for_timestamp(timestamp_ms, start, self.visible_end)
        except OSError as error:
            raise self._unreadable(error) from error

    @property
    def max_timestamp(self) -> int:
        """Largest timestamp of all batches, including transaction markers and batches below the start or above the
        visible end; -1 if there are none."""
        return max((segment.max_timestamp for segment in self.tail.segments), default=-1)

    def forget_positions(self) -> None:
        self._reader.forget_positions()

    def epoch_end(self, epoch: int) -> tuple[int, int]:
        """(largest epoch at or below the requested one, offset where it ended).

        An epoch before the first record ended where that record begins: a reader from that time has lost nothing and
        must not be told of a truncation. (-1, 0) if there are records whose epochs are unknown."""
        at = bisect_right(self.epochs, epoch, key=lambda entry: entry[0])
        if at == 0 and self.epochs:
            return epoch, max(self.epochs[0][1], self.start_offset)
        if at == 0:
            return (-1, 0) if self.visible_end else (epoch, 0)
        end = self.epochs[at][1] if at < len(self.epochs) else self.visible_end
        return self.epochs[at - 1][0], end

    def wait(self, offset: int, callback: Callable[[], object], *, committed: bool = True) -> Waiter:
        """Call back, once, on the owner thread, when offset can be read or the log is closed. Without `committed`,
        records of open transactions count as readable."""
        waiter = Waiter(offset, callback, committed)
        if (self.stable_end if committed else self.visible_end) > offset or self.is_closed:
            self._owner.defer(lambda: self._fire(waiter))
        else:
            if len(self._waiters) >= self._waiters_max:  # a quiet log must not collect cancelled waiters
                self._waiters = [other for other in self._waiters if other.callback is not None]
                self._waiters_max = max(64, 2 * len(self._waiters))
            self._waiters.append(waiter)
        return waiter

    @staticmethod
    def _fire(waiter: Waiter) -> None:
        callback, waiter.callback = waiter.callback, None
        if callback is not None:
            callback()

    def wake(self) -> None:
        if not self._waiters:
            return
        stable_end, visible_end = self.stable_end, self.visible_end
        waiting, self._waiters = self._waiters, []
        raised: Exception | None = None
        for waiter in waiting:
            if waiter.callback is None:
                continue
            if waiter.offset < (stable_end if waiter.committed else visible_end) or self.is_closed:
                try:
                    self._fire(waiter)
                except Exception as bug:  # noqa: BLE001 - raised once all waiters were woken
                    raised = raised or bug
            else:
                self._waiters.append(waiter)
        if raised is not None:
            raise raised

    # Retention.

    def set_pin(self, name: str, offset: int | None) -> None:
        """Set a pin: retention keeps all segments with records at or after offset. None removes it.

        Set the pin before you store it: then, once it is durable, it also holds against retention that had begun."""
        if offset is None:
            self.pins.pop(name, None)
        else:
            self.pins[name] = offset
            self._owner.pin_added(self)

    @property
    def compaction_pin(self) -> int | None:
        """Compaction stops before this offset: a pin, or a queue that has not settled it, needs what follows."""
        needed = [*self.pins.values(), *((self.unsettled_from(),) if self.unsettled_from is not None else ())]
        return min(needed, default=None)

    @property
    def has_damage(self) -> bool:
        """Recovery found damage, or a reader did in a segment that still exists."""
        rotten = self.tail.rotten
        if self.damage is not None or not rotten:
            return self.damage is not None
        return any(segment.path() in rotten for segment in self.tail.segments)

    def damaged_from(self, offset: int, damage: CorruptLog) -> None:
        """Treat damage as recovery would: serve the records before it and refuse appends."""
        self.damage = damage
        self.next_offset = self.visible_end = self.durable_end = offset

    def close(self) -> None:
        self.is_closed = True
        self.wake()

    def __repr__(self) -> str:
        return f"<log {self.id} {self.slug} [{self.start_offset}, {self.visible_end})>"
