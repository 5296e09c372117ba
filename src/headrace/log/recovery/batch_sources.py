"""The batches of one log that recovery can use: those of its files, up to the first damaged one, and the journal's."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping

from headrace.log.commit.journal_entry import ReplayedPart
from headrace.log.disk.file_cache import FileCache
from headrace.log.segments import epochs
from headrace.log.segments.epochs import Epochs
from headrace.record import codec

READ_BYTES = 4 << 20


class BatchSources:
    def __init__(
        self, files: FileCache, parts: Mapping[int, ReplayedPart], batch_bytes_max: int, known: Epochs, last_epoch: int
    ) -> None:
        self._files = files
        self._epochs = known
        self._last_epoch = last_epoch  # the highest epoch in which the log can have been written
        self._parts = parts
        self._bases = sorted(parts)
        self._batch_bytes_max = batch_bytes_max

    def whole(self, path: str, position: int, size: int, expected: int, end: int | None = None) -> Iterator[memoryview]:
        """Complete batches in offset order, from a position up to the first damaged one, or up to the offset `end`.
        With `expected` -1 offsets may have gaps.

        Unsynced bytes may be torn anywhere, even in a batch's epoch, which no checksum covers: an epoch that is lower
        than that of the batch before, or higher than any the broker has had, is damage. Such a batch is in the
        journal, or it was never confirmed."""
        want = READ_BYTES
        epoch = epochs.at(self._epochs, expected)
        while position < size:
            data = memoryview(self._files.read(path, min(want, size - position), position))
            stop, next_offset, _records, _timestamp, _reason = codec.valid_until(
                data, 0, len(data), expected, dense=expected >= 0
            )
            if expected >= 0:
                sound, after, epoch = codec.epochs_until(data, stop, epoch, self._last_epoch)
                if sound < stop:
                    size = position + sound  # ignore everything behind it
                    stop, next_offset = sound, after if sound else expected
            if end is not None and next_offset > end:
                stop = _position_of(data, stop, end)
                next_offset = end
            if stop:
                yield data[:stop]
            if end is not None and next_offset >= end:
                return
            if stop == 0:
                need = _declared_size(data)
                if need is None or need <= len(data) or need > min(size - position, self._batch_bytes_max):
                    return
                want = need
                continue
            want = READ_BYTES
            position += stop
            if expected >= 0:
                expected = next_offset

    def replayed(self, offset: int, end: int | None = None, *, may_begin_inside: bool) -> memoryview | None:
        """The batches of the journal's part that holds an offset, from that offset on. Only at the start of a log may
        the offset lie inside a batch."""
        at = bisect_right(self._bases, offset) - 1
        part = self._parts[self._bases[at]] if at >= 0 else None
        if part is None or part.next_offset <= offset:
            return None
        batches = bytearray(part.data)
        codec.patch_run(batches, 0, len(batches), part.base_offset, part.epoch)
        if part.base_offset == offset and (end is None or part.next_offset <= end):
            return memoryview(batches)
        wanted = [
            info
            for info in codec.scan(batches, verify_crc=False)
            if offset < info.next_offset and (end is None or info.next_offset <= end)
        ]
        if not wanted or (wanted[0].base_offset != offset and not may_begin_inside):
            return None
        return memoryview(batches)[wanted[0].position : wanted[-1].end]

    def replayed_past(self, offset: int) -> list[bytes | bytearray | memoryview]:
        return [part.data for _, part in sorted(self._parts.items()) if part.next_offset > offset]


def _position_of(data: memoryview, stop: int, end: int) -> int:
    for info in codec.scan(data, 0, stop, verify_crc=False):
        if info.base_offset >= end:
            return info.position
    return stop


def _declared_size(data: memoryview) -> int | None:
    if len(data) < 12:
        return None
    return 12 + int.from_bytes(data[8:12], "big", signed=True)
