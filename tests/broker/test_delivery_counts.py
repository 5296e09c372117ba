"""Return counts: saved with the settles and dropped with the message."""

import sys
from typing import Any

from headrace.broker.queues.delivery_counts import DeliveryCounts
from headrace.broker.queues.view_state import Delta, decode_settles, fold_settles
from headrace.broker.types.range_set import RangeSet


def settled(*ranges: tuple[int, int], counts: dict[int, int] | None = None, reserved: int = 0) -> bytes:
    return Delta(RangeSet(ranges), RangeSet(), reserved, counts=counts or {}).encode()


def test_the_last_count_of_each_message_is_kept_until_it_is_settled() -> None:
    value = fold_settles(None, [settled(counts={5: 1, 7: 1}), settled((0, 5), counts={5: 2}, reserved=64)])
    reserved, ranges, counts = decode_settles(value)
    assert (reserved, list(ranges), counts) == (64, [(0, 5)], {5: 2, 7: 1})
    value = fold_settles(value, [settled((5, 6))])
    assert decode_settles(value)[2] == {7: 1}
    value = fold_settles(value, [settled((6, 9), counts={7: 2})])
    assert decode_settles(value)[2] == {}


def test_values_written_before_there_were_counts_are_read_as_they_were() -> None:
    old = bytes.fromhex("00000000000000004000000000000000000000000000000005")
    reserved, ranges, counts = decode_settles(old)
    assert (reserved, list(ranges), counts) == (64, [(0, 5)], {})
    assert fold_settles(None, [old]) == old


def test_unsaved_counts_are_saved_the_next_time_with_their_latest_value() -> None:
    counts = DeliveryCounts({})
    assert counts.add(3) == 1
    taken = counts.take_unsaved()
    assert counts.add(3) == 2
    counts.put_back({**taken, 4: 9})
    assert counts.take_unsaved() == {3: 2, 4: 9}


def test_settled_messages_are_forgotten_whether_the_range_or_the_counts_are_many() -> None:
    counts = DeliveryCounts(dict.fromkeys(range(100), 1))
    counts.forget(10, 12)
    assert 9 in counts and 10 not in counts and 11 not in counts and 12 in counts
    counts.forget(0, 1 << 40)
    assert not counts and counts.highest == 0


def test_the_next_counted_offset_bounds_a_run() -> None:
    counts = DeliveryCounts({5: 1, 9: 1})
    assert (counts.next_in(0, 20), counts.next_in(6, 20), counts.next_in(10, 20)) == (5, 9, 20)
    assert (counts.next_in(5, 20), counts.next_in(7, 8), counts.next_in(6, 9)) == (5, 8, 9)
    counts.forget(5, 6)
    counts.add(7)
    assert (counts.next_in(0, 20), counts.next_in(8, 20)) == (7, 9)


def test_deliveries_do_not_scan_all_returned_messages() -> None:
    """Regression: 100,000 returned messages in flight cost each delivery 7 ms."""
    counts = DeliveryCounts(dict.fromkeys(range(10_000), 1))
    steps = 0

    def count(*_: object) -> Any:
        nonlocal steps
        steps += 1
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        assert counts.next_in(10_000, 20_000) == 20_000
    finally:
        sys.settrace(before)
    assert steps < 100
