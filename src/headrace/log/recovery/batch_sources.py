"""Where recovery finds the batches of one log: in its files, as far as they are whole, and in the journal."""

from bisect import bisect_right
from collections.abc import Iterator, Mapping

from headrace.log.commit.journal_entry import ReplayedPart
from headrace.log.disk.file_cache import FileCache
from headrace.log.segments import epochs
from headrace.log.segments.epochs import Epochs
from headrace.record import codec

READ_BYTES = 4 << 20


class Sources:
    def __init__(
        self, files: FileCache, parts: Mapping[int, ReplayedPart], batch_bytes_max: int, known: Epochs, last_epoch: int
    ) -> None:
        self._files = files
        self._epochs = known
        self._last_epoch = last_epoch  # of those who have written here
        self._parts = parts
        self._bases = sorted(parts)
        self._batch_bytes_max = batch_bytes_max

    def whole(self, path: str, position: int, size: int, expected: int, end: int | None = None) -> Iterator[memoryview]:
        """Runs of whole batches in offset order, from position up to the first that is not, or up to end. With
        `expected` -1 they need not follow each other without a gap.

        What was not synced may be torn at any byte, in its epoch, too, which no checksum covers: one that is lower
        than the one before it, or that nobody has had, is not what was written. The journal has it, or nobody was
        told that it is there."""
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
                    size = position + sound  # nothing behind it counts
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
        """The batches of the journal's part that holds offset, from there on: the segment may have some of them. The
        start of a log may lie inside a batch, anything later may not."""
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
