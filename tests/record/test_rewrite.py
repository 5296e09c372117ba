"""A batch without some of its records: what is kept keeps its place, and the batch its range."""

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import CorruptBatch, InvalidInput
from headrace.record.codec import build, filter_batch, patch, records, scan, valid_until
from tests.record import oracle, strategies
from tests.record.oracle import Fields, Message
from tests.record.test_build import tuples


@given(strategies.batches, strategies.codecs, st.sets(st.integers(0, 29)))
def test_kept_records_keep_offset_timestamp_and_bytes(
    messages: list[Message], codec: int, kept: set[int]
) -> None:
    whole = build(tuples(messages), codec=codec, producer_id=5, producer_epoch=1, base_sequence=40)
    patch(whole, 0, 1000, 6)
    (info,) = scan(whole)
    wanted = [1000 + delta for delta in sorted(kept)]
    rewritten = filter_batch(whole, info, wanted)
    assert (
        rewritten
        == filter_batch(whole, info, array("q", wanted))
        == filter_batch(whole, info, set(wanted).__contains__)
    )
    expected = [r for r in records(whole) if r.offset in wanted]
    if rewritten is None:
        assert not expected
        return
    assert records(rewritten, verify_crc=True) == expected
    (after,) = scan(rewritten)
    assert (after.base_offset, after.last_offset) == (info.base_offset, info.last_offset)
    assert (after.producer_id, after.producer_epoch, after.base_sequence) == (5, 1, 40)
    assert (after.leader_epoch, after.base_timestamp) == (6, info.base_timestamp)
    assert after.max_timestamp == max(r.timestamp for r in expected)
    assert after.count == len(expected)
    assert after.codec in (codec, 0)
    assert valid_until(rewritten)[0] == len(rewritten)


@given(strategies.batches, st.sets(st.integers(0, 29), min_size=1))
def test_a_rewritten_batch_has_the_bytes_of_the_oracle(messages: list[Message], kept: set[int]) -> None:
    deltas = sorted(d for d in kept if d < len(messages))
    if not deltas or len(deltas) == len(messages):
        return
    whole = build(tuples(messages))
    base = messages[0].timestamp
    packed = b"".join(oracle.record(messages[d], d, base) for d in deltas)
    chosen = [messages[d] for d in deltas]
    expected = oracle.batch(
        chosen, Fields(deltas=deltas), packed=packed, last_offset_delta=len(messages) - 1, base_timestamp=base
    )
    assert filter_batch(whole, scan(whole)[0], deltas) == expected


def test_a_batch_can_be_rewritten_again_and_again() -> None:
    whole = build([(b"k%d" % i, b"v" * 50, (), i) for i in range(100)], codec=3)
    kept = list(range(100))
    while len(kept) > 1:
        kept = kept[::2]
        smaller = filter_batch(whole, scan(whole)[0], kept)
        assert smaller is not None
        assert len(smaller) < len(whole)
        whole = smaller
        assert [r.offset for r in records(whole)] == kept
    assert scan(whole)[0].last_offset == 99


def test_a_batch_in_the_middle_of_a_buffer_is_taken_by_its_position() -> None:
    batch = build([(b"a", b"1", (), 1), (b"b", b"2", (), 2)])
    (info,) = scan(b"x" * 7 + batch + b"tail", 7)
    rewritten = filter_batch(b"x" * 7 + batch + b"tail", info, [1])
    assert rewritten is not None
    assert [r.key for r in records(rewritten)] == [b"b"]


def test_a_damaged_batch_is_not_rewritten() -> None:
    batch = build([(b"a", b"1", (), 1), (b"b", b"2", (), 2)])
    (info,) = scan(batch)
    batch[-1] ^= 1
    with pytest.raises(CorruptBatch):
        filter_batch(batch, info, [1])
    past_the_end = msgspec.structs.replace(info, position=len(batch) + 1)
    with pytest.raises(InvalidInput):
        filter_batch(batch, past_the_end, [1])


def test_an_error_in_the_callers_choice_is_the_callers() -> None:
    batch = build([(b"a", b"1", (), 1), (b"b", b"2", (), 2)])
    with pytest.raises(ZeroDivisionError):
        filter_batch(batch, scan(batch)[0], lambda offset: bool(1 / 0))
