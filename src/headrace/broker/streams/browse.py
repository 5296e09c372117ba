"""Browsing: finds messages by offset, time or content without consuming them. No view or cursor moves."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple, Protocol

from headrace.broker.cooperative import YieldEvery
from headrace.broker.streams.decode import INLINE_BYTES_MAX, Decoded, Decoder
from headrace.broker.streams.partition import Partition, when_loaded
from headrace.broker.streams.read import committed
from headrace.broker.types.aborted_ranges import NO_ABORTS, Aborts
from headrace.broker.types.range_set import RangeSet
from headrace.errors import CorruptBatch, CorruptLog, DecompressedTooLarge, OffsetOutOfRange
from headrace.log.read.reader import Chunk
from headrace.record.types import Record

READ_BYTES = 256 * 1024
# Of one batch, decoded at once. A batch with more is decompressed again for the rest.
STEP_RECORDS = 2000
STEP_BYTES = 8 << 20
# One call scans at most this much; the answer says where to continue.
SCAN_RECORDS_MAX = 20_000
SCAN_BYTES_MAX = 64 << 20
SEARCH_BYTES = 1 << 20
GAPS_MAX = 4  # finding the next readable offset takes time, too

READY, OUT, DONE = "ready", "unacked", "settled"


class Gap(NamedTuple):
    """A range of offsets that cannot be read; `end` is None where nothing after it is served."""

    start: int
    end: int | None
    reason: str


def unserved(partition: Partition) -> list[Gap]:
    """The gap behind damage that recovery found: nothing from there on is served."""
    damage = partition.damage
    return [] if damage is None else [Gap(partition.end_offset, None, str(damage))]


class BrowsedMessage(NamedTuple):
    records: list[Record]
    next_offset: int
    scanned: int


async def browse(
    decoder: Decoder,
    partition: Partition,
    offset: int,
    *,
    limit: int,
    bytes_max: int,
    wanted: Callable[[Record], bool] | None = None,
    content: Callable[[Record], bool] | None = None,
    aborted: Aborts = NO_ABORTS,
    scan_max: int = SCAN_RECORDS_MAX,
    gaps: list[Gap] | None = None,
) -> BrowsedMessage:
    """Committed records from an offset on that match both filters; stops at the limit, the end, or the scan limits.

    `wanted` looks at the state of the broker; `content` looks at the record only, and large records in a thread. The
    event loop runs meanwhile, so the state of a record may have changed on return. Damage raises, or is added to `gaps`
    and skipped."""
    found: list[Record] = []
    size = scanned = looked = 0
    offset = max(offset, partition.start_offset)
    end, turns = partition.stable_end, YieldEvery()
    while offset < end and len(found) < limit and len(gaps or ()) < GAPS_MAX:
        offset, chunk = await _read(partition, offset, end, gaps)
        if chunk is None:
            continue
        if chunk.next_offset <= offset:
            break
        upto = min(end, chunk.next_offset)
        for info in committed(chunk, aborted):
            behind = min(upto, info.next_offset)
            while offset < behind:
                try:
                    step = await decoder.records(
                        chunk.data,
                        info,
                        from_offset=offset,
                        to_offset=upto,
                        limit=max(1, min(STEP_RECORDS, scan_max - scanned)),
                        bytes_max=STEP_BYTES,
                    )
                except (CorruptBatch, DecompressedTooLarge):
                    break  # a batch that cannot be decoded is not shown; reading the topic reports why
                for record, fits in zip(step.records, await _matches(decoder, step, content), strict=True):
                    scanned += 1
                    bytes_ = len(record.value or b"") + len(record.key or b"")
                    looked += bytes_
                    if fits and (wanted is None or wanted(record)):
                        found.append(record)
                        size += bytes_
                        if len(found) >= limit or size >= bytes_max:
                            return BrowsedMessage(found, record.offset + 1, scanned)
                offset = max(offset, step.next_offset)
                if scanned >= scan_max or looked >= SCAN_BYTES_MAX:
                    return BrowsedMessage(found, offset, scanned)
                await turns.maybe_yield()
        offset = upto
    return BrowsedMessage(found, offset, scanned)


async def _matches(decoder: Decoder, step: Decoded, content: Callable[[Record], bool] | None) -> list[bool]:
    if content is None:
        return [True] * len(step.records)
    if step.size <= INLINE_BYTES_MAX:
        return [content(record) for record in step.records]
    return await decoder.run(lambda: [content(record) for record in step.records])


async def find_time(partition: Partition, timestamp_ms: int, gaps: list[Gap]) -> int:
    """The offset of the first record at or after a time, or the end. Damage, which may hide an earlier record, is added
    to `gaps` and skipped."""
    start, end = partition.start_offset, partition.stable_end
    while start < end and len(gaps) < GAPS_MAX:
        try:
            found = await when_loaded(partial(partition.offset_for_timestamp_now, timestamp_ms, start))
        except CorruptLog as damage:
            if damage.offset is None:
                raise
            start = await _skip_damage(partition, damage.offset, end, damage, gaps)
        else:
            return end if found is None else found[0]
    return start


async def _read(partition: Partition, offset: int, end: int, gaps: list[Gap] | None) -> tuple[int, Chunk | None]:
    """(offset, chunk) at the offset; or (the next offset to try, None)."""
    try:
        return offset, await when_loaded(partial(partition.read_now, offset, READ_BYTES))
    except OffsetOutOfRange as error:  # retention has deleted it
        if error.start <= offset:
            raise
        return error.start, None
    except CorruptLog as damage:
        if gaps is None:
            raise
        return await _skip_damage(partition, offset, end, damage, gaps), None


async def _skip_damage(partition: Partition, offset: int, end: int, damage: CorruptLog, gaps: list[Gap]) -> int:
    readable = min(end, await when_loaded(partial(partition.next_readable_now, offset)))
    gaps.append(Gap(offset, readable, str(damage)))
    return readable


class Settled(Protocol):
    """The reading state of a queue over one log, see queues/view.py."""

    settled: RangeSet
    returned: RangeSet
    next: int


def state_of(view: Settled, offset: int) -> str:
    """Whether a queue's message is ready, delivered to a consumer, or settled."""
    if offset in view.settled:
        return DONE
    if offset >= view.next or offset in view.returned:
        return READY
    return OUT


def contains(text: str) -> Callable[[Record], bool]:
    """A filter: the text is in the key, the value or a header value."""
    needle = text.encode()

    def fits(record: Record) -> bool:
        return (
            has_text(record.value or b"", needle)
            or has_text(record.key or b"", needle)
            or any(has_text(value or b"", needle) for _, value in record.headers)
        )

    return fits


def has_text(data: bytes, needle: bytes) -> bool:
    """Like `needle in data`, but in steps: each holds the GIL, and this may run beside the event loop."""
    step = max(SEARCH_BYTES, len(needle))
    return any(data.find(needle, at, at + step + len(needle) - 1) >= 0 for at in range(0, max(1, len(data)), step))


def has_key(key: str) -> Callable[[Record], bool]:
    wanted = key.encode()
    return lambda record: record.key == wanted
