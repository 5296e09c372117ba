"""Reads single messages out of batches, and leaves out those of aborted transactions.

Used by the HTTP listener, the key index, the schema registry, and queue views.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from headrace.broker.cooperative import YieldEvery
from headrace.broker.streams.decode import Decoder, estimated_bytes
from headrace.broker.streams.partition import Partition, ReadWaits, when_loaded
from headrace.broker.types.aborted_ranges import Aborted, Aborts
from headrace.errors import (
    CorruptBatch,
    CorruptLog,
    DecompressedTooLarge,
    OffsetOutOfRange,
    RecordTooLarge,
    UnreadableBatch,
)
from headrace.log.read.chunk import Chunk
from headrace.record import codec
from headrace.record.batch.recompress import recompress
from headrace.record.layout import ATTRIBUTES_AT, CODEC_MASK, NONE
from headrace.record.types import BatchInfo, Record

STEP_BYTES = 64 * 1024  # of the first read: most pages are small
UNLIMITED = 1 << 62


class Page(NamedTuple):
    records: list[Record]
    next_offset: int  # where the next page starts; past skipped offsets (control records, compacted records)


class PageReader:
    """Reads pages of committed messages, waiting for the disk and for large batches without blocking the event loop."""

    def __init__(self, aborted: Callable[[int], Aborts], decoder: Decoder) -> None:
        self._aborted = aborted  # by log id
        self.decoder = decoder

    async def read(
        self,
        stream: str,
        partition: Partition,
        offset: int,
        *,
        limit: int,
        bytes_max: int,
        record_bytes_max: int = UNLIMITED,
    ) -> Page:
        """Committed messages from an offset on: at most `limit`, about `bytes_max`, at least one if there is any.

        Raises CorruptLog or UnreadableBatch when the first is damaged, and RecordTooLarge when it takes more than
        record_bytes_max, or its batch more than the broker decodes."""
        records: list[Record] = []
        left, step, end, turns = bytes_max, min(STEP_BYTES, bytes_max), partition.stable_end, YieldEvery()
        while len(records) < limit and left > 0:
            read = partial(partition.read_now, offset, step, end=end)
            try:
                chunk = read() if records else await when_loaded(read)
            except (ReadWaits, CorruptLog, OffsetOutOfRange):
                if records:
                    break  # return these first
                raise
            if chunk.next_offset <= offset:
                break
            for info in committed(chunk, self._aborted(partition.log_id)):
                try:
                    found = await self.decoder.records(
                        chunk.data,
                        info,
                        from_offset=offset,
                        to_offset=end,
                        limit=limit - len(records),
                        bytes_max=left,
                        record_bytes_max=min(record_bytes_max, left) if records else record_bytes_max,
                    )
                except RecordTooLarge as error:
                    if records:
                        return Page(records, error.offset)  # return these first; the next page raises
                    raise error.explained(partition=partition.number) from None
                except (CorruptBatch, DecompressedTooLarge) as error:
                    bad = max(offset, info.base_offset)
                    if records:
                        return Page(records, bad)
                    raise self._unreadable(stream, partition, chunk, info, bad, error) from error
                records += found.records
                left -= found.size
                if found.next_offset < min(info.next_offset, end) or len(records) >= limit or left <= 0:
                    return Page(records, found.next_offset)
                await turns.maybe_yield()
            offset = chunk.next_offset
            step = bytes_max
        return Page(records, offset)

    def _unreadable(
        self, stream: str, partition: Partition, chunk: Chunk, info: BatchInfo, offset: int, error: Exception
    ) -> Exception:
        if isinstance(error, DecompressedTooLarge):
            limit = self.decoder.bytes_max
            size = max(estimated_bytes(chunk.data, info), limit + 1)
            return RecordTooLarge(
                offset, size, limit, partition=partition.number, form="decompressed", next_offset=info.next_offset
            )
        return UnreadableBatch(stream, partition.number, offset, info.next_offset, str(error))


def committed(chunk: Chunk, aborted: Aborts) -> list[BatchInfo]:
    """The batches without those of aborted transactions. Decode them one at a time and only as far as needed: a few
    kilobytes of them may decompress to gigabytes."""
    infos, near = codec.scan(chunk.data, verify_crc=False), _aborted_in(chunk, aborted)
    return [info for info in infos if not _is_aborted(info, near)] if near else infos


def aborted_batches(chunk: Chunk, aborted: Aborts) -> list[BatchInfo]:
    near = _aborted_in(chunk, aborted)
    return [info for info in codec.scan(chunk.data, verify_crc=False) if _is_aborted(info, near)] if near else []


def _aborted_in(chunk: Chunk, aborted: Aborts) -> list[Aborted]:
    return aborted.between(chunk.base_offset, chunk.next_offset)


def without_aborted(chunk: Chunk, aborted: Aborts) -> Chunk:
    """The chunk without the batches of aborted transactions.

    If any batch is left, the chunk ends behind the last one: readers advance as far as the data goes, and find the
    rest empty when they continue."""
    if not _aborted_in(chunk, aborted):
        return chunk
    infos = [info for info in committed(chunk, aborted) if info.base_offset < chunk.next_offset]
    data = memoryview(chunk.data)
    next_offset = infos[-1].next_offset if infos else chunk.next_offset
    return chunk._replace(data=b"".join(data[info.position : info.end] for info in infos), next_offset=next_offset)


def with_batch_decompressed(chunk: Chunk, offset: int, bytes_max: int) -> Chunk:
    """The chunk; or, if the batch with this offset is compressed, that batch alone, decompressed.

    Raises DecompressedTooLarge if that takes more than bytes_max."""
    first, end, _ = codec.trim(chunk.data, 0, None, offset, offset + 1, verify_crc=False)
    if first == end or not chunk.data[first + ATTRIBUTES_AT + 1] & CODEC_MASK:
        return chunk
    [info] = codec.scan(chunk.data, first, end, verify_crc=False)
    data = recompress(memoryview(chunk.data), info, NONE, decompressed_bytes_max=bytes_max)
    return chunk._replace(data=data, base_offset=info.base_offset, next_offset=min(info.next_offset, chunk.next_offset))


def _is_aborted(info: BatchInfo, aborted: Sequence[Aborted]) -> bool:
    return info.is_transactional and any(
        one.producer_id == info.producer_id and one.first_offset <= info.base_offset < one.last_offset
        for one in aborted
    )
