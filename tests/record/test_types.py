"""The immutable structures that layers exchange, also with Spark's executors."""

import pickle
import struct

import pytest

from headrace.record import layout
from headrace.record.codec import build, scan
from headrace.record.types import Slice


def test_a_slice_can_be_pickled() -> None:
    piece = Slice(3, 1000, 2, 4096, 512, 1010, 1020)
    assert pickle.loads(pickle.dumps(piece)) == piece
    assert piece.end == 4608


def test_a_batch_info_is_immutable_and_can_be_pickled() -> None:
    (info,) = scan(build([(None, b"v", (), 1)]))
    with pytest.raises(AttributeError):
        info.base_offset = 5  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(info)) == info


def test_the_kernels_write_every_field_at_the_position_in_layout() -> None:
    """The positions are declared twice, once for Python and once for C."""
    batch = build(
        [(b"k", b"v", (), 5), (b"k", b"v", (), 7)],
        producer_id=11,
        producer_epoch=12,
        base_sequence=13,
        transactional=True,
    )
    fields = {
        layout.BASE_OFFSET_AT: (">q", 0),
        layout.LENGTH_AT: (">i", len(batch) - layout.PREFIX_BYTES),
        layout.LEADER_EPOCH_AT: (">i", -1),
        layout.MAGIC_AT: (">b", layout.MAGIC),
        layout.ATTRIBUTES_AT: (">h", layout.TRANSACTIONAL_BIT),
        layout.LAST_OFFSET_DELTA_AT: (">i", 1),
        layout.BASE_TIMESTAMP_AT: (">q", 5),
        layout.MAX_TIMESTAMP_AT: (">q", 7),
        layout.PRODUCER_ID_AT: (">q", 11),
        layout.PRODUCER_EPOCH_AT: (">h", 12),
        layout.BASE_SEQUENCE_AT: (">i", 13),
        layout.COUNT_AT: (">i", 2),
    }
    for position, (kind, value) in fields.items():
        assert struct.unpack_from(kind, batch, position) == (value,)
