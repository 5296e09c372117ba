"""Batches under another codec or with the broker's time are valid batches with the same records."""

import pytest

from headrace.broker.streams import rewriting
from headrace.record import codec


@pytest.mark.parametrize("before", range(5))
@pytest.mark.parametrize("after", range(5))
def test_recompressed_records_are_the_same(before: int, after: int) -> None:
    rows = [(b"k", b"value %d" % n * 10, ((b"h", b"x"),), 1000 + n) for n in range(50)]
    batch = codec.build(rows, codec=before, producer_id=7, producer_epoch=1, base_sequence=3)
    result = rewriting.recompress(memoryview(batch), after, 1 << 20)
    [info] = codec.validate(result)
    assert (info.codec, info.producer_id, info.base_sequence, info.count) == (after, 7, 3, 50)
    assert codec.records(result) == codec.records(batch)


def test_a_stamped_batch_carries_one_time() -> None:
    batch = codec.build([(None, b"a", (), 5), (None, b"b", (), 6)])
    rewriting.stamp(batch, 1234)
    codec.validate(batch)
    assert [record.timestamp for record in codec.records(batch)] == [1234, 1234]
