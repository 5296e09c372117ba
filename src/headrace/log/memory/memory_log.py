"""A log in memory, for queues that need not survive a restart: offsets are assigned at once, without journal or sync.

It has the part of the durable log's interface that queue views use, so a view works with either. A batch is dropped as
soon as all of its records are settled. Above a size limit, or when memory is short, the oldest batches are spilled to
unsynced files.
"""

from bisect import bisect_right
from collections.abc import Callable

from headrace.errors import OffsetOutOfRange
from headrace.log.log import Waiter
from headrace.log.memory.spill import FILE_BYTES_MAX, LARGE_BYTES, LOG_BYTES_MAX, Spill, Spilled, SpillFile
from headrace.log.read.chunk import Chunk
from headrace.record import codec

NO_EPOCH = -1
ReadSpilled = Callable[[SpillFile, int, int], bytes]
_WAITERS_MAX = 64  # beyond it cancelled waiters are removed


class MemoryLog:
    is_deleted = False  # it is dropped with its queue

    def __init__(self, spill: Spill | None = None) -> None:
        self.start_offset = 0
        self.visible_end = 0
        self.size_bytes = 0
        self.memory_bytes = 0  # part of size_bytes; the rest is spilled
        self._bases: list[int] = []
        self._batches: list[bytearray | Spilled] = []
        self._in_files = 0  # number of spilled batches, which are always the first ones
        self._waiters: list[Waiter] = []
        self._waiters_max = _WAITERS_MAX
        self._spill = spill
        self._spill_at = LARGE_BYTES
        self._file: SpillFile | None = None

    @property
    def next_offset(self) -> int:
        return self.visible_end

    @property
    def stable_end(self) -> int:
        return self.visible_end

    def append(self, batch: bytearray) -> int:
        """Append a batch and wake all waiters; returns the offset of its first record."""
        base = self.visible_end
        self.visible_end = codec.patch_run(batch, 0, len(batch), base, NO_EPOCH)
        self._bases.append(base)
        self._batches.append(batch)
        self.size_bytes += len(batch)
        self.memory_bytes += len(batch)
        if self.memory_bytes > self._spill_at and self._spill is not None:
            self._grew_large()
        waiters, self._waiters = self._waiters, []
        raised: Exception | None = None
        for waiter in waiters:
            try:
                _fire(waiter)
            except Exception as bug:  # noqa: BLE001 - raised after all waiters were woken
                raised = raised or bug
        if raised is not None:
            raise raised
        return base

    def read(self, offset: int, max_bytes: int = 65536) -> Chunk:
        return self._read(offset, max_bytes, self._spill.read if self._spill is not None else _nothing_spilled)

    def read_now(self, offset: int, max_bytes: int = 65536) -> Chunk:
        """Like `read`; ReadWaits when a spilled batch is not in the page cache."""
        return self._read(offset, max_bytes, self._spill.read_now if self._spill is not None else _nothing_spilled)

    def _read(self, offset: int, max_bytes: int, read_spilled: ReadSpilled) -> Chunk:
        if not self.start_offset <= offset <= self.visible_end:
            raise OffsetOutOfRange(offset, self.start_offset, self.visible_end)
        if offset == self.visible_end:
            return Chunk(b"", offset, offset)
        first = bisect_right(self._bases, offset) - 1
        last, size = first, 0
        while last < len(self._batches) and (last == first or size + _size(self._batches[last]) <= max_bytes):
            size += _size(self._batches[last])
            last += 1
        only = self._batches[first]
        if last == first + 1 and not isinstance(only, Spilled):
            data: bytes | bytearray = only
        else:
            data = b"".join(
                read_spilled(*batch) if isinstance(batch, Spilled) else batch for batch in self._batches[first:last]
            )
        end = self._bases[last] if last < len(self._bases) else self.visible_end
        return Chunk(data, self._bases[first], end)

    def wait(self, offset: int, callback: Callable[[], object]) -> Waiter:
        """Call back once, as soon as a record at or after the offset exists; at once if there is one."""
        waiter = Waiter(offset, callback, True)
        if self.visible_end > offset:
            _fire(waiter)
        else:
            if len(self._waiters) >= self._waiters_max:  # an idle log must not collect cancelled waiters
                self._waiters = [one for one in self._waiters if one.callback is not None]
                self._waiters_max = max(_WAITERS_MAX, 2 * len(self._waiters))
            self._waiters.append(waiter)
        return waiter

    def drop_below(self, offset: int) -> None:
        """Drop the batches that lie wholly before the offset."""
        keep = bisect_right(self._bases, offset) - 1
        if offset >= self.visible_end:
            keep = len(self._bases)
        if keep > 0:
            self._forget(self._batches[:keep])
            del self._bases[:keep]
            del self._batches[:keep]
            self._in_files = max(0, self._in_files - keep)
        self.start_offset = max(self.start_offset, min(offset, self.visible_end))

    def _forget(self, batches: list[bytearray | Spilled]) -> None:
        for batch in batches:
            self.size_bytes -= _size(batch)
            if not isinstance(batch, Spilled):
                self.memory_bytes -= len(batch)
                continue
            batch.file.live -= 1
            if batch.file.live == 0 and self._spill is not None:
                self._spill.drop(batch.file)
                if batch.file is self._file:
                    self._file = None
        if self._spill_at > LARGE_BYTES and self.memory_bytes < LARGE_BYTES and self._spill is not None:
            self._spill_at = LARGE_BYTES
            self._spill.large.discard(self)

    # Spilling.

    def _grew_large(self) -> None:
        assert self._spill is not None
        self._spill.large.add(self)
        if self.memory_bytes <= LOG_BYTES_MAX:
            self._spill_at = LOG_BYTES_MAX
            return
        self.spill(LOG_BYTES_MAX // 2)
        # If the disk is full, do not try again with every append.
        self._spill_at = max(LOG_BYTES_MAX, self.memory_bytes + LOG_BYTES_MAX // 2)

    def spill(self, keep_bytes: int) -> int:
        """Move the oldest batches to files until at most `keep_bytes` are in memory; returns the bytes moved."""
        assert self._spill is not None
        freed = 0
        while self.memory_bytes > keep_bytes:
            chosen: list[bytearray] = []
            size = 0
            for batch in self._batches[self._in_files :]:
                if size >= FILE_BYTES_MAX or self.memory_bytes - size <= keep_bytes:
                    break
                assert isinstance(batch, bytearray), "spilled batches come first"
                chosen.append(batch)
                size += len(batch)
            if self._file is None or self._file.size >= FILE_BYTES_MAX:
                self._file = self._spill.new_file()
            try:
                places = self._spill.write(self._file, chosen)
            except OSError:
                return freed  # the disk is full: the batches stay in memory, and publishers will be throttled
            self._batches[self._in_files : self._in_files + len(chosen)] = places
            self._in_files += len(chosen)
            self.memory_bytes -= size
            freed += size
        return freed

    def close(self) -> None:
        """The queue was deleted: drop everything, including the files."""
        if self._spill is not None and (self._in_files or self.memory_bytes > LARGE_BYTES):
            self._forget(self._batches)
            self._spill.large.discard(self)
        self._bases, self._batches, self._in_files = [], [], 0
        self.start_offset = self.visible_end
        self.size_bytes = self.memory_bytes = 0


def _nothing_spilled(_file: SpillFile, _position: int, _size: int) -> bytes:
    raise AssertionError("a log without a Spill keeps everything in memory")


def _size(batch: bytearray | Spilled) -> int:
    return batch.size if isinstance(batch, Spilled) else len(batch)


def _fire(waiter: Waiter) -> None:
    callback, waiter.callback = waiter.callback, None
    if callback is not None:
        callback()
