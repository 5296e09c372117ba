"""Where records are read from. Two ways, one contract: the files of a data folder, or a broker's HTTP listener.

An Access is used on the driver to plan and on executors to read; it is pickled in between.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import msgspec

from headrace.errors import HeadraceError
from headrace.record.types import BatchInfo, Slice
from headrace.spark.offsets import Partition, Position

CHUNK_BYTES = 1 << 20


class DataLoss(HeadraceError):
    """Records that were to be read are gone. Option failOnDataLoss=false skips them."""


class State(NamedTuple):
    """What a log holds right now."""

    log_id: int
    epoch: int
    start: int
    end: int  # where readers stop: the visible end, or the end of what is committed


class Held(msgspec.Struct, frozen=True):
    """Offsets [segment, next_offset) lie in this generation of a segment, which the broker holds."""

    segment: int
    generation: int
    next_offset: int


class Hold(Protocol):
    """What keeps the files of a batch. It is pickled with the reader it belongs to."""

    def release(self) -> None: ...


class Piece(msgspec.Struct, frozen=True):
    """One task's work: records [start, end) of a partition, and where they lie if that is known."""

    place: Partition
    log_id: int
    start: int
    end: int
    slice: Slice | None = None
    held: str | None = None  # another name of the slice's file, which stays until the batch is done
    segments: tuple[Held, ...] = ()  # where a broker has them, in order


class Feed(Protocol):
    """Bytes of whole batches, front to back. `read` gives what comes next, `used` says how much of it was."""

    def read(self, offset: int) -> memoryview: ...
    def used(self, size: int) -> None: ...
    def need_more(self, data: memoryview) -> None: ...
    def recover(self) -> bool:
        """The bytes make no sense from the first one on: True if it is worth reading again from elsewhere."""
        ...

    def headers(self, start: int) -> Iterator[tuple[memoryview | bytes, BatchInfo]]: ...
    def close(self) -> None: ...


class Access(Protocol):
    def topics(self) -> Sequence[str]: ...
    def states(self, topics: Sequence[str]) -> dict[Partition, State]:
        """Cheap: called at every trigger. The start may be a little old; `start` is exact."""
        ...

    def start(self, place: Partition, state: State) -> int: ...
    def offset_for_timestamp(self, place: Partition, state: State, timestamp_ms: int) -> int | None: ...
    def epoch_before(self, place: Partition, state: State, offset: int) -> int | None: ...
    def size_between(self, place: Partition, state: State, start: int, end: int) -> int: ...
    def rough_size(self, place: Partition, state: State, start: int, end: int) -> int:
        """As size_between, as far as it can be told without looking at an index."""
        ...

    def reach(self, place: Partition, state: State, start: int, end: int, size: int) -> int:
        """The offset that about so many bytes lead to: a batch more rather than half of one."""
        ...

    def pieces(self, place: Partition, state: State, start: int, end: int, split_bytes: int) -> list[Piece]: ...
    def hold(self, pieces: Sequence[Piece], for_ms: int) -> tuple[list[Piece], Hold | None]:
        """See to it that what was planned can be read until it is released or its time is over.

        None where nothing could be done about it; SegmentGone when a piece is not there any more: plan again."""
        ...

    def warn_unless_held(self) -> None:
        """Say at load what is plain already: that `hold` will be able to do nothing."""
        ...

    def close(self) -> None:
        """Whoever is connected is no longer. It may be used again."""
        ...

    def feeds(self, piece: Piece) -> Iterator[tuple[int, int, Feed]]:
        """(start, end, feed) that together give the piece, in order. A feed is closed by whoever took it."""
        ...


def lost(access: Access, place: Partition, at: Position, state: State) -> str | None:
    """Why reading cannot go on from a position; None when it can."""
    if at.log_id != state.log_id:
        return f"topic {place.topic!r} was deleted and made anew"
    if at.offset > state.end:
        return f"partition {place.number} of {place.topic!r} ends at {state.end}, {at.offset} had been reached"
    start = access.start(place, state)
    if at.offset < start:
        return f"partition {place.number} of {place.topic!r} begins at {start}, {at.offset} is gone"
    if at.epoch != state.epoch:
        written = access.epoch_before(place, state, at.offset)
        if written is not None and written > at.epoch >= 0:
            return (
                f"records before {at.offset} in partition {place.number} of {place.topic!r} were replaced after "
                f"an unclean stop (epoch {at.epoch}, now {written})"
            )
    return None
