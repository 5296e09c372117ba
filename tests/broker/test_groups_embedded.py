"""What consumers of the classic protocol say inside their requests, as bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.groups.classic.consumer_protocol import (
    Assigned,
    decode_assignment,
    decode_subscription,
    encode_assignment,
)
from headrace.errors import (
    InconsistentProtocol,
)
from tests.broker.mixed_clients import (
    subscription,
)


@pytest.mark.parametrize("version", range(5))
def test_a_subscription_is_read_in_every_version(version: int) -> None:
    data = subscription(["a", "b"], [("a", 0), ("a", 2), ("b", 1)], version)
    said = decode_subscription(data)
    assert said.topics == {"a", "b"}
    assert said.owned == ({("a", 0), ("a", 2), ("b", 1)} if version else set())
    assert said.rack_id == ("rack" if version >= 3 else None)
    for cut in range(2, len(data)):
        try:
            decode_subscription(data[:cut])
        except InconsistentProtocol:
            continue
        assert cut == len(subscription(["a", "b"], version=0)), "version 1 as some clients write it"


@given(st.binary(max_size=64))
def test_bytes_of_any_kind_are_refused_or_read(data: bytes) -> None:
    for decode in (decode_subscription, decode_assignment):
        try:
            decode(data)
        except InconsistentProtocol:
            pass


@given(st.sets(st.tuples(st.sampled_from(["a", "topic"]), st.integers(0, 100))), st.integers(0, 3))
def test_an_assignment_is_read_as_it_was_written(partitions: set[tuple[str, int]], version: int) -> None:
    assert decode_assignment(encode_assignment(partitions, version)) == Assigned(frozenset(partitions), b"")
