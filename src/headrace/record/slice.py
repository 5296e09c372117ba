"""A slice: where a run of whole batches lies, without saying which file or machine holds it."""

import msgspec


class Slice(msgspec.Struct, frozen=True, gc=False):
    """Handed out by reads and opened by whoever needs the bytes; it pickles, so that Spark executors can.

    The generation tells a rewritten segment (compaction) from the one the slice was cut on: positions in
    one mean nothing in the other.
    """

    log_id: int
    segment: int  # the segment's base offset
    generation: int
    position: int
    length: int
    base_offset: int
    next_offset: int

    @property
    def end(self) -> int:
        return self.position + self.length
