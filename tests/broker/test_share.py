"""A share partition hands out each record to one member, and takes it back when the member does not settle it."""

from collections.abc import Iterator

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.groups.config import DEFAULTS
from headrace.broker.groups.share.partition import (
    ACCEPT,
    REJECT,
    RELEASE,
    RENEW,
    Acquired,
    SavedShare,
    SharePartition,
)
from headrace.errors import InvalidRecordState


def restarted(share: SharePartition) -> SharePartition:
    return SharePartition(0, msgspec.msgpack.decode(share.save(), type=SavedShare))


def take(share: SharePartition, member: str, end: int, count: int = 1000, deadline: float = 30.0) -> list[int]:
    """Every offset handed out."""
    taken: list[int] = []
    while (first := share.available(0, end)) is not None and len(taken) < count:
        got = share.acquire(member, first, end, count - len(taken), deadline)
        taken += [offset for one in got for offset in range(one.first, one.last + 1)]
        if not got:
            break
    return taken


def test_two_members_never_hold_the_same_record() -> None:
    share = SharePartition(0)
    assert take(share, "a", 10, 4) == [0, 1, 2, 3]
    assert take(share, "b", 10) == [4, 5, 6, 7, 8, 9]
    assert take(share, "a", 10) == []


def test_accepted_and_rejected_records_are_settled() -> None:
    share = SharePartition(0)
    take(share, "a", 5)
    share.acknowledge("a", 0, 1, [ACCEPT], 0)
    share.acknowledge("a", 2, 4, [REJECT, ACCEPT, ACCEPT], 0)
    assert share.start == 5
    assert take(share, "b", 5) == []


def test_a_released_record_is_delivered_again_with_its_delivery_count() -> None:
    share = SharePartition(0)
    take(share, "a", 3)
    share.acknowledge("a", 1, 1, [RELEASE], 0)
    assert share.available(0, 3) == 1
    assert share.acquire("b", 1, 3, 10, 0) == [Acquired(1, 1, 2)]


def test_a_record_is_archived_after_five_unsettled_deliveries() -> None:
    share = SharePartition(0)
    for _ in range(DEFAULTS.attempts_max):
        assert take(share, "a", 1) == [0]
        share.acknowledge("a", 0, 0, [RELEASE], 0)
    assert take(share, "a", 1) == []
    assert share.start == 1


def test_a_record_is_handed_out_alone_for_the_last_time() -> None:
    """Records that crash their consumer do not use up the attempts of other records."""
    share = SharePartition(0, SavedShare(0, [], {1: 4, 2: 4, 4: 3}))
    handed = []
    while (first := share.available(0, 6)) is not None:
        handed.append(share.acquire("a", first, 6, 100, 0))
    alone = [[Acquired(1, 1, 5)], [Acquired(2, 2, 5)]]
    assert handed == [[Acquired(0, 0, 1)], *alone, [Acquired(3, 3, 1), Acquired(4, 4, 4), Acquired(5, 5, 1)]]
    assert share.release_member("a")
    assert share.available(0, 6) == 0, "those two are given up"
    assert share.acquire("a", 0, 6, 100, 0) == [Acquired(0, 0, 2), Acquired(3, 3, 2)], "and the next is alone again"


def test_locks_end_with_time_or_with_the_member_and_can_be_renewed() -> None:
    share = SharePartition(0)
    take(share, "a", 2, deadline=10.0)
    share.acknowledge("a", 1, 1, [RENEW], 50.0)
    assert share.release_expired(11.0)
    assert take(share, "b", 2) == [0]
    assert share.release_member("a")
    assert take(share, "b", 2) == [1]


class Looked(dict[int, int]):
    times = 0

    def __iter__(self) -> Iterator[int]:
        Looked.times += 1
        return super().__iter__()


def test_accepting_a_record_does_not_search_all_released_ones() -> None:
    """A quarter of a second of everybody, for five hundred records of ten thousand that came back."""
    share = SharePartition(0)
    take(share, "a", 100)
    assert share.release_member("a")
    taken = take(share, "b", 100, 50)
    share._attempts = Looked(share._attempts)
    share.acknowledge("b", taken[0], taken[-1], [ACCEPT], 0)
    assert Looked.times == 0
    assert take(share, "b", 100) == list(range(50, 100))
    share.archive(50, 100)
    share.available(1 << 40, 1 << 41)
    assert Looked.times == 1, "retention takes more than there is to look at"


def test_locks_are_not_renewed_if_the_group_configuration_forbids_it() -> None:
    share = SharePartition(0, settings=DEFAULTS.changed({"renews": False}))
    take(share, "a", 2, deadline=10.0)
    with pytest.raises(InvalidRecordState):
        share.acknowledge("a", 0, 1, [ACCEPT, RENEW], 50.0)
    assert share.locked == 2


@pytest.mark.parametrize(
    ("member", "first", "last", "types"),
    [
        ("b", 0, 0, [ACCEPT]),
        ("a", 0, 5, [ACCEPT]),
        ("a", 0, 1, [1, 1, 1]),
        ("a", 0, 0, [9]),
        ("a", 1, 0, [ACCEPT]),
    ],
)
def test_acknowledging_a_record_of_another_member_changes_nothing(
    member: str, first: int, last: int, types: list[int]
) -> None:
    share = SharePartition(0)
    take(share, "a", 3)
    with pytest.raises(InvalidRecordState):
        share.acknowledge(member, first, last, types, 0)
    assert share.locked == 3
    assert share.start == 0


def test_the_number_of_locks_is_bounded() -> None:
    share = SharePartition(0)
    assert len(take(share, "a", 10_000, 10_000)) == DEFAULTS.locks_max
    assert share.available(0, 10_000) is None
    share.acknowledge("a", 0, 0, [ACCEPT], 0)
    assert share.available(0, 10_000) == DEFAULTS.locks_max


def test_after_a_crash_settled_records_stay_settled_and_acquired_ones_are_released() -> None:
    share = SharePartition(0)
    take(share, "a", 6)
    share.acknowledge("a", 0, 1, [ACCEPT], 0)
    share.acknowledge("a", 4, 4, [ACCEPT], 0)
    again = restarted(share)
    assert take(again, "b", 6) == [2, 3, 5]


def test_retention_that_is_faster_than_the_group_moves_it_on() -> None:
    share = SharePartition(0)
    assert share.available(5, 10) == 5


actions = st.lists(
    st.tuples(st.sampled_from(["take", "accept", "release", "expire", "crash"]), st.integers(0, 30)),
    max_size=60,
)


@given(actions)
def test_every_record_is_settled_exactly_once_in_any_order_of_events(steps: list[tuple[str, int]]) -> None:
    end = 30
    share = SharePartition(0)
    held: set[int] = set()
    settled: set[int] = set()
    for action, number in steps:
        if action == "take":
            for offset in take(share, "a", end, number % 5 + 1):
                assert offset not in settled, "done is done"
                assert offset not in held
                held.add(offset)
        elif action == "crash":
            share, held = restarted(share), set()
        elif action == "expire":
            share.release_member("a")
            held.clear()
        elif number in held:
            share.acknowledge("a", number, number, [ACCEPT if action == "accept" else RELEASE], 0)
            held.discard(number)
            if action == "accept":
                settled.add(number)
    share.release_member("a")
    left: set[int] = set()
    while got := take(share, "b", end, 7):
        left |= set(got)
        for offset in got:
            share.acknowledge("b", offset, offset, [ACCEPT], 0)
    assert not left & settled
    assert share.start == end


def test_archiving_settles_all_records_that_are_not_acquired() -> None:
    share = SharePartition(0)
    assert share.acquire("m", 0, 2, 2, 10.0) == [Acquired(0, 1, 1)]
    share.acknowledge("m", 0, 0, [RELEASE], 10.0)
    share.archive(0, 4)
    assert share.available(0, 6) == 4
    assert share.acquire("m", 4, 6, 9, 10.0) == [Acquired(4, 5, 1)]
    share.acknowledge("m", 1, 1, [RELEASE], 10.0)
    assert share.available(0, 6) == 1, "its holder had it before"
    share.archive(0, 4)
    assert share.available(0, 6) is None
    assert share.start == 4


def test_a_released_record_beyond_the_end_is_not_available() -> None:
    """A group that is switched to read_committed may already have acquired uncommitted records."""
    share = SharePartition(0)
    share.acquire("m", 0, 3, 3, 10.0)
    share.release_member("m")
    assert share.available(0, 0) is None
    assert share.available(0, 3) == 0
