"""The port to a log for all code above it: offsets, epoch, size, reading, appending, waiting.

Listeners see logs only through `Partition`; tests/test_architecture.py enforces that. Inside the broker, code that
works with the log layer (groups of changes, retention, views) uses `Partition.log`.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

from headrace.errors import CorruptLog
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
    """Return `read()`, repeated after each ReadWaits until everything it needs is in memory.

    The event loop serves others while the disk is read.
    """
    while True:
        try:
            return read()
        except ReadWaits as cold:
            loaded = asyncio.Event()
            cold.then(loaded.set)
            await loaded.wait()


class Cancellable(Protocol):
    def cancel(self) -> None: ...


class Append(Protocol):
    def __call__(self, batch: bytearray | memoryview, infos: Sequence[BatchInfo] | None = None) -> Ticket:
        """Stage whole batches; the ticket resolves once they are durable."""


class Partition:
    """One partition of a stream, or the log of one priority level of a queue.

    `append` is the log's bound method, so that producing pays for no call in between.
    """

    __slots__ = ("append", "log", "number")

    def __init__(self, number: int, log: Log) -> None:
        self.number = number
        self.log = log
        self.append: Append = log.append

    # Facts.

    @property
    def log_id(self) -> int:
        """Identifies the log for ever: ids are not reused, unlike topic names."""
        return self.log.id

    @property
    def epoch(self) -> int:
        """The leader epoch; each start of the broker begins a new one."""
        return self.log.epoch

    @property
    def settings(self) -> StreamSettings:
        return self.log.settings

    @property
    def start_offset(self) -> int:
        return self.log.start_offset

    @property
    def end_offset(self) -> int:
        """Where readers of uncommitted messages stop (Kafka's high watermark)."""
        return self.log.visible_end

    @property
    def durable_end(self) -> int:
        """The first offset that a power failure could still lose."""
        return self.log.durable_end

    @property
    def stable_end(self) -> int:
        """Where readers of committed messages stop (Kafka's last stable offset)."""
        return self.log.stable_end

    @property
    def is_durable(self) -> bool:
        """False for the log of a transient queue, which is in memory and knows no timestamps."""
        return isinstance(self.log, Log)

    @property
    def size_bytes(self) -> int:
        return self.log.size_bytes

    @property
    def segment_count(self) -> int:
        return len(getattr(self.log, "segments", ()))  # a log in memory has none

    @property
    def archived_sizes(self) -> list[int]:
        """The file sizes of the segments in the tier."""
        return [segment.stored_bytes for segment in self.log.segments if segment.is_archived]

    @property
    def max_timestamp(self) -> int:
        return self.log.max_timestamp

    @property
    def compaction_pin(self) -> int | None:
        """The offset that compaction stops before, because a cursor or a queue still needs what follows."""
        return self.log.compaction_pin

    @property
    def damage(self) -> CorruptLog | None:
        """The damage that recovery found; nothing behind it is served. A log in memory has none."""
        return getattr(self.log, "damage", None)

    def epoch_end(self, epoch: int) -> tuple[int, int]:
        """(the largest epoch not above the given one, the offset where it ended)."""
        return self.log.epoch_end(epoch)

    # Reading. `read` blocks for the disk; methods that end in `_now` raise ReadWaits when data is not in memory.

    def read(self, offset: int, max_bytes: int = READ_BYTES) -> Chunk:
        return self.log.read(offset, max_bytes)

    def read_now(self, offset: int, max_bytes: int = READ_BYTES, *, end: int | None = None) -> Chunk:
        """Whole batches from the one that holds `offset`, up to about `max_bytes`, but at least one."""
        if end is None:
            return self.log.read_now(offset, max_bytes)  # a log in memory has no such argument
        return self.log.read_now(offset, max_bytes, end=end)

    def file_range_now(self, offset: int, max_bytes: int = READ_BYTES, *, end: int | None = None) -> FileRange | None:
        """The batches as a range of their file, for sendfile; None when they should be read instead."""
        return self.log.file_range_now(offset, max_bytes, end=end)

    def read_planned_now(self, segment: int, generation: int, offset: int, max_bytes: int = READ_BYTES) -> Chunk:
        """Like `read_now`, but from the generation of a segment that a bulk reader planned on."""
        return self.log.read_planned_now(segment, generation, offset, max_bytes)

    def next_readable_now(self, offset: int) -> int:
        """The first readable offset after damage at `offset`, or the end."""
        return self.log.next_readable_now(offset)

    def offset_for_timestamp_now(self, timestamp_ms: int, start: int = 0) -> tuple[int, int] | None:
        """(offset, timestamp) of the first record at or after a time and at or after offset `start`."""
        return self.log.offset_for_timestamp_now(timestamp_ms, start)

    async def offset_at(self, timestamp_ms: int) -> int:
        """The first offset at or after a time; the end when every record is older."""
        found = await when_loaded(lambda: self.offset_for_timestamp_now(timestamp_ms))
        return self.end_offset if found is None else found[0]

    def wait(self, offset: int, callback: Callable[[], object], *, committed: bool = True) -> Cancellable:
        """Call back once `offset` can be read, or the log was closed. With `committed=False` messages of open
        transactions count."""
        if committed:
            return self.log.wait(offset, callback)  # a log in memory has no transactions, and no such argument
        return self.log.wait(offset, callback, committed=False)

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


__all__ = ["PART_BYTES_MIN", "Chunk", "FileRange", "Partition", "ReadWaits", "Readable", "when_loaded"]
