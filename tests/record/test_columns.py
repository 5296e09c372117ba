"""`columns`, read by pyarrow, against the rows that `records` returns."""

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import CorruptBatch
from headrace.record.codec import build, columns, patch, records
from headrace.record.layout import (
    WANT_ALL,
    WANT_HEADERS,
    WANT_KEY,
    WANT_OFFSET,
    WANT_TIMESTAMP,
    WANT_TIMESTAMP_TYPE,
    WANT_VALUE,
)
from headrace.record.types import BinaryColumn, Columns
from tests.record import oracle, strategies
from tests.record.oracle import Fields, Message
from tests.record.test_build import tuples


def buffer(view: memoryview | None) -> Any:
    return None if view is None else pa.py_buffer(view)


def binary(column: BinaryColumn, rows: int, kind: Any = None) -> Any:
    array = pa.Array.from_buffers(
        kind or pa.binary(),
        rows,
        [buffer(column.validity), buffer(column.offsets), buffer(column.data)],
        null_count=column.nulls,
    )
    array.validate(full=True)
    return array


def ints(view: memoryview | None, rows: int, kind: Any) -> list[int]:
    assert view is not None
    assert len(view) == rows * kind.bit_width // 8
    found: list[int] = pa.Array.from_buffers(kind, rows, [None, buffer(view)]).to_pylist()
    return found


def rows_of(found: Columns) -> list[tuple[Any, ...]]:
    assert found.keys is not None
    assert found.values is not None
    assert found.headers is not None
    total = len(found.headers.names.offsets) // 4 - 1
    pairs = pa.StructArray.from_arrays(
        [binary(found.headers.names, total, pa.string()), binary(found.headers.values, total)], ["k", "v"]
    )
    starts = pa.Array.from_buffers(pa.int32(), found.count + 1, [None, buffer(found.headers.offsets)])
    lists = pa.ListArray.from_arrays(starts, pairs)
    lists.validate(full=True)
    headers = [tuple((h["k"], h["v"]) for h in row) for row in lists.to_pylist()]
    return list(
        zip(
            ints(found.offsets, found.count, pa.int64()),
            ints(found.timestamps, found.count, pa.int64()),
            binary(found.keys, found.count).to_pylist(),
            binary(found.values, found.count).to_pylist(),
            headers,
            strict=True,
        )
    )


def plain(data: bytes | bytearray, **options: Any) -> list[tuple[Any, ...]]:
    return [(r.offset, r.timestamp, r.key, r.value, r.headers) for r in records(data, **options)]


def log(groups: list[list[Message]], codecs: list[int]) -> tuple[bytes, int]:
    data, offset = bytearray(), 0
    for i, group in enumerate(groups):
        batch = build(tuples(group), codec=codecs[i % len(codecs)])
        patch(batch, 0, offset, 0)
        data += batch
        offset += len(group)
    return bytes(data), offset


@given(st.lists(strategies.batches, max_size=4), st.lists(strategies.codecs, min_size=1, max_size=3), st.data())
def test_columns_hold_the_rows_that_records_returns(
    groups: list[list[Message]], codecs: list[int], chosen: st.DataObject
) -> None:
    data, end = log(groups, codecs)
    found = columns(data)
    assert rows_of(found) == plain(data)
    assert (found.position, found.next_offset) == (len(data), end)
    start = chosen.draw(st.integers(0, end + 2))
    stop = chosen.draw(st.integers(0, end + 2))
    part = columns(data, from_offset=start, to_offset=stop)
    assert rows_of(part) == plain(data, from_offset=start, to_offset=stop)


@settings(max_examples=30)
@given(strategies.batches, st.integers(0, WANT_ALL))
def test_only_the_requested_columns_are_filled(messages: list[Message], want: int) -> None:
    batch = build(tuples(messages))
    found, whole = columns(batch, want=want), columns(batch)
    assert found.count == len(messages)
    assert found.offsets == (whole.offsets if want & WANT_OFFSET else None)
    assert found.timestamps == (whole.timestamps if want & WANT_TIMESTAMP else None)
    assert found.timestamp_types == (whole.timestamp_types if want & WANT_TIMESTAMP_TYPE else None)
    assert found.keys == (whole.keys if want & WANT_KEY else None)
    assert found.values == (whole.values if want & WANT_VALUE else None)
    assert found.headers == (whole.headers if want & WANT_HEADERS else None)


def test_limits_stop_after_a_whole_batch_and_the_next_call_continues_there() -> None:
    data, end = log([[Message(b"k", b"v" * 100, [], 5)] * 10] * 20, [0, 4])
    options: list[dict[str, Any]] = [{"rows_max": 25}, {"bytes_max": 2500}]
    for limits in options:
        position, calls = 0, 0
        rows: list[tuple[Any, ...]] = []
        while position < len(data):
            part = columns(data, position, **limits)
            assert part.count == (30 if position < len(data) * 0.8 else part.count)
            assert part.position > position
            position, calls = part.position, calls + 1
            rows += rows_of(part)
        assert rows == plain(data)
        assert part.next_offset == end
        assert calls == 7


def test_empty_headers_count_toward_the_byte_limit() -> None:
    data, _ = log([[Message(None, None, [("", None)] * 1000, 5)]] * 5, [0])
    assert columns(data, bytes_max=10_000).count == 2


def test_timestamps_in_microseconds_are_clamped_to_64_bits() -> None:
    times = [5, 2**62, -(2**62), 0]
    batch = build([(None, None, (), t) for t in times])
    found = columns(batch, microseconds=True)
    assert ints(found.timestamps, 4, pa.int64()) == [
        5000,
        (2**63 - 1) // 1000 * 1000,
        -(2**63 // 1000) * 1000,
        0,
    ]


def test_every_row_has_its_timestamp_type() -> None:
    create = oracle.batch([Message(None, b"a", [], 5)])
    append = oracle.batch([Message(None, b"b", [], 5)], Fields(base_offset=1, attributes=8), max_timestamp=77)
    found = columns(create + append)
    assert ints(found.timestamp_types, 2, pa.int32()) == [0, 1]
    assert ints(found.timestamps, 2, pa.int64()) == [5, 77]


def test_control_batches_and_aborted_transactions_are_skipped() -> None:
    def batch(offset: int, value: bytes, producer: int, *, transactional: bool, control: bool = False) -> bytes:
        data = build([(None, value, (), 1)], producer_id=producer, transactional=transactional, control=control)
        patch(data, 0, offset, 0)
        return bytes(data)

    data = (
        batch(0, b"aborted", 7, transactional=True)
        + batch(1, b"other producer", 8, transactional=True)
        + batch(2, b"not in a transaction", 7, transactional=False)
        + batch(3, b"marker", 7, transactional=True, control=True)
        + batch(4, b"next transaction", 7, transactional=True)
    )
    everything = [row[3] for row in rows_of(columns(data))]
    assert everything == [b"aborted", b"other producer", b"not in a transaction", b"next transaction"]
    committed = columns(data, aborted=[(7, 0, 3)])
    assert committed.transactional
    assert not columns(build([(None, b"plain", (), 1)])).transactional
    assert [row[3] for row in rows_of(committed)] == everything[1:]
    assert committed.next_offset == 5


def test_buffers_outlive_the_columns_object() -> None:
    found = columns(build([(b"k", b"v" * 50, (), 1)] * 100))
    assert found.values is not None
    array = binary(found.values, found.count)
    del found
    assert set(array.to_pylist()) == {b"v" * 50}


def test_the_error_gives_the_position_of_the_bad_batch_so_that_earlier_ones_can_be_read() -> None:
    data, _ = log([[Message(b"k", b"v", [], 5)] * 3] * 3, [0])
    size = len(data) // 3
    damaged = bytearray(data)
    damaged[size + 68] ^= 1
    with pytest.raises(CorruptBatch) as refusal:
        columns(damaged)
    assert refusal.value.position == size
    assert columns(damaged, 0, refusal.value.position).count == 3
    assert columns(damaged, verify_crc=False).count == 9
