"""Finding batches in a buffer: scanning, recovery, trimming, validation and patching."""

from collections.abc import Callable
from typing import Any

import pytest

from headrace.errors import BatchTooLarge, CorruptBatch, InvalidInput, TimestampOutOfRange
from headrace.record.codec import (
    build,
    columns,
    epochs_until,
    filter_batch,
    first_at,
    patch,
    patch_run,
    records,
    scan,
    trim,
    valid_until,
    validate,
)
from headrace.record.compression.codecs import compress
from headrace.record.layout import HEADER_BYTES, HEADERS_MAX, INCOMPLETE, MAX_OFFSET
from tests.record import oracle
from tests.record.oracle import Fields, Message


def log(counts: list[int], start: int = 0) -> tuple[bytes, list[int]]:
    """Batches with these record counts and consecutive offsets from start, and the position of each batch."""
    data, positions = bytearray(), []
    for count in counts:
        positions.append(len(data))
        batch = build([(b"k", b"v%d" % i, (), 100 + i) for i in range(count)])
        patch(batch, 0, start, 3)
        data += batch
        start += count
    return bytes(data), positions


def test_scan_returns_the_fields_of_each_header() -> None:
    batch = build(
        [(b"k", b"v", (), 50), (b"k", b"v", (), 40)],
        producer_id=9,
        producer_epoch=2,
        base_sequence=2**31 - 1,
        transactional=True,
    )
    patch(batch, 0, 1000, 7)
    (info,) = scan(b"......" + batch, 6)
    assert (info.position, info.size, info.end) == (6, len(batch), 6 + len(batch))
    assert (info.base_offset, info.last_offset, info.next_offset, info.count) == (1000, 1001, 1002, 2)
    assert (info.base_timestamp, info.max_timestamp, info.leader_epoch) == (50, 50, 7)
    assert (info.producer_id, info.producer_epoch, info.base_sequence) == (9, 2, 2**31 - 1)
    assert info.last_sequence == 0, "sequences wrap to 0"
    assert (info.codec, info.is_transactional, info.is_control, info.timestamp_type) == (0, True, False, 0)


def test_scan_reports_the_position_of_a_bad_batch() -> None:
    data, positions = log([3, 4, 5])
    damaged = bytearray(data)
    damaged[positions[1] + HEADER_BYTES + 3] ^= 1
    with pytest.raises(CorruptBatch, match="CRC32C") as refusal:
        scan(damaged)
    assert refusal.value.position == positions[1]
    assert len(scan(damaged, verify_crc=False)) == 3
    assert len(scan(damaged, 0, positions[1])) == 1


@pytest.mark.parametrize("call", [scan, valid_until, records, columns])
@pytest.mark.parametrize(("start", "end"), [(-1, None), (0, 101), (5, 4), (101, None), (0, -1)])
def test_a_range_outside_the_buffer_is_refused(call: Callable[..., Any], start: int, end: int | None) -> None:
    with pytest.raises(InvalidInput, match="not inside a buffer"):
        call(bytes(100), start, end)
    with pytest.raises(InvalidInput):
        trim(bytes(100), start, end, 0, 10)


def test_an_empty_buffer_holds_no_batches() -> None:
    assert scan(b"") == validate(b"") == []
    assert records(b"") == []
    assert valid_until(b"", 0, None, 17) == (0, 17, 0, -1, None)
    assert columns(b"").count == 0
    assert trim(b"", 0, None, 5, 9) == (0, 0, 5)


def test_valid_until_returns_the_end_of_the_valid_batches() -> None:
    data, positions = log([3, 4, 5], start=10)
    assert valid_until(data, 0, None, 10) == (len(data), 22, 12, 104, None)
    assert valid_until(data, 0, None) == (len(data), 22, 12, 104, None)
    assert valid_until(data, positions[1], None, 13) == (len(data), 22, 9, 104, None)
    assert valid_until(data, 0, positions[2] + 10, 10) == (positions[2], 17, 7, 103, INCOMPLETE)
    garbage = data + bytes(100)
    assert valid_until(garbage)[:2] == (len(data), 22)
    assert valid_until(garbage)[4] == "the length is less than a batch header"


@pytest.mark.parametrize(
    ("epochs", "good"), [([3, 3, 5], 3), ([3, 4, 3], 2), ([3, 6, 5], 1), ([2, 3, 3], 0), ([3, -1, 4], 1)]
)
def test_epochs_until_stops_where_epochs_decrease_or_are_unknown(epochs: list[int], good: int) -> None:
    whole, positions = log([3, 4, 5], start=10)
    data = bytearray(whole)
    for position, base, epoch in zip(positions, [10, 13, 17], epochs, strict=True):
        patch(data, position, base, epoch)
    ends = [0, *positions[1:], len(data)]
    assert epochs_until(data, len(data), 3, 5) == (ends[good], [-1, 13, 17, 22][good], [3, *epochs][good])
    assert epochs_until(data, positions[1] + 9, 0, 9)[:2] == (positions[1], 13)
    with pytest.raises(InvalidInput, match="not inside a buffer"):
        epochs_until(data, len(data) + 1, 3, 5)


def test_valid_until_stops_where_offsets_decrease() -> None:
    data, positions = log([3, 4])
    again = data + data
    position, next_offset, count, _, reason = valid_until(again, 0, None, 0)
    assert (position, next_offset, count) == (len(data), 7, 7)
    assert reason == "the base offset is not after the batch before"
    assert valid_until(data, 0, None, 1)[0] == 0
    assert valid_until(data, positions[1], None, 4)[0] == positions[1]


def test_valid_until_accepts_offset_gaps_unless_dense() -> None:
    first, second = log([3])[0], log([2], start=8)[0]
    assert valid_until(first + second, 0, None, 0)[:3] == (len(first + second), 10, 5)
    assert valid_until(first + second, 0, None, 0, dense=True)[:3] == (len(first), 3, 3)
    assert valid_until(first, 0, None, 0, dense=True)[4] is None


def test_trim_returns_the_batches_that_contain_the_offsets() -> None:
    data, p = log([3, 4, 5], start=10)  # 10-12, 13-16, 17-21
    assert trim(data, 0, None, 10, MAX_OFFSET) == (0, len(data), 22)
    assert trim(data, 0, None, 12, MAX_OFFSET) == (0, len(data), 22)
    assert trim(data, 0, None, 13, MAX_OFFSET) == (p[1], len(data), 22)
    assert trim(data, 0, None, 14, 17) == (p[1], p[2], 17)
    assert trim(data, 0, None, 14, 16) == (p[1], p[2], 17)
    assert trim(data, 0, None, 10, 13) == (0, p[1], 13)
    assert trim(data, p[1], None, 10, 18) == (p[1], len(data), 22)
    assert trim(data, 0, p[2] + 5, 10, MAX_OFFSET) == (0, p[2], 17)
    first, end, third = trim(data, 0, None, 22, MAX_OFFSET)
    assert (first == end, third) == (True, 22)
    first, end, third = trim(data, 0, None, 2, 5)
    assert (first == end, third) == (True, 2)


def test_trim_verifies_only_the_batches_that_it_returns() -> None:
    data, p = log([3, 4, 5], start=10)
    damaged = bytearray(data)
    damaged[p[0] + HEADER_BYTES + 3] ^= 1
    assert trim(damaged, 0, None, 13, MAX_OFFSET) == (p[1], len(data), 22)
    with pytest.raises(CorruptBatch) as refusal:
        trim(damaged, 0, None, 12, MAX_OFFSET)
    assert refusal.value.position == 0


def test_trim_stops_before_a_bad_batch() -> None:
    data, p = log([3, 4, 5], start=10)
    damaged = bytearray(data)
    damaged[p[2] + HEADER_BYTES + 3] ^= 1
    assert trim(damaged, 0, None, 10, MAX_OFFSET) == (0, p[2], 17)
    assert trim(damaged, 0, None, 13, MAX_OFFSET) == (p[1], p[2], 17)
    with pytest.raises(CorruptBatch):
        trim(damaged, 0, None, 17, MAX_OFFSET)


def test_trim_stops_at_the_byte_limit_but_returns_at_least_one_batch() -> None:
    data, p = log([3, 4, 5], start=10)
    assert trim(data, 0, None, 10, MAX_OFFSET, 1) == (0, p[1], 13)
    assert trim(data, 0, None, 10, MAX_OFFSET, p[1]) == (0, p[1], 13)
    assert trim(data, 0, None, 10, MAX_OFFSET, p[2] - 1) == (0, p[1], 13), "the limit is exact"
    assert trim(data, 0, None, 10, MAX_OFFSET, p[2]) == (0, p[2], 17)
    assert trim(data, 0, None, 14, MAX_OFFSET, 1) == (p[1], p[2], 17)


def test_a_compacted_batch_is_found_by_any_offset_of_its_range() -> None:
    """Compaction leaves gaps inside a batch, which still covers all of its offsets."""
    gap = oracle.batch([Message(b"k", b"v", [], 1)], Fields(base_offset=10, deltas=[4]), last_offset_delta=9)
    assert scan(gap)[0].last_offset == 19
    for offset in range(10, 20):
        assert trim(gap, 0, None, offset, MAX_OFFSET) == (0, len(gap), 20)
    assert [r.offset for r in records(gap)] == [14]
    with pytest.raises(CorruptBatch):
        validate(gap)


def test_validate_refuses_a_batch_beyond_the_size_limit_before_reading_it() -> None:
    batch = build([(None, bytes(1000), (), 1)])
    assert validate(batch, batch_bytes_max=len(batch))
    with pytest.raises(BatchTooLarge) as refusal:
        validate(batch, batch_bytes_max=len(batch) - 1)
    assert refusal.value.size_bytes == len(batch)
    with pytest.raises(BatchTooLarge):
        validate(batch[:12], batch_bytes_max=100)


def test_validate_decompresses_batches_only_when_deep() -> None:
    good = build([(b"k", b"v" * 500, (), 1)], codec=4)
    signed = oracle.sign(bytes(good[:HEADER_BYTES]) + bytes(reversed(good[HEADER_BYTES:])))
    with pytest.raises(CorruptBatch, match="zstd"):
        validate(signed)
    assert len(validate(signed, deep=False)) == 1


def test_a_wrong_max_timestamp_is_refused_or_repaired() -> None:
    messages = [Message(None, b"v", [], 5), Message(None, b"w", [], 9)]
    for codec in (0, 1):
        good = build([(m.key, (m.value or b"") * 100, m.headers, m.timestamp) for m in messages], codec=codec)
        wrong = bytearray(good)
        wrong[35:43] = (7).to_bytes(8, "big")
        wrong = bytearray(oracle.sign(wrong))
        with pytest.raises(CorruptBatch, match="timestamps"):
            validate(bytes(wrong))
        (info,) = validate(wrong, repair=True)
        assert info.max_timestamp == 9
        assert wrong == good


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("codec", [0, 1])
def test_validate_removes_the_delete_horizon_of_a_foreign_log(codec: int, deep: bool) -> None:
    """A client may copy an old log, and its horizon would remove tombstones before consumers see them."""
    whole = build([(b"k%d" % n, None, (), 5 + n) for n in range(50)], codec=codec)
    copied = filter_batch(whole, scan(whole)[0], range(50), delete_horizon_ms=1000)
    assert copied is not None
    before = records(copied)
    (info,) = validate(copied, repair=True, deep=deep)
    assert info.delete_horizon_ms is None and info == scan(copied)[0]
    assert records(copied, verify_crc=True) == before == records(whole)


def test_repair_needs_a_writable_buffer() -> None:
    with pytest.raises(BufferError):
        validate(bytes(build([(None, b"v", (), 5)])), repair=True)


@pytest.mark.parametrize("codec_number", [0, 4])
def test_validate_refuses_malformed_amqp_properties(codec_number: int) -> None:
    def made(properties: bytes | None) -> bytes:
        headers = (("a", b""), ("amqp.properties", properties), ("amqp.exchange", b""))
        return bytes(build([(b"k", b"v", headers, 5)], codec=codec_number))

    for properties in (None, b"\0\0", b"\x80\0\x04text", b"\x20\0\0\0\0\x09\x01aS\0\0\0\x02hi"):
        assert len(validate(made(properties))) == 1
    for properties in (b"", b"\0", b"\0\1", b"\x80\0\x05text", b"\x20\0\0\0\0\x09\x01aQ\0\0\0\x02hi"):
        with pytest.raises(CorruptBatch, match="properties of AMQP"):
            validate(made(properties))


def test_validate_refuses_too_many_records_or_headers() -> None:
    """A header takes two bytes, almost none when compressed, but becomes an object in every reader."""
    for codec in (0, 4):
        batch = build([(None, None, [("", None)] * 5, 1)] * 3, codec=codec)
        assert validate(batch, records_max=3, headers_max=15)
        options: list[dict[str, Any]] = [{"records_max": 2}, {"headers_max": 14}]
        for limits in options:
            with pytest.raises(CorruptBatch, match="more records or headers"):
                validate(batch, **limits)
    many = oracle.varint(HEADERS_MAX + 1) + b"\x00\x01" * (HEADERS_MAX + 1)
    body = b"\x00\x00\x00\x01\x01" + many
    compressed = compress(4, oracle.varint(len(body)) + body)
    assert len(compressed) < 1000
    with pytest.raises(CorruptBatch, match="more records or headers"):
        validate(oracle.batch([Message(None, None, [], 1)], Fields(attributes=4), body=compressed))


def test_records_of_a_batch_with_log_append_time_share_its_timestamp() -> None:
    messages = [Message(None, b"v", [], 5), Message(None, b"w", [], 9)]
    batch = oracle.batch(messages, Fields(attributes=8), max_timestamp=1234)
    (info,) = validate(batch)
    assert info.timestamp_type == 1
    assert [r.timestamp for r in records(batch)] == [1234, 1234]


def test_an_empty_batch_is_readable_but_validate_refuses_it() -> None:
    empty = oracle.batch([], last_offset_delta=4)
    assert scan(empty)[0].last_offset == 4
    assert records(empty) == []
    assert columns(empty).next_offset == 5
    with pytest.raises(CorruptBatch, match="count"):
        validate(empty)


def test_patch_run_assigns_consecutive_offsets() -> None:
    data, positions = log([3, 4, 5], start=0)
    buffer = bytearray(data)
    assert patch_run(buffer, 0, len(buffer), 100, 8) == 112
    assert [(i.base_offset, i.leader_epoch) for i in scan(buffer)] == [(100, 8), (103, 8), (107, 8)]
    assert patch_run(buffer, positions[1], positions[2], 50, 9) == 54
    assert [i.base_offset for i in scan(buffer)] == [100, 50, 107]
    with pytest.raises(CorruptBatch):
        patch_run(buffer, 0, len(buffer) - 1, 0, 0)


def test_patch_refuses_a_position_outside_the_buffer() -> None:
    for position in (-1, 40, 100, 2**40):
        with pytest.raises(InvalidInput):
            patch(bytearray(100), position, 0, 0)
    with pytest.raises(BufferError):
        patch(memoryview(bytes(100)), 0, 0, 0)


def test_records_can_be_limited_by_offset_and_count() -> None:
    data, _ = log([3, 4, 5], start=10)
    assert [r.offset for r in records(data)] == list(range(10, 22))
    assert [r.offset for r in records(data, from_offset=12, to_offset=18)] == list(range(12, 18))
    assert [r.offset for r in records(data, from_offset=15, limit=4)] == [15, 16, 17, 18]
    assert records(data, limit=0) == []


def test_invalid_utf8_in_a_header_name_is_replaced() -> None:
    batch = build([(None, None, [(b"\xff\xfeab", b"x")], 1)])
    assert records(batch)[0].headers == (("\ufffd\ufffdab", b"x"),)


@pytest.mark.parametrize("number", [0, 4])
def test_first_at_finds_the_same_record_as_decoding_the_batch(number: int) -> None:
    times = [50, 10, 70, 30, 70, 90]
    batch = build([(None, bytes(1000), (), at) for at in times], codec=number, timestamp_ms=50)
    patch(batch, 0, 100, 0)
    for timestamp in (0, 10, 31, 70, 71, 90, 91):
        for start, end in ((0, 200), (101, 105), (103, 104), (106, 200)):
            found = records(batch, from_offset=start, to_offset=end)
            expected = next(((one.offset, one.timestamp) for one in found if one.timestamp >= timestamp), None)
            assert first_at(batch, 0, timestamp, from_offset=start, to_offset=end) == expected


def test_first_at_refuses_a_truncated_batch_or_a_position_outside_the_buffer() -> None:
    batch = build([(None, b"a", (), 1)], timestamp_ms=1)
    for cut in range(len(batch)):
        with pytest.raises(CorruptBatch):
            first_at(batch[:cut], 0, 1)
    for position in (-1, len(batch) + 1):
        with pytest.raises(InvalidInput):
            first_at(batch, position, 1)


@pytest.mark.parametrize(("timestamps", "is_valid"), [
    ((10, 20), True), ((20, -1, 10), True), ((-1,), True), ((9, 20), False), ((10, 21, 15), False), ((-2, 15), False),
])  # fmt: skip
@pytest.mark.parametrize("codec", [0, 4])
def test_validate_limits_the_timestamps_of_records(timestamps: tuple[int, ...], is_valid: bool, codec: int) -> None:
    good = build([(b"k", b"v", (), 15)])
    data = good + build([(b"k", b"v", (), timestamp) for timestamp in timestamps], codec=codec)
    assert len(validate(data)) == 2
    if is_valid:
        assert len(validate(data, lowest_timestamp=10, highest_timestamp=20)) == 2
        return
    with pytest.raises(TimestampOutOfRange) as caught:
        validate(data, lowest_timestamp=10, highest_timestamp=20)
    assert (caught.value.position, caught.value.lowest, caught.value.highest) == (len(good), 10, 20)
