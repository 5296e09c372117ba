"""Access: the contract for reading records, from the files of a data folder or through a broker's HTTP listener.

An Access plans on the driver and reads on executors; it is pickled in between.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from headrace.errors import HeadraceError
from headrace.record.types import BatchInfo, Slice
from headrace.spark.offsets import Partition, Position

CHUNK_BYTES = 1 << 20


class DataLoss(HeadraceError):
    """Records to be read no longer exist. The option failOnDataLoss=false skips them."""


class State(NamedTuple):
    """The identity and the bounds of a partition's log at one moment."""

    log_id: int
    epoch: int
    start: int
    end: int  # where readers stop: the visible end, or the end of the committed records


class LeasedSegment(msgspec.Struct, frozen=True):
    """Offsets [segment, next_offset) are in this generation of a segment, on which the broker granted a lease."""

    segment: int
    generation: int
    next_offset: int


class Lease(Protocol):
    """Keeps the files of a plan from being deleted. Pickled together with its reader."""

    def release(self) -> None: ...


class ReadTask(msgspec.Struct, frozen=True):
    """The work of one Spark task: records [start, end) of a partition, and where they are stored, if known."""

    partition: Partition
    log_id: int
    start: int
    end: int
    slice: Slice | None = None
    link: str | None = None  # hard link to the file of the slice, which exists until the lease is released
    segments: tuple[LeasedSegment, ...] = ()  # leased at the broker, in order


class ChunkReader(Protocol):
    """Reads the bytes of consecutive batches in chunks.

    `read` returns the next bytes; the caller then calls `consume` with the size of the batches it has decoded, or
    `need_more` if the chunk does not contain one whole batch.
    """

    def read(self, offset: int) -> memoryview: ...
    def consume(self, size: int) -> None: ...
    def need_more(self, data: memoryview) -> None: ...
    def recover(self) -> bool:
        """Called when the first bytes are not a batch. True if reading again from another position may help."""
        ...

    def headers(self, start: int) -> Iterator[tuple[memoryview | bytes, BatchInfo]]: ...
    def close(self) -> None: ...


class Access(Protocol):
    def topics(self) -> Sequence[str]: ...
    def states(self, topics: Sequence[str]) -> dict[Partition, State]:
        """Cheap, because it is called at every trigger. The start may be outdated; `start` is exact."""
        ...

    def start(self, partition: Partition, state: State) -> int: ...
    def offset_for_timestamp(self, partition: Partition, state: State, timestamp_ms: int) -> int | None: ...
    def epoch_before(self, partition: Partition, state: State, offset: int) -> int | None: ...
    def size_between(self, partition: Partition, state: State, start: int, end: int) -> int: ...
    def estimate_size(self, partition: Partition, state: State, start: int, end: int) -> int:
        """Like size_between, but without reading an index."""
        ...

    def offset_after_bytes(self, partition: Partition, state: State, start: int, end: int, size: int) -> int:
        """The offset that is about `size` bytes after `start`, rounded up to a whole batch."""
        ...

    def tasks(self, partition: Partition, state: State, start: int, end: int, split_bytes: int) -> list[ReadTask]: ...
    def lease(self, tasks: Sequence[ReadTask], for_ms: int) -> tuple[list[ReadTask], Lease | None]:
        """Keeps the planned files readable until the lease is released or `for_ms` has passed.

        Returns the tasks with the places of the leased files, and None if no lease is possible. Raises SegmentGone if a
        segment no longer exists: the caller must plan again.
        """
        ...

    def warn_if_unprotected(self) -> None:
        """Logs a warning at load time if it is already clear that `lease` cannot protect the files."""
        ...

    def close(self) -> None:
        """Closes connections. The object may be used again."""
        ...

    def open_readers(self, task: ReadTask) -> Iterator[tuple[int, int, ChunkReader]]:
        """(start, end, reader) for consecutive ranges that make up the task. The caller closes each reader."""
        ...


def loss_reason(access: Access, partition: Partition, at: Position, state: State) -> str | None:
    """Why a stream cannot continue from a position without losing records; None if it can."""
    if at.log_id != state.log_id:
        return f"topic {partition.topic!r} was deleted and created again"
    if at.offset > state.end:
        return f"partition {partition.number} of {partition.topic!r} ends at {state.end}, before {at.offset}"
    start = access.start(partition, state)
    if at.offset < start:
        return f"partition {partition.number} of {partition.topic!r} starts at {start}; offset {at.offset} was deleted"
    if at.epoch != state.epoch:
        written = access.epoch_before(partition, state, at.offset)
        if written is not None and written > at.epoch >= 0:
            return (
                f"records before {at.offset} in partition {partition.number} of {partition.topic!r} were replaced "
                f"after an unclean stop (epoch {at.epoch}, now {written})"
            )
    return None
