"""Reads a view's log: caches the chunk being delivered from and the records decoded out of it.

A batch that decompresses to much is decompressed and decoded in a thread, like one that has to be read from the disk:
`load_chunk` raises ReadWaits until that is done.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from headrace.broker.streams.decode import INLINE_BYTES_MAX, estimated_bytes, is_small
from headrace.broker.streams.read import with_batch_decompressed, without_aborted
from headrace.broker.types.aborted_ranges import Aborts
from headrace.errors import DecompressedTooLarge, OffsetOutOfRange
from headrace.log.log import Log
from headrace.log.memory.memory_log import MemoryLog
from headrace.log.read.chunk import Chunk
from headrace.log.read.cold_reads import Loads
from headrace.record import codec
from headrace.record.types import BatchInfo, Record

READ_BYTES = 128 * 1024
READ_BYTES_ONE = 8 * 1024  # for a returned message, whose neighbours are settled or in flight
AHEAD_RECORDS = 128
DECOMPRESSED_BYTES_MAX = 16 << 20  # of a batch that is kept decompressed
# Decoded at once from a batch that is decompressed in the thread. A larger one is decompressed again for the rest.
APART_RECORDS = 2000
APART_BYTES = 4 << 20


class Run(NamedTuple):
    """Offsets [start, end) to deliver next; those below redelivered_below get the redelivered flag."""

    start: int
    end: int
    redelivered_below: int
    returned: bool


class ViewReader:
    """Owned by one View; used on the event-loop thread."""

    def __init__(self, log: Log | MemoryLog, aborted: Callable[[], Aborts]) -> None:
        self._log = log
        self.aborted = aborted
        self._chunk: Chunk | None = None
        self._is_compressed = False  # the chunk has compressed batches
        self._ahead: dict[int, Record] = {}  # every record of the chunk within _ahead_range
        self._ahead_range = range(0)
        self._ahead_bytes = 0  # of records that were decoded in the thread
        self._loads: Loads | None = None  # made when the first large batch is met

    def chunk(self, run: Run) -> Chunk:
        """Whole batches that contain run.start; the first may begin earlier. May block on the disk."""
        cached = self._chunk
        if cached is not None and cached.base_offset <= run.start < cached.next_offset:
            return cached
        return self._read_chunk(run, self._log.read)

    def load_chunk(self, run: Run) -> None:
        """Cache the chunk of this run, or raise ReadWaits when it has to be read from the disk or decompressed in the
        thread."""
        cached = self._chunk
        if cached is None or not cached.base_offset <= run.start < cached.next_offset:
            self._read_chunk(run, self._log.read_now)
        if self._is_compressed and run.start not in self._ahead_range:
            self._decompress(run)

    def _decompress(self, run: Run) -> None:
        """Decompress the batch at the start of the run: now if it is small, otherwise in the thread."""
        chunk = self._chunk
        assert chunk is not None, "read before"
        first, end, _ = codec.trim(chunk.data, 0, None, run.start, run.start + 1, verify_crc=False)
        if first == end:
            return
        [info] = codec.scan(chunk.data, first, end, verify_crc=False)
        if not info.codec or info.is_control:
            return
        if is_small(chunk.data, info):
            try:
                self._chunk, self._is_compressed = with_batch_decompressed(chunk, run.start, INLINE_BYTES_MAX), False
                return
            except DecompressedTooLarge:
                pass  # it holds more than it declares
        if self._loads is None:
            assert isinstance(self._log, Log), "a log in memory has no compressed batches"
            self._loads = Loads(self._log.loader.alone, outcomes_max=2)
        job = partial(_decompress_apart, chunk, info, run.start)
        found, next_offset, size, whole = self._loads.result((info.base_offset, info.size, run.start), job)
        if whole is not None:
            chunk = self._chunk = whole
            self._is_compressed = False
        self._ahead = {record.offset: record for record in found}
        self._ahead_range, self._ahead_bytes = range(run.start, min(next_offset, chunk.next_offset)), size

    def _read_chunk(self, run: Run, read: Callable[[int, int], Chunk]) -> Chunk:
        chunk = read(run.start, READ_BYTES_ONE if run.returned else READ_BYTES)
        if chunk.next_offset <= run.start:
            raise OffsetOutOfRange(run.start, self._log.start_offset, self._log.visible_end)
        self._forget_chunk()
        chunk = self._chunk = self.committed(chunk)
        self._is_compressed = bool(chunk.data) and codec.first_compressed(chunk.data) >= 0
        return chunk

    def committed(self, chunk: Chunk) -> Chunk:
        """The chunk without records of open and aborted transactions."""
        if chunk.next_offset > self._log.stable_end:
            chunk = chunk._replace(next_offset=self._log.stable_end)  # read again when the transaction has ended
        aborted = self.aborted()
        return without_aborted(chunk, aborted) if aborted else chunk

    def records(self, run: Run, count_max: int) -> tuple[list[Record], int]:
        """Records from the start of the run up to the first missing offset, and that offset. If the run starts with a
        missing offset: no records, and the offset of its first record.

        Decodes more records than requested: finding one record walks its batch, and decompresses it where needed.
        """
        if run.start not in self._ahead_range:
            self._decode_ahead(run, count_max)
        found: list[Record] = []
        end = min(run.end, self._ahead_range.stop)
        for offset in range(run.start, min(end, run.start + count_max)):
            record = self._ahead.get(offset)
            if record is None:
                break
            found.append(record)
        if found:
            return found, found[-1].offset + 1
        return found, min((offset for offset in self._ahead if run.start < offset < end), default=end)

    def _decode_ahead(self, run: Run, count_max: int) -> None:
        """Doubles the number of records while reads are consecutive: most often only one is wanted."""
        before = self._ahead_range
        limit = max(count_max, min(2 * len(before), AHEAD_RECORDS) if run.start == before.stop else 0)
        chunk = self.chunk(run)
        try:
            chunk = self._chunk = with_batch_decompressed(chunk, run.start, DECOMPRESSED_BYTES_MAX)
        except DecompressedTooLarge:
            limit = count_max
        found = (
            codec.records(chunk.data, from_offset=run.start, to_offset=chunk.next_offset, limit=limit)
            if chunk.data
            else []
        )
        self._ahead = {record.offset: record for record in found}
        self._ahead_bytes = 0
        self._ahead_range = range(run.start, found[-1].offset + 1 if len(found) == limit else chunk.next_offset)

    def decoded(self, offset: int) -> Record | None:
        """The record, if it has been decoded already."""
        return self._ahead.get(offset)

    @property
    def chunk_bytes(self) -> int:
        """Upper bound of the memory in use: decoded records are no larger than their chunk, if it is decompressed."""
        if self._chunk is None:
            return 0
        return len(self._chunk.data) * (2 if self._ahead else 1) + self._ahead_bytes

    def release_chunk(self) -> None:
        self._forget_chunk()
        self._loads = None

    def _forget_chunk(self) -> None:
        self._chunk = None
        self._is_compressed = False
        if self._ahead_range:
            self._ahead, self._ahead_range, self._ahead_bytes = {}, range(0), 0


def _decompress_apart(chunk: Chunk, info: BatchInfo, start: int) -> tuple[list[Record], int, int, Chunk | None]:
    """(records from `start` on, next offset, bytes, the decompressed batch as a chunk unless it is very large); a job
    for the thread."""
    whole: Chunk | None = None
    data, position = chunk.data, info.position
    if estimated_bytes(data, info) <= DECOMPRESSED_BYTES_MAX:
        try:
            whole = with_batch_decompressed(chunk, start, DECOMPRESSED_BYTES_MAX)
            data, position = whole.data, 0
        except DecompressedTooLarge:
            pass  # it holds more than it declares
    found, next_offset, size = codec.records_of(
        data,
        position,
        from_offset=start,
        to_offset=chunk.next_offset,
        limit=APART_RECORDS,
        bytes_max=APART_BYTES,
        in_thread=True,
    )
    return found, next_offset, size, whole
