"""A log that need not last: batches in memory, offsets at once, nothing on disk.

It has the part of the durable log's face that queue views use, so a view does not know which one it
reads. What is settled is dropped as soon as its batch is wholly below the low water.
"""

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from headrace.errors import OffsetOutOfRange
from headrace.record import codec

NO_EPOCH = -1


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
    def __init__(self) -> None:
        self.start_offset = 0
        self.visible_end = 0
        self.size_bytes = 0
        self._bases: list[int] = []
        self._batches: list[bytearray] = []
        self._waiters: list[Waiter] = []

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
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.call()
        return base

    def read(self, offset: int, max_bytes: int = 65536) -> MemoryChunk:
        if not self.start_offset <= offset <= self.visible_end:
            raise OffsetOutOfRange(offset, self.start_offset, self.visible_end)
        if offset == self.visible_end:
            return MemoryChunk(b"", offset, offset)
        first = bisect_right(self._bases, offset) - 1
        last, size = first, 0
        while last < len(self._batches) and (last == first or size + len(self._batches[last]) <= max_bytes):
            size += len(self._batches[last])
            last += 1
        data = self._batches[first] if last == first + 1 else b"".join(self._batches[first:last])
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
            self.size_bytes -= sum(map(len, self._batches[:keep]))
            del self._bases[:keep]
            del self._batches[:keep]
        self.start_offset = max(self.start_offset, min(offset, self.visible_end))
