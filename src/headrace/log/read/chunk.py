"""The result of a read."""

from typing import NamedTuple


class Chunk(NamedTuple):
    data: bytes | memoryview  # whole batches
    base_offset: int
    next_offset: int  # where to continue reading
    position: int = 0  # of the first batch in its segment
