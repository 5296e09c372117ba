"""Removing records from a batch: the other records and the offset range of the batch do not change."""

from array import array

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import CorruptBatch, InvalidInput
from headrace.record.codec import build, columns, filter_batch, first_at, patch, records, scan, valid_until
from tests.record import oracle, strategies
from tests.record.oracle import Fields, Message
from tests.record.test_build import tuples


@given(strategies.batches, strategies.codecs, st.sets(st.integers(0, 29)))
def test_kept_records_keep_offset_timestamp_and_bytes(messages: list[Message], codec: int, kept: set[int]) -> None:
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
def test_a_rewritten_batch_is_byte_identical_to_the_reference_encoder(messages: list[Message], kept: set[int]) -> None:
    deltas = sorted(d for d in kept if d < len(messages))
    if not deltas or len(deltas) == len(messages):
        return
    whole = build(tuples(messages))
    base = messages[0].timestamp
    body = b"".join(oracle.record(messages[d], d, base) for d in deltas)
    chosen = [messages[d] for d in deltas]
    expected = oracle.batch(
        chosen, Fields(deltas=deltas), body=body, last_offset_delta=len(messages) - 1, base_timestamp=base
    )
    assert filter_batch(whole, scan(whole)[0], deltas) == bytearray(expected)


HORIZON = 1_800_000_000_000


@given(strategies.batches, strategies.codecs, st.sets(st.integers(0, 29)))
def test_a_delete_horizon_is_stored_as_base_timestamp_and_changes_no_record(
    messages: list[Message], codec: int, kept: set[int]
) -> None:
    whole = build(tuples(messages), codec=codec, producer_id=5, producer_epoch=1, base_sequence=40)
    patch(whole, 0, 1000, 6)
    (info,) = scan(whole)
    assert info.delete_horizon_ms is None
    wanted = [1000 + delta for delta in sorted(kept)]
    made = filter_batch(whole, info, wanted, delete_horizon_ms=HORIZON)
    expected = [r for r in records(whole) if r.offset in wanted]
    if made is None:
        assert not expected
        return
    assert records(made, verify_crc=True) == expected
    times = columns(made).timestamps
    assert times is not None and list(times.cast("B").cast("q")) == [r.timestamp for r in expected]
    latest = max(expected, key=lambda r: r.timestamp)
    assert first_at(made, 0, latest.timestamp) == (latest.offset, latest.timestamp)
    (after,) = scan(made)
    assert after.delete_horizon_ms == after.base_timestamp == HORIZON
    assert after.max_timestamp == max(r.timestamp for r in expected)
    assert (after.base_offset, after.last_offset, after.leader_epoch) == (1000, info.last_offset, 6)
    assert (after.producer_id, after.producer_epoch, after.base_sequence) == (5, 1, 40)
    assert after.codec in (codec, 0)
    assert filter_batch(made, after, wanted, delete_horizon_ms=HORIZON + 1) == made, (
        "an existing delete horizon does not change"
    )


@given(strategies.batches)
def test_a_batch_with_a_delete_horizon_is_byte_identical_to_the_reference_encoder(messages: list[Message]) -> None:
    whole = build(tuples(messages))
    body = b"".join(oracle.record(message, delta, HORIZON) for delta, message in enumerate(messages))
    expected = oracle.batch(messages, Fields(attributes=0x40), body=body, base_timestamp=HORIZON)
    assert filter_batch(whole, scan(whole)[0], range(len(messages)), delete_horizon_ms=HORIZON) == bytearray(expected)


def test_removing_more_records_keeps_the_delete_horizon() -> None:
    whole = build([(b"a", None, (), 5), (b"b", b"2", (), 9)])
    marked = filter_batch(whole, scan(whole)[0], [0, 1], delete_horizon_ms=HORIZON)
    assert marked is not None
    left = filter_batch(marked, scan(marked)[0], [1])
    assert left is not None
    assert scan(left)[0].delete_horizon_ms == HORIZON
    assert [(r.offset, r.timestamp) for r in records(left)] == [(1, 9)]


def test_a_delete_horizon_keeps_the_log_append_time() -> None:
    messages = [Message(b"b", None, [], 5), Message(b"c", b"", [], 9)]
    stamped = oracle.batch(messages, Fields(attributes=8), max_timestamp=7)  # attribute 8: log append time
    marked = filter_batch(stamped, scan(stamped)[0], [0, 1], delete_horizon_ms=HORIZON)
    assert marked is not None
    assert (scan(marked)[0].delete_horizon_ms, scan(marked)[0].max_timestamp) == (HORIZON, 7)
    assert [r.timestamp for r in records(marked)] == [7, 7]


def test_a_batch_that_cannot_hold_a_delete_horizon_stays_without_one() -> None:
    """A timestamp delta would overflow, or the batch would decompress to more than the limit."""
    whole = build([(b"a", None, (), -(2**63)), (b"b", b"2", (), -(2**63))])
    assert filter_batch(whole, scan(whole)[0], [0, 1], delete_horizon_ms=HORIZON) == whole
    left = filter_batch(whole, scan(whole)[0], array("q", [1]), delete_horizon_ms=HORIZON)
    assert left == filter_batch(whole, scan(whole)[0], [1])
    compressed = build([(b"k", None, (), 1)] * 100, codec=4)
    size = len(build([(b"k", None, (), 1)] * 100)) - 61
    limits = {"delete_horizon_ms": HORIZON, "decompressed_bytes_max": size}
    assert filter_batch(compressed, scan(compressed)[0], range(100), **limits) == compressed


def test_a_batch_can_be_rewritten_repeatedly() -> None:
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


def test_a_batch_in_the_middle_of_a_buffer_is_rewritten_by_position() -> None:
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


def test_an_exception_of_the_filter_function_reaches_the_caller() -> None:
    batch = build([(b"a", b"1", (), 1), (b"b", b"2", (), 2)])
    with pytest.raises(ZeroDivisionError):
        filter_batch(batch, scan(batch)[0], lambda offset: bool(1 / 0))
