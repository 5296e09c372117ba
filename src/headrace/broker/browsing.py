"""Looking at messages without touching them: by offset, by time, by what is in them. Nobody's view moves."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from headrace.broker.aborts import NO_ABORTS, Aborts
from headrace.broker.partition import when_loaded
from headrace.broker.reading import committed
from headrace.broker.view import View
from headrace.errors import CorruptBatch, DecompressedTooLarge, OffsetOutOfRange
from headrace.record import codec
from headrace.record.types import Record

READ_BYTES = 256 * 1024
# One look goes through so much at most, since nobody else is served meanwhile; the answer says where to go on.
SCAN_RECORDS_MAX = 20_000
SCAN_BYTES_MAX = 64 << 20

READY, OUT, DONE = "ready", "unacked", "settled"


class Found(NamedTuple):
    records: list[Record]
    next_offset: int
    scanned: int


async def browse(
    log: Any,
    offset: int,
    *,
    limit: int,
    bytes_max: int,
    decompressed_bytes_max: int,
    wanted: Callable[[Record], bool] | None = None,
    aborted: Aborts = NO_ABORTS,
    scan_max: int = SCAN_RECORDS_MAX,
) -> Found:
    """Committed records from an offset on that are wanted; stops at the limit, the end, or after scanning enough.
    Others are served while the disk is read: what was wanted then may be somebody's by the end."""
    found: list[Record] = []
    size = scanned = looked = 0
    offset = max(offset, log.start_offset)
    end = log.stable_end
    while offset < end and len(found) < limit:
        try:
            chunk = await when_loaded(partial(log.read_now, offset, READ_BYTES))
        except OffsetOutOfRange as error:  # retention was faster
            if error.start <= offset:
                raise
            offset = error.start
            continue
        if chunk.next_offset <= offset:
            break
        upto = min(end, chunk.next_offset)
        for info in committed(chunk, aborted):
            try:
                records = codec.records(
                    chunk.data,
                    info.position,
                    info.end,
                    from_offset=offset,
                    to_offset=upto,
                    decompressed_bytes_max=decompressed_bytes_max,
                )
            except (CorruptBatch, DecompressedTooLarge):
                continue  # what cannot be decoded is not shown; reading the topic says why
            for record in records:
                scanned += 1
                bytes_ = len(record.value or b"") + len(record.key or b"")
                looked += bytes_
                if wanted is None or wanted(record):
                    found.append(record)
                    size += bytes_
                    if len(found) >= limit or size >= bytes_max:
                        return Found(found, record.offset + 1, scanned)
            if scanned >= scan_max or looked >= SCAN_BYTES_MAX:
                return Found(found, max(offset, min(upto, info.next_offset)), scanned)
        offset = upto
    return Found(found, offset, scanned)


def state_of(view: View, offset: int) -> str:
    """Where a message of a queue is: waiting, with a consumer, or done."""
    if offset in view.settled:
        return DONE
    if offset >= view.next or offset in view.returned:
        return READY
    return OUT


def contains(text: str) -> Callable[[Record], bool]:
    """Anywhere in key, value or the values of headers."""
    needle = text.encode()

    def fits(record: Record) -> bool:
        return (
            needle in (record.value or b"")
            or needle in (record.key or b"")
            or any(needle in (value or b"") for _, value in record.headers)
        )

    return fits


def has_key(key: str) -> Callable[[Record], bool]:
    wanted = key.encode()
    return lambda record: record.key == wanted
