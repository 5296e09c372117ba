"""The messages that one flush takes from one view, from the first publish until the log has stored or refused them."""

from typing import Protocol

from headrace.errors import HeadraceError
from headrace.log.commit.round import Ticket
from headrace.record.codec import BatchWriter
from headrace.record.layout import COUNT_AT, RECORDS_AT

WRITER_CAPACITY = 4096
WRITER_KEPT = 256 * 1024  # larger writers are not pooled
WRITERS_POOLED = 64


_writers: list[BatchWriter] = []  # pool shared by all views


class CachedRoute(Protocol):
    """A publisher's route that caches the writers of its queues (wire.amqp.scan.CachedRoute)."""

    def reset(self) -> None:
        """Forget the writers: the next publish opens a batch again."""


def record_count(data: bytearray) -> int:
    return int.from_bytes(data[COUNT_AT:RECORDS_AT], "big")


class PublishBatch:
    """Opened by a View, closed and staged by the flush. A publisher keeps the batches that its publishes went to: when
    the flush has ended, `error` says whether they were stored. A large one consists of several buffers."""

    __slots__ = ("_compression", "buffers", "durable", "error", "targets", "tickets", "writer")

    def __init__(self, compression: int, *, durable: bool) -> None:
        self.durable = durable
        self._compression = compression
        self.writer = _writers.pop() if _writers else BatchWriter(0, WRITER_CAPACITY)
        self.buffers: list[bytearray] = []
        self.targets: list[CachedRoute] = []  # that have cached the writer, and must open a new batch after this one
        self.tickets: list[Ticket | None] = []  # of the buffers; None if the log refused the buffer at once
        self.error: HeadraceError | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes that wait for a flush."""
        return self.writer.size + sum(map(len, self.buffers))

    @property
    def open_records(self) -> int:
        """Records that wait for a flush."""
        return self.writer.count + sum(map(record_count, self.buffers))

    @property
    def unstored_records(self) -> int:
        """Records of a closed batch that are neither readable nor refused yet."""
        unstaged = self.buffers[len(self.tickets) :]
        staged = zip(self.buffers, self.tickets, strict=False)
        unresolved = [data for data, ticket in staged if ticket is not None and not ticket.done]
        return sum(map(record_count, unstaged + unresolved))

    def first_error(self) -> HeadraceError | None:
        """The first error of its tickets, when they are resolved, or of the buffer that was refused at once."""
        errors = (ticket.error for ticket in self.tickets if ticket is not None)
        return self.error or next(filter(None, errors), None)

    def release(self) -> None:
        """The flush has ended. A publisher may keep the batch for its outcome, but not the messages."""
        self.buffers.clear()
        self.tickets.clear()

    def seal(self) -> None:
        """Finish a buffer; the same writer continues with the next one."""
        if self.writer.count:
            self.buffers.append(self.writer.finish(self._compression))

    def close(self) -> None:
        """Finish the last buffer. Publishers must open a new batch after this."""
        for target in self.targets:
            target.reset()
        self.targets.clear()
        writer = self.writer
        del self.writer  # goes back to the pool: must not be used any more
        is_large = writer.size > WRITER_KEPT
        if writer.count:
            self.buffers.append(writer.finish(self._compression))
        if len(_writers) < WRITERS_POOLED and not is_large:
            _writers.append(writer)
