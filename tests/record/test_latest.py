"""The records that key compaction keeps."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from headrace.errors import CorruptBatch, InvalidInput
from headrace.record.codec import LatestOffsets, build, keep_latest, keep_listed, patch, scan
from headrace.record.layout import CODECS
from tests.record import oracle
from tests.record.oracle import Fields, Message

NO_END = 1 << 62


def learned(*batches: bytearray) -> LatestOffsets:
    latest = LatestOffsets()
    for batch in batches:
        latest.learn(batch, scan(batch)[0])
    return latest


def kept(
    batch: bytearray, latest: LatestOffsets, *, start: int = 0, until: int = NO_END, tombstones: bool = True
) -> list[int]:
    return list(keep_latest(batch, scan(batch)[0], latest, start=start, until=until, tombstones=tombstones)[0])


def at(offset: int, batch: bytearray) -> bytearray:
    patch(batch, 0, offset, 0)
    return batch


def test_the_last_record_of_each_key_and_all_records_without_a_key_are_kept() -> None:
    batch = build([(b"a", b"1", (), 1), (None, b"2", (), 1), (b"a", b"3", (), 1), (b"", b"4", (), 1)])
    assert kept(batch, learned(batch)) == [1, 2, 3]
    assert kept(batch, learned(batch), until=2) == [1, 2, 3]
    assert kept(batch, learned(batch), until=0) == [0, 1, 2, 3]


def test_only_tombstones_with_a_key_are_removed_when_tombstones_are_not_kept() -> None:
    batch = build([(b"a", b"", (), 1), (b"b", None, (), 2), (None, None, (), 3)])
    assert kept(batch, learned(batch), tombstones=True) == [0, 1, 2]
    assert kept(batch, learned(batch), tombstones=False) == [0, 2]
    assert kept(batch, learned(batch), tombstones=False, until=1) == [0, 1, 2]


@pytest.mark.parametrize(
    ("second", "until", "expected"),
    [((b"b", None), 9, True), ((b"b", b""), 9, False), ((None, None), 9, False), ((b"b", None), 2, False)],
)
def test_keep_latest_reports_whether_a_compacted_tombstone_was_kept(
    second: tuple[bytes | None, bytes | None], until: int, expected: bool
) -> None:
    batch = build([(b"b", None, (), 1), (b"b", b"1", (), 1), (*second, (), 1)])
    info, latest = scan(batch)[0], learned(batch)
    assert keep_latest(batch, info, latest, start=0, until=until, tombstones=True)[1] is expected
    assert keep_listed(batch, info, array("q", [2]), until=until, tombstones=True) == (array("q", [2]), expected)
    assert not keep_latest(batch, info, latest, start=0, until=9, tombstones=False)[1]


def test_a_record_before_the_start_is_removed_only_if_its_key_was_learned_later() -> None:
    """From the start offset on, a key that was not learned belongs to an aborted transaction."""
    first = build([(b"a", b"1", (), 1), (b"b", b"2", (), 1)])
    second = at(2, build([(b"b", b"3", (), 1), (b"c", b"4", (), 1)]))
    assert kept(first, learned(second), start=2) == [0]
    assert kept(second, learned(second), start=2) == [2, 3]
    assert kept(second, LatestOffsets(), start=2) == []


def test_offsets_learned_apart_are_merged_only_with_their_origin() -> None:
    batch, later = build([(b"a", b"1", (), 1)]), at(7, build([(b"a", b"1", (), 1), (b"b", b"1", (), 1)]))
    latest = learned(batch)
    apart = latest.apart()
    apart.learn(later, scan(later)[0])
    assert len(latest) == 1 and len(apart) == 2
    latest.take(apart)
    assert len(latest) == 2 and kept(batch, latest) == []
    with pytest.raises(InvalidInput):
        latest.take(LatestOffsets())


def test_keys_that_differ_in_one_bit_or_in_length_are_distinct() -> None:
    """The hash reads words of eight bytes, so lengths around multiples of eight are covered."""
    different = {bytes(size) for size in range(40)}
    for size in range(1, 40):
        for bit in range(8 * size):
            different.add((1 << bit).to_bytes(size, "little"))
    batch = build([(key, b"", (), 1) for key in sorted(different)])
    assert len(learned(batch)) == len(different) > 6000


keys = st.one_of(st.none(), st.binary(max_size=2), st.binary(min_size=30, max_size=40))
batches = st.lists(
    st.tuples(st.lists(st.tuples(keys, st.booleans(), st.integers(0, 9)), min_size=1), st.sampled_from(sorted(CODECS))),
    max_size=6,
)


@given(batches, st.integers(0, 30), st.booleans())
def test_compaction_keeps_the_same_records_as_a_dictionary(
    content: list[tuple[list[tuple[bytes | None, bool, int]], str]], until: int, tombstones: bool
) -> None:
    made, last, wanted, offset = [], {}, [], 0
    for records, codec in content:
        rows = [(key, None if is_tombstone else b"v", (), 100 + time) for key, is_tombstone, time in records]
        made.append(at(offset, build(rows, codec=CODECS[codec])))
        for key, _, _ in records:
            last[key] = offset
            offset += 1
    offset = 0
    for records, _ in content:
        for key, is_tombstone, _ in records:
            is_wanted = tombstones or not is_tombstone
            if key is None or offset >= until or (last[key] == offset and is_wanted):
                wanted.append(offset)
            offset += 1
    latest = learned(*made)
    assert [o for batch in made for o in kept(batch, latest, until=until, tombstones=tombstones)] == wanted
    listed = array("q", sorted(set(last.values())))
    found = [keep_listed(batch, scan(batch)[0], listed, until=until, tombstones=tombstones)[0] for batch in made]
    assert [offset for offsets in found for offset in offsets] == wanted


@pytest.mark.parametrize("records", [b"\x02\0\0\0\0\0\0", b"\x10\0\0\x08\x02k\x02v\0"])
def test_malformed_records_are_reported(records: bytes) -> None:
    """One record is truncated, the other has an offset outside of its batch."""
    broken = oracle.batch([Message(b"k", b"v", [], 1)], Fields(), body=records)
    info = scan(broken)[0]
    with pytest.raises(CorruptBatch):
        LatestOffsets().learn(broken, info)
    with pytest.raises(CorruptBatch):
        keep_latest(broken, info, LatestOffsets(), start=0, until=9, tombstones=True)
    with pytest.raises(CorruptBatch):
        keep_listed(broken, info, array("q"), until=9, tombstones=True)
    with pytest.raises(CorruptBatch):
        LatestOffsets().learn(broken[:-1], info)
    with pytest.raises(InvalidInput):
        LatestOffsets().learn(broken, structs.replace(info, position=len(broken) + 1))
