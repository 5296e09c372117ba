"""One partition of a stream: what listeners see of a log."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from headrace.log.commit.round import Ticket
from headrace.log.log import Log
from headrace.log.read.cold_reads import ReadWaits
from headrace.log.read.file_range import FileRange
from headrace.log.read.reader import PART_BYTES_MIN, Chunk
from headrace.log.settings import StreamSettings
from headrace.record.types import BatchInfo

READ_BYTES = 1 << 20

T = TypeVar("T")


async def when_loaded(read: Callable[[], T]) -> T:
    """What `read` returns, as soon as all it needs is in memory: others are served while the disk is read."""
    while True:
        try:
            return read()
        except ReadWaits as cold:
            loaded = asyncio.Event()
            cold.then(loaded.set)
            await loaded.wait()


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class Partition:
    __slots__ = ("log", "number")

    def __init__(self, number: int, log: Log) -> None:
        self.number = number
        self.log = log

    @property
    def start_offset(self) -> int:
        return self.log.start_offset

    @property
    def end_offset(self) -> int:
        """Where readers stop."""
        return self.log.visible_end

    @property
    def durable_end(self) -> int:
        """The first offset that a power cut could still take back."""
        return self.log.durable_end

    @property
    def stable_end(self) -> int:
        """Where readers of committed messages stop."""
        return self.log.stable_end

    def append(self, batch: bytearray | memoryview, infos: Sequence[BatchInfo] | None = None) -> Ticket:
        return self.log.append(batch, infos)

    def read_now(self, offset: int, max_bytes: int = READ_BYTES, *, end: int | None = None) -> Chunk:
        """ReadWaits when it is not in memory."""
        return self.log.read_now(offset, max_bytes, end=end)

    def part_now(self, offset: int, max_bytes: int = READ_BYTES, *, end: int | None = None) -> FileRange | None:
        """Where they lie in their file, for those who send them on as they are; None when they are better read."""
        return self.log.part_now(offset, max_bytes, end=end)

    def read_planned_now(self, segment: int, generation: int, offset: int, max_bytes: int = READ_BYTES) -> Chunk:
        """Of the generation of a segment that a reader planned on. ReadWaits when it is not in memory."""
        return self.log.read_planned_now(segment, generation, offset, max_bytes)

    async def offset_at(self, timestamp_ms: int) -> int:
        """The first offset at or after a time; the end when everything is older."""
        found = await when_loaded(lambda: self.log.offset_for_timestamp_now(timestamp_ms))
        return self.end_offset if found is None else found[0]

    def wait(self, offset: int, callback: Callable[[], object], *, committed: bool = True) -> Cancellable:
        return self.log.wait(offset, callback, committed=committed)

    def configure(self, settings: StreamSettings) -> None:
        self.log.settings = self.log.tail.settings = settings


class Readable:
    """A future that is done once any of several partitions has something to read, or was deleted."""

    def __init__(self, wanted: Iterable[tuple[Partition, int]]) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters = [partition.wait(offset, self._wake) for partition, offset in wanted]

    def _wake(self) -> None:
        if not self.future.done():
            self.future.set_result(None)

    def cancel(self) -> None:
        for waiter in self._waiters:
            waiter.cancel()
        self.future.cancel()


__all__ = ["PART_BYTES_MIN", "FileRange", "Partition", "ReadWaits", "Readable", "when_loaded"]
