"""Recompressing a batch and stamping it with the append time give valid batches with the same records."""

import pytest

from headrace.record import codec
from headrace.record.batch.append_time import stamp_append_time
from headrace.record.batch.recompress import recompress


@pytest.mark.parametrize("before", range(5))
@pytest.mark.parametrize("after", range(5))
def test_recompressing_keeps_the_records(before: int, after: int) -> None:
    rows = [(b"k", b"value %d" % n * 10, ((b"h", b"x"),), 1000 + n) for n in range(50)]
    batch = codec.build(rows, codec=before, producer_id=7, producer_epoch=1, base_sequence=3)
    [info] = codec.scan(batch)
    result = recompress(memoryview(batch), info, after, only_if_smaller=False, decompressed_bytes_max=1 << 20)
    [info] = codec.validate(result)
    assert (info.codec, info.producer_id, info.base_sequence, info.count) == (after, 7, 3, 50)
    assert codec.records(result) == codec.records(batch)


def test_a_batch_that_would_grow_keeps_its_codec_unless_the_new_one_is_required() -> None:
    batch = codec.build([(None, b"x", (), 5)])
    [info] = codec.scan(batch)
    assert codec.scan(recompress(memoryview(batch), info, 1))[0].codec == 0
    assert codec.scan(recompress(memoryview(batch), info, 1, only_if_smaller=False))[0].codec == 1


def test_all_records_of_a_stamped_batch_have_the_append_time() -> None:
    batch = codec.build([(None, b"a", (), 5), (None, b"b", (), 6)])
    stamp_append_time(batch, 1234)
    codec.validate(batch)
    assert [record.timestamp for record in codec.records(batch)] == [1234, 1234]
