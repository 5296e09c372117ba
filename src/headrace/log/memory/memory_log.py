"""A log that need not last: batches in memory, offsets at once, no journal and no sync.

It has the part of the durable log's face that queue views use, so a view does not know which one it
reads. What is settled is dropped as soon as its batch is wholly below the low water. Past a cap, or when
memory is short, the oldest batches go to files that nobody syncs, and are read from there.
"""

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from headrace.errors import OffsetOutOfRange
from headrace.log.memory.spill import FILE_BYTES_MAX, LARGE_BYTES, LOG_BYTES_MAX, Spill, Spilled, SpillFile
from headrace.record import codec

NO_EPOCH = -1
Unspill = Callable[[SpillFile, int, int], bytes]


class MemoryChunk(NamedTuple):
    data: bytes | bytearray | memoryview
    base_offset: int
    next_offset: int


class Waiter:
    __slots__ = ("_callback", "_log")

    def __init__(self, log: "MemoryLog", callback: Callable[[], object]) -> None:
        self._log, self._callback = log, callback

    def cancel(self) -> None:
        if self in self._log._waiters:
            self._log._waiters.remove(self)

    def call(self) -> None:
        self._callback()


class MemoryLog:
    def __init__(self, spill: Spill | None = None) -> None:
        self.start_offset = 0
        self.visible_end = 0
        self.size_bytes = 0
        self.memory_bytes = 0  # of size_bytes; the rest is spilled
        self._bases: list[int] = []
        self._batches: list[bytearray | Spilled] = []
        self._in_files = 0  # how many of the batches, from the first
        self._waiters: list[Waiter] = []
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
        """The offset of its first record. Readers that wait are woken."""
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
                waiter.call()
            except Exception as bug:  # noqa: BLE001 - the others are woken all the same
                raised = raised or bug
        if raised is not None:
            raise raised
        return base

    def read(self, offset: int, max_bytes: int = 65536) -> MemoryChunk:
        return self._read(offset, max_bytes, self._spill.read if self._spill is not None else _nothing_spilled)

    def read_now(self, offset: int, max_bytes: int = 65536) -> MemoryChunk:
        """ReadWaits when what was spilled is not in memory any more."""
        return self._read(offset, max_bytes, self._spill.read_now if self._spill is not None else _nothing_spilled)

    def _read(self, offset: int, max_bytes: int, unspill: Unspill) -> MemoryChunk:
        if not self.start_offset <= offset <= self.visible_end:
            raise OffsetOutOfRange(offset, self.start_offset, self.visible_end)
        if offset == self.visible_end:
            return MemoryChunk(b"", offset, offset)
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
                unspill(*batch) if isinstance(batch, Spilled) else batch for batch in self._batches[first:last]
            )
        end = self._bases[last] if last < len(self._bases) else self.visible_end
        return MemoryChunk(data, self._bases[first], end)

    def wait(self, offset: int, callback: Callable[[], object]) -> Waiter:
        waiter = Waiter(self, callback)
        if self.visible_end > offset:
            waiter.call()
        else:
            self._waiters.append(waiter)
        return waiter

    def drop_below(self, offset: int) -> None:
        """Forgets whole batches below the offset."""
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
        # Where a full disk keeps it from shrinking, not every append tries again.
        self._spill_at = max(LOG_BYTES_MAX, self.memory_bytes + LOG_BYTES_MAX // 2)

    def spill(self, keep_bytes: int) -> int:
        """Puts the oldest batches into a file, until no more than this much is in memory. How much went."""
        assert self._spill is not None
        freed = 0
        while self.memory_bytes > keep_bytes:
            chosen: list[bytearray] = []
            size = 0
            for batch in self._batches[self._in_files :]:
                if size >= FILE_BYTES_MAX or self.memory_bytes - size <= keep_bytes:
                    break
                assert isinstance(batch, bytearray), "what is in files comes first"
                chosen.append(batch)
                size += len(batch)
            if self._file is None or self._file.size >= FILE_BYTES_MAX:
                self._file = self._spill.new_file()
            try:
                places = self._spill.write(self._file, chosen)
            except OSError:
                return freed  # no room: they stay in memory, and publishers will be paused
            self._batches[self._in_files : self._in_files + len(chosen)] = places
            self._in_files += len(chosen)
            self.memory_bytes -= size
            freed += size
        return freed

    def close(self) -> None:
        """Its queue is gone, and its files with it."""
        if self._spill is not None and (self._in_files or self.memory_bytes > LARGE_BYTES):
            self._forget(self._batches)
            self._spill.large.discard(self)
        self._bases, self._batches, self._in_files = [], [], 0
        self.start_offset = self.visible_end
        self.size_bytes = self.memory_bytes = 0


def _nothing_spilled(_file: SpillFile, _position: int, _size: int) -> bytes:
    raise AssertionError("without a place to spill to, everything is in memory")


def _size(batch: bytearray | Spilled) -> int:
    return batch.size if isinstance(batch, Spilled) else len(batch)
