"""The range set against a plain set of numbers."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.types.range_set import RangeSet

SPAN = 60
steps = st.lists(st.tuples(st.booleans(), st.integers(0, SPAN), st.integers(0, 12)), max_size=60)


@given(steps)
def test_it_agrees_with_a_set_of_numbers(changes: list[tuple[bool, int, int]]) -> None:
    ranges, oracle = RangeSet(), set[int]()
    for adding, start, length in changes:
        touched = set(range(start, start + length))
        if adding:
            assert ranges.add(start, start + length) == len(touched - oracle)
            oracle |= touched
        else:
            assert ranges.remove(start, start + length) == len(touched & oracle)
            oracle -= touched
        assert len(ranges) == len(oracle)
        assert {o for a, b in ranges for o in range(a, b)} == oracle
        assert all(o in ranges for o in oracle)
    flat = list(ranges)
    assert all(a < b for a, b in flat)
    assert all(left[1] < right[0] for left, right in pairwise(flat)), "ranges never touch"


@given(steps, st.integers(0, SPAN), st.integers(0, SPAN))
def test_gaps_and_counts_are_those_of_the_numbers(changes: list[tuple[bool, int, int]], a: int, b: int) -> None:
    ranges = RangeSet()
    for adding, start, length in changes:
        (ranges.add if adding else ranges.remove)(start, start + length)
    assert ranges.count(a, b) == sum(o in ranges for o in range(a, b))
    missing = [o for o in range(a, b) if o not in ranges]
    gap = ranges.gap(a, b)
    if not missing:
        assert gap is None
    else:
        assert gap is not None
        assert gap[0] == missing[0]
        assert all(o not in ranges for o in range(*gap))
        assert gap[1] == b or gap[1] in ranges


def test_a_million_acks_in_order_are_one_range() -> None:
    ranges = RangeSet()
    for offset in range(0, 1_000_000, 100):
        ranges.add(offset, offset + 100)
    assert ranges.runs == 1
    assert ranges.first() == (0, 1_000_000)


def test_half_a_million_gaps_are_closed_from_the_front() -> None:
    """One of two consumers has acked everything, the other acks now. Took 30 s when every ack moved the rest."""
    ranges, count = RangeSet(), 500_000
    for offset in range(count):
        ranges.add(2 * offset + 1, 2 * offset + 2)
    for offset in range(count):
        ranges.add(2 * offset, 2 * offset + 1)
    assert list(ranges) == [(0, 2 * count)]
    for offset in range(count):
        ranges.remove(2 * offset, 2 * offset + 1)
    assert (ranges.runs, len(ranges)) == (count, count)
    for offset in range(count):
        assert ranges.first() == (2 * offset + 1, 2 * offset + 2)
        ranges.remove(2 * offset + 1, 2 * offset + 2)
    assert not ranges
