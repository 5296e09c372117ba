"""Delivery tags against a dictionary."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from headrace.wire.amqp.tags import TagRing

BURST = 1500
steps = st.lists(
    st.one_of(
        st.tuples(st.just("deliver"), st.integers(-1, 1), st.just(False)),
        st.tuples(st.just("burst"), st.integers(0, 1), st.just(False)),
        st.tuples(st.sampled_from(["ack", "take"]), st.integers(-20, 40), st.booleans()),
    ),
    max_size=80,
)


@given(steps)
def test_tags_agree_with_a_dictionary(changes: list[tuple[str, int, bool]]) -> None:
    ring, oracle, sent, acked = TagRing(), dict[int, tuple[int, int]](), 0, list[tuple[int, int]]()
    ring.add_source(), ring.add_source()
    for what, number, multiple in changes:
        if what == "deliver":
            sent += 1
            assert ring.add(number, 1000 + sent) == sent
            if number >= 0:
                oracle[sent] = (number, 1000 + sent)
        elif what == "burst":
            for _ in range(BURST):  # what is out before it stays out
                sent += 1
                assert ring.settle(ring.add(number, 1000 + sent), False)
                acked.append((number, 1000 + sent))
        else:
            number = number if number >= 0 else max(1, sent + 1 + number)
            known = number in oracle or (number == 0 and multiple)
            covered = [t for t in oracle if number == 0 or t <= number] if multiple else [number]
            if what == "ack":
                assert ring.settle(number, multiple) is known
            else:
                assert ring.peek(number, multiple) == (covered if known else None)
                taken = ring.take(number, multiple)
                assert taken == ([oracle[t] for t in covered] if known else None)
            if known:
                gone = [oracle.pop(t) for t in covered]
                acked += gone if what == "ack" else []
        assert (ring.unacked, ring.oldest_tag) == (len(oracle), min(oracle, default=ring.oldest_tag))
        for source in (0, 1):
            assert ring.in_flight(source) == sum(s == source for s, _ in oracle.values())
    folded = [(source, offset) for source, a, b in ring.acked() for offset in range(a, b)]
    assert sorted(folded) == sorted(acked)


def test_interleaved_acks_of_several_consumers_merge_into_one_range_each() -> None:
    ring = TagRing()
    left, right = ring.add_source(), ring.add_source()
    for offset in range(100):
        ring.add(left, offset)
        ring.add(right, 500 + offset)
    for tag in range(1, 201):
        assert ring.settle(tag, False)
    assert sorted(ring.acked()) == [(left, 0, 100), (right, 500, 600)]


def test_settled_deliveries_after_an_unacked_tag_use_no_memory() -> None:
    """Workers that hang, and others of their channel that go on for months."""
    ring = TagRing()
    hanging, busy = ring.add_source(), ring.add_source()
    for turn in range(100):
        ring.add(hanging, turn)
        for offset in range(1000):
            assert ring.settle(ring.add(busy, offset), False)
        ring.acked()
    assert sys.getsizeof(ring) < 32 * 1024
    assert ring.take(0, True) == [(hanging, turn) for turn in range(100)]
