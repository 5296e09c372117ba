"""records_of: one batch, with limits on what is copied."""

import pytest

from headrace.errors import CorruptBatch, DecompressedTooLarge, InvalidInput, RecordTooLarge
from headrace.record import codec
from headrace.record.types import Record

CODECS = range(5)
RECORDS = [(b"k%d" % n, bytes(1000 + n), (("h", b"v"),), 5 + n) for n in range(50)]


def batch(compression: int = 0) -> bytes:
    return bytes(codec.build(RECORDS, codec=compression, timestamp_ms=1))


@pytest.mark.parametrize("in_thread", [False, True])
@pytest.mark.parametrize("compression", CODECS)
def test_without_limits_it_returns_what_records_returns(compression: int, in_thread: bool) -> None:
    data = batch(compression)
    found, next_offset, size = codec.records_of(data, 0, in_thread=in_thread)
    assert found == codec.records(data) and next_offset == 50
    assert size >= sum(len(key) + len(value) for key, value, _, _ in RECORDS)
    large = bytes(codec.build([(b"k" * 100_000, b"v" * 200_000, (), 1)], codec=compression, timestamp_ms=1))
    assert codec.records_of(large, 0, in_thread=in_thread)[0] == codec.records(large)


def test_pages_of_any_size_together_are_the_whole_batch() -> None:
    data, whole = batch(4), codec.records(batch(4))
    for bytes_max in (1, 1100, 3000, 10_000, 1 << 20):
        for limit in (1, 7, 1000):
            seen: list[Record] = []
            offset = 0
            while offset < 50:
                found, after, size = codec.records_of(data, 0, from_offset=offset, limit=limit, bytes_max=bytes_max)
                assert found and len(found) <= limit and after == found[-1].offset + 1
                assert size <= bytes_max or len(found) == 1
                seen, offset = seen + found, after
            assert seen == whole


def test_offsets_outside_the_batch_and_control_batches_have_no_records() -> None:
    data = batch(1)
    assert codec.records_of(data, 0, from_offset=50) == ([], 50, 0)
    assert codec.records_of(data, 0, to_offset=0) == ([], 0, 0)
    found, after, _ = codec.records_of(data, 0, from_offset=10, to_offset=12)
    assert [record.offset for record in found] == [10, 11] and after == 12
    control = bytes(codec.build([(b"\0\0\0\1", b"", (), 1)], control=True, timestamp_ms=1))
    assert codec.records_of(control, 0) == ([], 1, 0)


def test_a_record_over_its_limit_raises_if_it_is_the_first_and_ends_the_list_otherwise() -> None:
    data = bytes(codec.build([(None, b"a", (), 1), (b"k", bytes(5000), (), 1)], codec=1, timestamp_ms=1))
    found, after, _ = codec.records_of(data, 0, record_bytes_max=4000)
    assert [record.value for record in found] == [b"a"] and after == 1
    with pytest.raises(RecordTooLarge) as caught:
        codec.records_of(data, 0, from_offset=1, record_bytes_max=4000)
    assert (caught.value.offset, caught.value.size, caught.value.limit, caught.value.next_offset) == (1, 5001, 4000, 2)


def test_without_values_only_keys_are_copied() -> None:
    found, after, size = codec.records_of(batch(4), 0, values=False)
    assert [record.key for record in found] == [key for key, _, _, _ in RECORDS] and after == 50
    assert all(record.value is None and record.headers == () for record in found) and size < 50 * 100


@pytest.mark.parametrize("in_thread", [False, True])
def test_value_sizes_are_those_of_the_values(in_thread: bool) -> None:
    data = batch(2)
    assert codec.value_sizes(data, 0, in_thread=in_thread) == ([(n, 1000 + n) for n in range(50)], 50)
    assert codec.value_sizes(data, 0, from_offset=3, limit=2) == ([(3, 1003), (4, 1004)], 5)
    assert codec.value_sizes(data, 0, from_offset=50) == ([], 50)


def test_damage_and_limits_raise() -> None:
    data = batch(4)
    for decode in (codec.records_of, codec.value_sizes):
        with pytest.raises(DecompressedTooLarge):
            decode(data, 0, decompressed_bytes_max=1000)
        with pytest.raises(CorruptBatch):
            decode(data[:-1], 0)
        with pytest.raises(InvalidInput):
            decode(data, len(data) + 1)


def test_the_first_compressed_batch_is_found() -> None:
    plain, packed = batch(), batch(4)
    assert codec.first_compressed(b"") == codec.first_compressed(plain * 3) == -1
    assert codec.first_compressed(plain + packed + plain) == len(plain)
    assert codec.first_compressed(plain[:-1]) == -1
