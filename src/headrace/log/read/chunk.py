"""The result of a read."""

from typing import NamedTuple

from headrace.record.types import Buffer


class Chunk(NamedTuple):
    data: Buffer  # whole batches
    base_offset: int
    next_offset: int  # where to continue reading
    position: int = 0  # of the first batch in its segment
