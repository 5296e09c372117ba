"""Runs every reader of the record kernels over arbitrary bytes and checks the invariants that hold for any input.

Used by the damage tests, by the random mutations and by the libFuzzer target.
"""

from collections.abc import Callable
from typing import Any

from headrace.errors import BatchTooLarge, CorruptBatch, DecompressedTooLarge, InvalidInput, UnknownCodec
from headrace.record.arrow.restore import Cells, Numbers, Rows
from headrace.record.codec import (
    LatestOffsets,
    columns,
    epochs_until,
    filter_batch,
    records,
    scan,
    trim,
    valid_until,
    validate,
)
from headrace.record.layout import MAX_OFFSET
from headrace.record.types import BatchInfo, Buffer

LIMIT = 1 << 20
NUMBERS = (
    "offset", "timestamp", "batch_offset", "batch_last_offset", "batch_timestamp", "batch_max_timestamp", "attributes",
    "leader_epoch", "producer_id", "producer_epoch", "sequence",
)  # fmt: skip
EXPECTED_ERRORS = (CorruptBatch, BatchTooLarge, DecompressedTooLarge, UnknownCodec)


def attempt(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Return the result of call, or None if it raises one of the documented errors."""
    try:
        return call(*args, **options)
    except EXPECTED_ERRORS:
        return None


def exercise(data: Buffer) -> str:
    """Run every reader over data, check that they agree, and return the outcome: accepted or how it was refused."""
    position, next_offset, count, _, reason = valid_until(data)
    assert 0 <= position <= len(data)
    assert (reason is None) == (position == len(data))
    infos = attempt(scan, data)
    # scan raises on a bad batch and stops at a truncated one; valid_until also checks the order of offsets.
    assert infos is None or sum(info.size for info in infos) >= position
    assert 0 <= epochs_until(data, len(data), -1, 1 << 31)[0] <= len(data)
    good = scan(data, 0, position)
    assert sum(info.count for info in good) == count
    if good:
        assert good[-1].next_offset == next_offset
    for options in ({}, {"verify_crc": True}):
        found = attempt(records, data, decompressed_bytes_max=LIMIT, **options)
        assert found is None or all(r.offset >= 0 for r in found)
    attempt(columns, data, decompressed_bytes_max=LIMIT)
    attempt(columns, data, decompressed_bytes_max=LIMIT, verify_crc=False, want=4)
    check_as_columns(data)
    for info in good:
        attempt(LatestOffsets().learn, data, info, decompressed_bytes_max=LIMIT)
    attempt(trim, data, 0, None, 0, MAX_OFFSET)
    attempt(trim, data, 0, None, 5, 7)
    shallow = attempt(validate, data, deep=False)
    accepted: list[BatchInfo] | None = attempt(validate, data, decompressed_bytes_max=LIMIT)
    if accepted is None:
        return "refused" if shallow is None else "refused by deep validation"
    assert shallow == accepted == infos
    check_accepted_is_readable(data, accepted)
    return "accepted"


def check_as_columns(data: Buffer) -> None:
    """Interpret the bytes as columns of rows: rendering them gives valid batches or raises InvalidInput."""
    count = len(data) // 8
    if not count:
        return
    view = memoryview(data)
    whole, half = view[: count * 8], view[: count * 4]
    try:
        cells = [Cells(whole, data, data if flag else None, 0, count) for flag in (False, True, True, True)]
        numbers = {name: Numbers(whole, 0, count) for name in NUMBERS}
        rendered = Rows(count, numbers, cells[0], cells[1], half, 0, cells[2], cells[3]).render(LIMIT)
    except InvalidInput:
        return
    assert sum(info.count for info in scan(rendered)) == count


def check_accepted_is_readable(data: Buffer, infos: list[BatchInfo]) -> None:
    """A batch that was accepted from a client never fails in a reader, and all readers agree on its content."""
    total = sum(info.count for info in infos)
    found = records(data, control=True, verify_crc=True)
    assert len(found) == total
    plain = sum(info.count for info in infos if not info.is_control)
    assert columns(data).count == len(records(data)) == plain
    latest = LatestOffsets()
    for info in infos:
        latest.learn(data, info)
    keyed = {record.key for record in found if record.key is not None}
    assert len(latest) == len(keyed)
    for info in infos:
        assert filter_batch(data, info, lambda _: True) == data[info.position : info.end]
        assert filter_batch(data, info, ()) is None
        last = filter_batch(data, info, [info.last_offset])
        assert last is not None
        (kept,) = records(last, control=True, verify_crc=True)
        assert kept.offset == info.last_offset
