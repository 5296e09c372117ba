"""The due index against a sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.queues.due_index import DueIndex

steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 9000), st.just(0)),
        st.tuples(st.just("take"), st.integers(0, 9000), st.integers(1, 5)),
    ),
    max_size=80,
)


@given(steps)
def test_it_agrees_with_a_sorted_list(changes: list[tuple[str, int, int]]) -> None:
    index, oracle = DueIndex(), list[tuple[int, int]]()
    for offset, (what, at, limit) in enumerate(changes):
        if what == "add":
            index.add(at, offset)
            oracle.append((at, offset))
            oracle.sort()
        else:
            due = [entry for entry in oracle if entry[0] <= at][:limit]
            assert index.take(at, limit) == [offset for _, offset in due]
            oracle = [entry for entry in oracle if entry not in due]
        assert len(index) == len(oracle)
        assert index.next_due() == (oracle[0][0] if oracle else None)


def test_a_million_entries_fit_in_a_few_dozen_megabytes() -> None:
    index = DueIndex()
    for offset in range(1_000_000):
        index.add(1_700_000_000_000 + offset % 3_600_000, offset)
    held = sum(pairs.buffer_info()[1] * pairs.itemsize for pairs in index._slots.values())
    assert held < 20_000_000
    assert len(index) == 1_000_000
