"""A cache of recent reads: consumers at the end of a log read the same records within moments, and each read would
check them again. Used by the owner thread only."""

from collections import OrderedDict

from headrace.log.read.chunk import Chunk
from headrace.log.segments.segment import Segment

ENTRY_BYTES = 512  # overhead of an entry besides its records
ASKED_MAX = 32
SHARED_READS = 64
Key = tuple[Segment, int, int, int]  # segment, offset, stop offset, max bytes


class RecentReads:
    """An LRU bounded by bytes. A segment that is rewritten or truncated becomes another Segment, so entries never
    have to be invalidated.

    Nothing is kept until a read is repeated: for a single reader the allocator can then reuse one buffer, instead of
    cycling through the memory of the whole cache.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._chunks: OrderedDict[Key, Chunk] = OrderedDict()
        self._asked: dict[Key, None] = {}  # the last reads that were not kept, in order
        self._to_keep = 0  # reads to keep until one must be repeated again
        self.size_bytes = 0

    def get(self, key: Key) -> Chunk | None:
        chunk = self._chunks.get(key)
        if chunk is not None:
            self._chunks.move_to_end(key)
            self._to_keep = SHARED_READS
        return chunk

    def offer(self, key: Key, chunk: Chunk) -> None:
        """A chunk was read that was not in the cache."""
        if key in self._asked:
            self._to_keep = SHARED_READS
        elif self._to_keep == 0:
            self._asked[key] = None
            if len(self._asked) > ASKED_MAX:
                del self._asked[next(iter(self._asked))]
            return
        else:
            self._to_keep -= 1
        if self._to_keep == 0:
            self.clear()
        else:
            self._keep(key, chunk)

    def _keep(self, key: Key, chunk: Chunk) -> None:
        size = len(chunk.data) + ENTRY_BYTES
        if size > self._bytes_max or key in self._chunks:
            return
        self._chunks[key] = chunk
        self.size_bytes += size
        while self.size_bytes > self._bytes_max:
            _, gone = self._chunks.popitem(last=False)
            self.size_bytes -= len(gone.data) + ENTRY_BYTES

    def clear(self) -> None:
        self._chunks.clear()
        self._asked.clear()
        self.size_bytes = 0
