"""Iterating over the batches of a whole segment, for maintenance, archiving and inspection."""

from collections.abc import Iterator

from headrace.errors import CorruptBatch, CorruptLog
from headrace.log.disk.file_cache import FileCache
from headrace.log.segments.segment import Segment
from headrace.record import codec
from headrace.record.types import BatchInfo

READ_BYTES = 4 << 20


def batches(files: FileCache, segment: Segment) -> Iterator[tuple[memoryview, BatchInfo]]:
    """Every batch of a sealed segment, with its checksum verified. CorruptLog at the first damaged batch."""
    position, want = 0, READ_BYTES
    while position < segment.size:
        size = min(want, segment.size - position)
        data = memoryview(segment.source.read(files, segment, size, position))
        try:
            infos = codec.scan(data)
        except CorruptBatch as error:
            raise CorruptLog(segment.path(), position + (error.position or 0), error.reason) from error
        if not infos:
            need = 12 + int.from_bytes(data[8:12], "big")
            if need <= len(data) or need > segment.size - position:
                raise CorruptLog(segment.path(), position, "a batch is cut short")
            want = need
            continue
        for info in infos:
            yield data, info
        position += infos[-1].position + infos[-1].size
        want = READ_BYTES
