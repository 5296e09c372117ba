"""A cache of index files, shared by all logs of a shard."""

from collections import OrderedDict
from collections.abc import Callable

from headrace.log.disk import paths
from headrace.log.disk.file_cache import FileCache
from headrace.log.segments.segment import Segment

Read = Callable[[str, int, int], bytes]  # path, size, position


class IndexCache:
    """Index files in memory, bounded by bytes; the one loaded first is evicted first. Used by the owner thread only."""

    def __init__(self, files: FileCache, bytes_max: int) -> None:
        self._files = files
        self._bytes_max = bytes_max
        self._bytes = 0
        self._segments: OrderedDict[Segment, int] = OrderedDict()

    def load(self, segment: Segment, read: Read) -> bytes:
        path = segment.path(paths.INDEX)
        # Take both before the file is read: the worker may append and seal at any moment.
        covered, is_whole = segment.size, segment.is_sealed
        data = read(path, self._files.size(path), 0) if self._files.disk.exists(path) else b""
        self.keep(segment, data, covered, is_whole=is_whole)
        return data

    def keep(self, segment: Segment, data: bytes, covered: int, *, is_whole: bool) -> None:
        self.drop(segment)
        segment.index, segment.index_size, segment.index_is_whole = data, covered, is_whole
        self._segments[segment] = len(data)
        self._bytes += len(data)
        while self._bytes > self._bytes_max and len(self._segments) > 1:
            self.drop(next(iter(self._segments)))

    def drop(self, segment: Segment) -> None:
        segment.index = None
        self._bytes -= self._segments.pop(segment, 0)

    @property
    def size_bytes(self) -> int:
        return self._bytes

    def clear(self) -> None:
        while self._segments:
            self.drop(next(iter(self._segments)))
