"""A queue view: which offsets of a log are done, which are out, which came back, what is next.

Memory does not grow with the backlog: everything is ranges. Settled ranges ride to the state table in
the next round; `reserved` is how far deliveries may have gone, saved ahead in blocks, so that after a
crash whatever may have been delivered carries the redelivered flag.
"""

import asyncio
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from headrace.broker.queues.delivery_counts import DeliveryCounts, pack, unpack
from headrace.broker.queues.flush import Author, FlushCoordinator
from headrace.broker.streams.partition import Partition
from headrace.broker.streams.read import unfolded, without_aborted
from headrace.broker.types.aborted_ranges import Aborts
from headrace.broker.types.range_set import RangeSet
from headrace.errors import DecompressedTooLarge, OffsetOutOfRange
from headrace.record import codec
from headrace.record.codec import BatchWriter
from headrace.record.layout import COUNT_AT, MAX_OFFSET, RECORDS_AT
from headrace.record.types import Record

READ_BYTES = 128 * 1024
READ_BYTES_ONE = 8 * 1024  # for a message that came back: it is alone
AHEAD_RECORDS = 128
UNFOLDED_BYTES_MAX = 16 << 20
RESERVE_MIN = 1024
RESERVE_MAX = 65_536
WRITER_CAPACITY = 4096
WRITER_KEPT = 256 * 1024
WRITERS_POOLED = 64
SEALED_BYTES_MAX = 1 << 20

_HEAD = struct.Struct(">Bq")
_RANGE = struct.Struct(">qq")
_RAISE, _SET, _COUNTED = 0, 1, 2  # how `reserved` changes; with delivery counts before the ranges, or without

_writers: list[BatchWriter] = []


class Delta(NamedTuple):
    """What changed since the last save: ranges settled, how far deliveries may go, how often messages came back."""

    ranges: RangeSet
    moving: RangeSet
    reserved: int
    exact: bool = False
    counts: Mapping[int, int] = MappingProxyType({})

    def encode(self) -> bytes:
        kind = (_SET if self.exact else _RAISE) | (_COUNTED if self.counts else 0)
        counts = pack(self.counts) if self.counts else b""
        pairs = (_RANGE.pack(start, end) for ranges in (self.ranges, self.moving) for start, end in ranges)
        return b"".join((_HEAD.pack(kind, self.reserved), counts, *pairs))


def fold_settles(value: bytes | None, deltas: Sequence[bytes]) -> bytes | None:
    """The state table's fold: a value is a delta that holds everything so far."""
    reserved, ranges, counts = decode_settles(value)
    for delta in deltas:
        kind, raised, more, pairs = _split(delta)
        reserved = raised if kind & _SET else max(reserved, raised)
        counts.update(more)
        for pair in _RANGE.iter_unpack(pairs):
            ranges.add(*pair)
    counts = {offset: count for offset, count in counts.items() if offset not in ranges}
    return Delta(ranges, RangeSet(), reserved, counts=counts).encode()


def decode_settles(value: bytes | None) -> tuple[int, RangeSet, dict[int, int]]:
    """(reserved, settled ranges, delivery counts)."""
    if value is None:
        return 0, RangeSet(), {}
    _, reserved, counts, pairs = _split(value)
    return reserved, RangeSet(_RANGE.iter_unpack(pairs)), counts


def _split(raw: bytes) -> tuple[int, int, dict[int, int], memoryview]:
    kind, reserved = _HEAD.unpack_from(raw)
    counts: dict[int, int] = {}
    rest = memoryview(raw)[_HEAD.size :]
    if kind & _COUNTED:
        counts, rest = unpack(rest)
    return kind, reserved, counts, rest


def _count_of(batch: bytearray) -> int:
    return int.from_bytes(batch[COUNT_AT:RECORDS_AT], "big")


class Run(NamedTuple):
    """Offsets to deliver next, in one go: [start, end), those below redelivered_below flagged."""

    start: int
    end: int
    redelivered_below: int
    returned: bool


class View:
    """One log, read as a queue. Belongs to one Queue; used on the loop's thread."""

    def __init__(
        self,
        log: Any,
        flushes: FlushCoordinator,
        *,
        key: bytes = b"",
        durable: bool,
        saved: bytes | None = None,
        level: int = 0,
        compression: int = 0,
        aborted: Callable[[], Aborts] = Aborts,
    ) -> None:
        self.log = log
        self.aborted = aborted  # transactions of Kafka producers: what they wrote is no message
        self.key = key
        self.durable = durable
        self.level = level
        self._flushes = flushes
        self._compression = compression
        reserved, self.settled, counts = decode_settles(saved)
        self.counts = DeliveryCounts(counts)
        self.settled.add(0, log.start_offset)
        self.returned = RangeSet()
        self.next = self.low
        # Offsets given out after the crash are new, however far the reservation went before it.
        self.redelivered_below = min(reserved, log.visible_end)
        self.reserved = reserved if durable else MAX_OFFSET
        self._reserving = 0
        self._reserve_block = RESERVE_MIN
        self._unsaved = RangeSet()
        self._moving = RangeSet()  # settled together with something else: taken back if that fails
        self._leaving = RangeSet()  # of a log in memory: what is being moved, until it is known to be there
        self._reservation_waiters: list[asyncio.Future[None]] = []
        self._chunk: Any = None
        self._ahead: dict[int, Record] = {}  # all that the chunk has in _ahead_range
        self._ahead_range = range(0)
        self._writer: BatchWriter | None = None
        self._sealed: list[bytearray] = []
        self._targets: list[Any] = []
        self.authors: set[Author] = set()  # of what waits for the next flush, as far as they want to know
        self._in_round = 0
        self.purged_to = 0

    @property
    def partition(self) -> Partition:
        """The port through which listeners see the log."""
        return Partition(self.level, self.log)

    # Counting.

    @property
    def low(self) -> int:
        """Everything below is settled."""
        first = self.settled.first()
        return first[1] if first is not None and first[0] == 0 else 0

    def unsettled_from(self) -> int:
        return self.low

    @property
    def ready(self) -> int:
        start, end = self.log.start_offset, self.log.stable_end
        returned = len(self.returned) - self.returned.count(0, start)
        start = max(self.next, start)
        if start >= end:
            return returned
        return int(end - start - self.settled.count(start, end) + returned)

    @property
    def out(self) -> int:
        """Delivered and not settled."""
        start = self.log.start_offset
        if self.next <= start:
            return 0
        return int(self.next - start - self.settled.count(start, self.next) - self.returned.count(start, self.next))

    @property
    def has_ready(self) -> bool:
        return bool(self.returned) or self.next < self.log.stable_end

    # Writing.

    @property
    def pending_bytes(self) -> int:
        size = self._writer.size if self._writer is not None else 0
        return size + sum(map(len, self._sealed))

    @property
    def pending(self) -> int:
        """Records that were published and cannot be read yet: they wait for a flush, or a round is storing them."""
        waiting = self._writer.count if self._writer is not None else 0
        return waiting + sum(map(_count_of, self._sealed)) + self._in_round

    def open_writer(self, target: Any = None) -> BatchWriter:
        if self._writer is None:
            self._writer = _writers.pop() if _writers else BatchWriter(0, WRITER_CAPACITY)
            self._flushes.dirty(self)
        elif self._flushes.in_atomic:
            self._flushes.must_join(self)
        if target is not None:
            self._targets.append(target)
        author = self._flushes.author
        if author is not None:
            self.authors.add(author)
            author.wrote(target, durable=self.durable)
        return self._writer

    def seal(self) -> None:
        """Closes the batch that is being written; the same writer goes on with the next."""
        if self._writer is not None and self._writer.count:
            self._sealed.append(self._writer.finish(self._compression))

    def take_batches(self) -> list[bytearray]:
        batches, self._sealed = self._sealed, []
        writer, self._writer = self._writer, None
        for target in self._targets:
            target.reset()
        self._targets.clear()
        self.authors.clear()
        if writer is not None:
            large = writer.size > WRITER_KEPT
            if writer.count:
                self._flushes.records += writer.count
                batches.append(writer.finish(self._compression))
            if len(_writers) < WRITERS_POOLED and not large:
                _writers.append(writer)
        return batches

    def handed_over(self, batches: Iterable[bytearray]) -> int:
        """A round has them: how many records, for `landed` when it has ended."""
        count = sum(map(_count_of, batches))
        self._in_round += count
        return count

    def landed(self, count: int) -> None:
        """They can be read, or were refused."""
        self._in_round -= count

    def discard_pending(self) -> None:
        for _ in self.take_batches():
            pass

    # Reading.

    def follow_start(self) -> None:
        """Whoever deletes records, or a topic's retention, may take what nobody has settled: it is not there to be
        read any more, and all that is behind it waits for nothing."""
        start = self.log.start_offset
        first = self.returned.first()
        if start <= self.low and (first is None or first[0] >= start):
            return
        self.settled.add(0, start)
        self.returned.remove(0, start)
        self.counts.forget(0, start)
        self.next = max(self.next, start)
        if self.on_lost is not None:
            self.on_lost()

    def next_run(self) -> Run | None:
        """What to deliver next: what came back first, then the log in order. None: nothing, or not yet."""
        self.follow_start()
        first = self.returned.first()
        if first is not None:
            return Run(first[0], first[1], MAX_OFFSET, True)
        end = self.log.stable_end
        gap = self.settled.gap(self.next, end)
        if gap is None:
            self.next = max(self.next, end)
            return None
        self.next = gap[0]
        if self.next + self._reserve_block // 2 >= self.reserved:
            self._reserve()
        end = min(gap[1], self.reserved)
        if self.next >= end:
            self._reserve_block = min(self._reserve_block * 2, RESERVE_MAX)
            return None  # the reservation's round wakes the queue
        return Run(self.next, end, self.redelivered_below, False)

    def next_run_unreserved(self) -> Run | None:
        """As next_run, for what is not delivered to a consumer: basic.get, purge, expiry.

        After a crash its redelivered flag may be missing for a message that was fetched and not settled.
        """
        self.follow_start()
        first = self.returned.first()
        if first is not None:
            return Run(first[0], first[1], MAX_OFFSET, True)
        gap = self.settled.gap(self.next, self.log.stable_end)
        if gap is None:
            self.next = max(self.next, self.log.stable_end)
            return None
        self.next = gap[0]
        return Run(gap[0], gap[1], self.redelivered_below, False)

    def reserve_past(self, offset: int) -> None:
        if offset >= self.reserved:
            self._reserve()

    async def reserve_next(self) -> None:
        """Before one is handed out by basic.get: returns when that is known on disk, or the disk refuses."""
        self.follow_start()
        if self.durable and not self.returned and self.reserved <= self.next < self.log.stable_end:
            self._reserve()
            waiter = asyncio.get_running_loop().create_future()
            self._reservation_waiters.append(waiter)
            await waiter

    def release_waiters(self) -> None:
        waiters, self._reservation_waiters = self._reservation_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def _reserve(self) -> None:
        wanted = self.next + self._reserve_block
        if wanted > max(self._reserving, self.reserved):
            self._reserving = wanted
            self._flushes.settled(self)

    def chunk(self, run: Run) -> Any:
        """Whole batches that hold run.start; the first may begin earlier."""
        cached = self._chunk
        if cached is not None and cached.base_offset <= run.start < cached.next_offset:
            return cached
        return self._keep_chunk(run, self.log.read)

    def load_chunk(self, run: Run) -> None:
        """Makes the next call of `chunk` for this run one that does not wait, or raises ReadWaits."""
        cached = self._chunk
        if cached is None or not cached.base_offset <= run.start < cached.next_offset:
            self._keep_chunk(run, self.log.read_now)

    def _keep_chunk(self, run: Run, read: Callable[[int, int], Any]) -> Any:
        chunk = read(run.start, READ_BYTES_ONE if run.returned else READ_BYTES)
        if chunk.next_offset <= run.start:
            raise OffsetOutOfRange(run.start, self.log.start_offset, self.log.visible_end)
        self.release_chunk()
        chunk = self._chunk = self.committed(chunk)
        return chunk

    def records(self, run: Run, most: int) -> tuple[list[Record], int]:
        """At most so many from the start of the run on, up to where one is missing, and where that is; for a run that
        begins with none, where its first one is.

        More than is asked for is taken out of the chunk: to find each alone takes a walk through its batch, and where
        that is compressed, unfolding it.
        """
        if run.start not in self._ahead_range:
            self._look_ahead(run, most)
        found: list[Record] = []
        end = min(run.end, self._ahead_range.stop)
        for offset in range(run.start, min(end, run.start + most)):
            record = self._ahead.get(offset)
            if record is None:
                break
            found.append(record)
        if found:
            return found, found[-1].offset + 1
        return found, min((offset for offset in self._ahead if run.start < offset < end), default=end)

    def _look_ahead(self, run: Run, most: int) -> None:
        """Twice as far each time, as long as it goes on where it ended: most often one is all that is wanted."""
        before = self._ahead_range
        limit = max(most, min(2 * len(before), AHEAD_RECORDS) if run.start == before.stop else 0)
        chunk = self.chunk(run)
        try:
            chunk = self._chunk = unfolded(chunk, run.start, UNFOLDED_BYTES_MAX)
        except DecompressedTooLarge:
            limit = most
        found = (
            codec.records(chunk.data, from_offset=run.start, to_offset=chunk.next_offset, limit=limit)
            if chunk.data
            else []
        )
        self._ahead = {record.offset: record for record in found}
        self._ahead_range = range(run.start, found[-1].offset + 1 if len(found) == limit else chunk.next_offset)

    def seen_ahead(self, offset: int) -> Record | None:
        return self._ahead.get(offset)

    def committed(self, chunk: Any) -> Any:
        """What of a chunk is there for good: not what open transactions wrote, and not what aborted ones did."""
        if chunk.next_offset > self.log.stable_end:
            chunk = chunk._replace(next_offset=self.log.stable_end)  # read again when it is known what becomes of it
        aborted = self.aborted()
        return without_aborted(chunk, aborted) if aborted else chunk

    @property
    def chunk_bytes(self) -> int:
        """What was taken out of it is not larger."""
        return len(self._chunk.data) * (2 if self._ahead else 1) if self._chunk is not None else 0

    def release_chunk(self) -> None:
        self._chunk = None
        if self._ahead_range:
            self._ahead, self._ahead_range = {}, range(0)

    def advance(self, run: Run, to: int) -> None:
        """[run.start, to) has been handed out, or settled on the way."""
        if run.returned:
            self.returned.remove(run.start, to)
        else:
            assert to >= self.next
            self.next = to
            if self.next >= self.log.stable_end:
                self.release_chunk()

    # Settling.

    def settle(self, start: int, end: int) -> None:
        if not self.settled.add(start, end):
            return
        if self._flushes.in_atomic:
            self._flushes.settled_together(self, start, end)
        else:
            self.settled_for_good(start, end)

    def settled_for_good(self, start: int, end: int) -> None:
        """Whatever becomes of anything else: what is durable is told to the disk until it has it."""
        if self.durable:
            self._unsaved.add(start, end)
            self._flushes.settled(self)
        else:
            self._forget(start, end)

    def settled_if_stored(self, start: int, end: int) -> None:
        """Moved to where the disk has a say: it is here again if the disk refuses. A queue in memory waits, too."""
        self._moving.add(start, end)
        if not self.durable:
            self._leaving.add(start, end)
        self._flushes.settled(self)

    def _forget(self, start: int, end: int) -> None:
        """Of a log in memory: what is settled goes, but not what may come back."""
        self.counts.forget(start, end)
        first = self._leaving.first()
        self.log.drop_below(min(self.low, first[0]) if first is not None else self.low)

    def count_return(self, offset: int) -> int:
        """How often it has come back, this time included."""
        count = self.counts.add(offset)
        if self.durable:
            self._flushes.settled(self)
        return count

    def give_back(self, start: int, end: int) -> None:
        """Delivered, not settled, to be delivered again: in its old place, before what is new."""
        self.returned.add(start, end)

    def take_unsaved(self, *, exact: bool = False) -> Delta:
        reserved = self.next if exact else max(self._reserving, self.reserved)
        delta = Delta(self._unsaved, self._moving, reserved, exact, self.counts.take_unsaved())
        self._unsaved, self._moving = RangeSet(), RangeSet()
        return delta

    def put_back(self, delta: Delta) -> None:
        """It was not stored: acks are kept for the next time, what was to move elsewhere is here again."""
        self._reserving = self.reserved
        self.release_waiters()
        self.counts.put_back(delta.counts)
        for start, end in delta.ranges:
            self._unsaved.add(start, end)
        for start, end in delta.moving:
            self.settled.remove(start, end)
            self.returned.add(start, end)
            self._leaving.remove(start, end)

    def saved(self, delta: Delta) -> None:
        if not self.durable:
            for start, end in delta.moving:
                self._leaving.remove(start, end)
                self._forget(start, end)
            return
        if self.counts:
            for ranges in (delta.ranges, delta.moving):
                for start, end in ranges:
                    self.counts.forget(start, end)
        woke = delta.reserved > self.reserved
        self.reserved = max(self.reserved, delta.reserved)
        self.release_waiters()
        if woke and self.on_reserved is not None:
            self.on_reserved()

    on_reserved: Any = None
    on_lost: Any = None  # something was deleted before it was settled
    on_put_back: Any = None  # what was to move elsewhere is here again: called when it is time to try once more
