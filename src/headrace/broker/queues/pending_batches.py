"""Records published to a view and not readable yet: batches being written, sealed, or in a round of the log."""

from collections.abc import Iterable

from headrace.broker.types.publish_tracker import CachedRoute
from headrace.record.codec import BatchWriter
from headrace.record.layout import COUNT_AT, RECORDS_AT

WRITER_CAPACITY = 4096
WRITER_KEPT = 256 * 1024  # larger writers are not pooled
WRITERS_POOLED = 64

_writers: list[BatchWriter] = []  # pool shared by all views


def record_count(batch: bytearray) -> int:
    return int.from_bytes(batch[COUNT_AT:RECORDS_AT], "big")


class PendingBatches:
    """Owned by one View, which opens the writer; emptied by the flush."""

    __slots__ = ("_compression", "_in_flight", "_sealed", "targets", "writer")

    def __init__(self, compression: int) -> None:
        self._compression = compression
        self.writer: BatchWriter | None = None
        self._sealed: list[bytearray] = []
        self.targets: list[CachedRoute] = []  # that have cached the writer and must open a new one after the flush
        self._in_flight = 0  # records that a round of the log is storing

    @property
    def size_bytes(self) -> int:
        """Bytes that wait for a flush."""
        size = self.writer.size if self.writer is not None else 0
        return size + sum(map(len, self._sealed))

    @property
    def records(self) -> int:
        """Records that wait for a flush or are being stored."""
        waiting = self.writer.count if self.writer is not None else 0
        return waiting + sum(map(record_count, self._sealed)) + self._in_flight

    def new_writer(self) -> BatchWriter:
        writer = self.writer = _writers.pop() if _writers else BatchWriter(0, WRITER_CAPACITY)
        return writer

    def seal(self) -> None:
        """Finish the current batch; the same writer continues with the next one."""
        if self.writer is not None and self.writer.count:
            self._sealed.append(self.writer.finish(self._compression))

    def take(self) -> list[bytearray]:
        """All batches that wait for a flush; publishers must open writers again after this."""
        batches, self._sealed = self._sealed, []
        writer, self.writer = self.writer, None
        for target in self.targets:
            target.reset()
        self.targets.clear()
        if writer is not None:
            is_large = writer.size > WRITER_KEPT
            if writer.count:
                batches.append(writer.finish(self._compression))
            if len(_writers) < WRITERS_POOLED and not is_large:
                _writers.append(writer)
        return batches

    def mark_in_flight(self, batches: Iterable[bytearray]) -> int:
        """A round has these batches; returns their record count, to be passed to `round_ended`."""
        count = sum(map(record_count, batches))
        self._in_flight += count
        return count

    def round_ended(self, count: int) -> None:
        """The records are readable now, or were refused."""
        self._in_flight -= count
