"""A log: one partition, an ordered run of segments. This is the side that callers see.

Owned by one shard. All methods run on the owner thread; what they start on disk is done by the shard's worker.
Reads see only what lies below the visible end, whatever is being written behind it.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from headrace.errors import CorruptLog, LogClosed, OffsetOutOfRange, StorageError
from headrace.log.commit.log_writer import Tail
from headrace.log.commit.round import LogEnd
from headrace.log.read.cold_reads import ReadWaits
from headrace.log.read.file_range import FileRange
from headrace.log.read.reader import Chunk, Reader
from headrace.log.segments.segment import Segment
from headrace.log.settings import StreamSettings
from headrace.record.slice import Slice

if TYPE_CHECKING:
    from headrace.log.shard import Shard

READ_BYTES = 1 << 20

T = TypeVar("T")


class LogSpec(NamedTuple):
    """What the catalog knows of a log. The id is never used again; the slug is for people who list the folder."""

    id: int
    slug: str
    settings: StreamSettings


class Waiter:
    __slots__ = ("callback", "committed", "offset")

    def __init__(self, offset: int, callback: Callable[[], object] | None, committed: bool) -> None:
        self.offset = offset
        self.callback = callback
        self.committed = committed

    def cancel(self) -> None:
        self.callback = None


def wake_all(logs: "Iterable[Log]") -> None:
    """Those who wait for each, whatever one of them does; the first thing that one raised is raised after that."""
    raised: Exception | None = None
    for log in logs:
        try:
            log.wake()
        except Exception as bug:  # noqa: BLE001 - see above
            raised = raised or bug
    if raised is not None:
        raise raised


class Log(LogEnd):
    def __init__(self, shard: "Shard", spec: LogSpec, tail: Tail, start_offset: int) -> None:
        super().__init__(shard.intake, spec.id, spec.settings, shard.epoch)
        self._shard = shard
        self.slug = spec.slug
        self.tail = tail
        self.start_offset = start_offset
        self.next_offset = max(tail.next_offset, start_offset)
        self.visible_end = self.durable_end = self.next_offset
        self.holds: dict[str, int] = {}
        self.unsettled_from: Callable[[], int] | None = None  # of a queue that reads it
        self.compacted_until = 0  # before it every key is there once; known since the start only
        self._reader = Reader(
            shard.files,
            shard.index_cache,
            shard.recent_reads,
            shard.file_ranges,
            tail,
            shard.counters,
            shard.loader,
        )
        self._waiters: list[Waiter] = []
        self._waiters_max = 64

    # Facts.

    @property
    def is_async(self) -> bool:
        return self.settings.write_mode == "async"

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.tail.segments

    @property
    def size_bytes(self) -> int:
        return sum(segment.stored_bytes for segment in self.tail.segments)

    @property
    def stable_end(self) -> int:
        """Where readers of committed records stop: the first offset of the oldest open transaction, or what deletion
        left of it."""
        return self.stable_below(self.visible_end)

    def hold_stable(self, offset: int | None) -> None:
        before = self.stable_end
        self._stable_hold = offset
        if self.stable_end != before and not self.is_closed:  # back, too: a start learns of open transactions late
            self._shard.tell(self)
        if offset is None or offset > self.stable_end:
            self.wake()

    # Reading.

    def read(self, offset: int, max_bytes: int = READ_BYTES, *, end: int | None = None) -> Chunk:
        """As read_now, for those who may wait for the disk."""
        while True:
            try:
                return self.read_now(offset, max_bytes, end=end)
            except ReadWaits as cold:
                cold.load()

    def read_now(self, offset: int, max_bytes: int = READ_BYTES, *, end: int | None = None) -> Chunk:
        """Whole batches from the one that holds offset, as many as max_bytes hold, but one at least. ReadWaits when
        they are not in memory.

        An empty chunk at the visible end (or at `end`, if that comes first). The first batch may begin before
        offset: batches are never cut.
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

    def behind_now(self, offset: int) -> int:
        """For whoever met damage at an offset: the next one from which there is something to read, or the visible end.
        ReadWaits when what has to be looked at is not in memory."""
        try:
            return self._reader.next_readable(offset, self.visible_end)
        except OSError as error:
            raise self._unreadable(error) from error

    def part_now(self, offset: int, max_bytes: int = READ_BYTES, *, end: int | None = None) -> FileRange | None:
        """As read_now, but the batches stay in their file, for whoever sends them on as they are. None where they have
        to be read, or where read_now has something else to say."""
        stop = self.visible_end if end is None else min(end, self.visible_end)
        if self.is_closed or not self.start_offset <= offset < stop:
            return None
        try:
            return self._reader.file_range(offset, stop, max_bytes)
        except OSError as error:
            raise self._unreadable(error) from error

    def read_planned_now(self, base: int, generation: int, offset: int, max_bytes: int = READ_BYTES) -> Chunk:
        """As read_now, but of a segment in the generation that somebody planned on: where it is held, retention and
        rewriting have changed nothing of it. SegmentGone when it is not there any more."""
        if self.is_closed:
            raise LogClosed(f"log {self.id} ({self.slug}) is closed")
        segment, is_held = self._shard.maintenance.planned_segment(self, base, generation)
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
        """Cut [start, end) into pieces of about split_bytes on batch boundaries known to the index."""
        start, end = max(start, self.start_offset), min(end, self.visible_end)
        return self._waiting(lambda: self._reader.slices(self.id, start, end, split_bytes))

    def offset_for_timestamp(self, timestamp_ms: int) -> tuple[int, int] | None:
        """As offset_for_timestamp_now, for those who may wait for the disk."""
        return self._waiting(lambda: self.offset_for_timestamp_now(timestamp_ms))

    def offset_for_timestamp_now(self, timestamp_ms: int, start: int = 0) -> tuple[int, int] | None:
        """(offset, timestamp) of the first record at or after timestamp_ms, and at or behind `start`; None when there
        is none. ReadWaits when what has to be looked at is not in memory."""
        start = max(start, self.start_offset)
        try:
            return self._reader.offset_for_timestamp(timestamp_ms, start, self.visible_end)
        except OSError as error:
            raise self._unreadable(error) from error

    @property
    def max_timestamp(self) -> int:
        """Of all batches, also of transactions' ends and of what nobody sees yet, or any more; -1 without any."""
        return max((segment.max_timestamp for segment in self.tail.segments), default=-1)

    def forget_positions(self) -> None:
        self._reader.forget_positions()

    def epoch_end(self, epoch: int) -> tuple[int, int]:
        """(the largest epoch at or below the one asked for, the offset where it ended). Of one before the first record
        nothing was ever written, so it ended where that begins: who waited then has lost nothing, and is not to be told
        that something was cut. (-1, 0) if there are records and nobody knows of which epochs."""
        at = bisect_right(self.epochs, epoch, key=lambda entry: entry[0])
        if at == 0 and self.epochs:
            return epoch, max(self.epochs[0][1], self.start_offset)
        if at == 0:
            return (-1, 0) if self.visible_end else (epoch, 0)
        end = self.epochs[at][1] if at < len(self.epochs) else self.visible_end
        return self.epochs[at - 1][0], end

    def wait(self, offset: int, callback: Callable[[], object], *, committed: bool = True) -> Waiter:
        """Call back, once, on the owner thread, when offset can be read (or when waiting became pointless).
        Without `committed` what an open transaction wrote counts, too."""
        waiter = Waiter(offset, callback, committed)
        if (self.stable_end if committed else self.visible_end) > offset or self.is_closed:
            self._shard.defer(lambda: self._fire(waiter))
        else:
            if len(self._waiters) >= self._waiters_max:  # a quiet log must not collect those who gave up
                self._waiters = [one for one in self._waiters if one.callback is not None]
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
                except Exception as bug:  # noqa: BLE001 - the others are woken all the same
                    raised = raised or bug
            else:
                self._waiters.append(waiter)
        if raised is not None:
            raise raised

    # Retention.

    def set_retention_hold(self, name: str, offset: int | None) -> None:
        """A pin: no segment with records at or after offset is removed while it stands. Set it before it is stored:
        then it holds, once that is durable, against what retention has begun, too."""
        if offset is None:
            self.holds.pop(name, None)
        else:
            self.holds[name] = offset
            self._shard.maintenance.starts.give_way(self)

    @property
    def compaction_hold(self) -> int | None:
        """Compaction stops before it: a pin needs what follows, or a queue that has not settled it."""
        needed = [*self.holds.values(), *((self.unsettled_from(),) if self.unsettled_from is not None else ())]
        return min(needed, default=None)

    @property
    def has_damage(self) -> bool:
        """Found by the start, or met by a reader in a segment that is still there."""
        rotten = self.tail.rotten
        if self.damage is not None or not rotten:
            return self.damage is not None
        return any(segment.path() in rotten for segment in self.tail.segments)

    def damaged_from(self, offset: int, damage: CorruptLog) -> None:
        """As if the start had found it: what lies before is served, and nothing is appended."""
        self.damage = damage
        self.next_offset = self.visible_end = self.durable_end = offset

    def close(self) -> None:
        self.is_closed = True
        self.wake()

    def __repr__(self) -> str:
        return f"<log {self.id} {self.slug} [{self.start_offset}, {self.visible_end})>"
