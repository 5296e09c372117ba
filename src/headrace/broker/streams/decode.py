"""Decodes stored batches into records: small ones at once, and those that decompress to much in a thread.

A few kilobytes may decompress to many megabytes, and a record may be that large. There is one thread, so only one large
batch is decompressed in memory at a time, and a batch that takes more than the broker's limit is not decoded at all.
The thread copies without the GIL and gives it away regularly: the event loop runs meanwhile.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from headrace.errors import DecompressedTooLarge
from headrace.log.read.cold_reads import Loader
from headrace.record import codec
from headrace.record.compression.codecs import estimate
from headrace.record.layout import DECOMPRESSED_BYTES_MAX, HEADER_BYTES
from headrace.record.types import BatchInfo, Buffer, Record

INLINE_BYTES_MAX = 256 * 1024  # decompressed and copied on the event loop at most, which takes less than a millisecond
MEMORY_PART = 4  # one batch may take one part in 4 of the memory limit

T = TypeVar("T")


class Decoded(NamedTuple):
    records: list[Record]
    next_offset: int  # where the batch continues, or its end
    size: int  # of the records in bytes


def estimated_bytes(data: Buffer, info: BatchInfo) -> int:
    """About how many bytes the batch takes when it is decompressed."""
    if not info.codec:
        return info.size
    return estimate(info.codec, memoryview(data)[info.position + HEADER_BYTES : info.end])


def is_small(data: Buffer, info: BatchInfo) -> bool:
    """Whether the batch may be decoded on the event loop, by the size that it declares."""
    return info.size <= INLINE_BYTES_MAX and estimated_bytes(data, info) <= INLINE_BYTES_MAX


class Decoder:
    """Used on the event-loop thread. `bytes_max` is the largest decompressed batch that is decoded."""

    def __init__(self, loader: Loader, *, accepted_bytes_max: int, memory_bytes: int) -> None:
        self.loader = loader.alone
        # Older data folders hold larger batches than are accepted now.
        self.bytes_max = max(accepted_bytes_max, min(DECOMPRESSED_BYTES_MAX, memory_bytes // MEMORY_PART))

    async def records(self, data: Buffer, info: BatchInfo, **bounds: Any) -> Decoded:
        """Like codec.records_of, whose arguments are the bounds."""
        if is_small(data, info):
            try:
                found = codec.records_of(data, info.position, decompressed_bytes_max=INLINE_BYTES_MAX, **bounds)
                return Decoded(*found)
            except DecompressedTooLarge:
                pass  # it holds more than it declares
        job = partial(
            codec.records_of, data, info.position, decompressed_bytes_max=self.bytes_max, in_thread=True, **bounds
        )
        return Decoded(*await self.run(job))

    async def run(self, job: Callable[[], T]) -> T:
        """The result of a job that needs much memory, run in the thread when it is its turn."""
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def unless_cancelled() -> T | None:
            return None if done.cancelled() else job()

        def report(result: Any, error: BaseException | None) -> None:
            if done.done():
                return
            if error is None:
                done.set_result(result)
            else:
                done.set_exception(error)

        self.loader.submit(unless_cancelled, report)
        return await done
