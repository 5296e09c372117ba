"""append_raw and append_parts, which the wire kernels call from Cython through codec.pxd."""

from types import ModuleType

import pytest
from bench.kernels import load

from headrace.record.codec import BatchWriter, build, encode_headers
from headrace.record.layout import HEADER_BYTES

APPENDED, NO_MEMORY, TOO_LARGE, BAD_TIMESTAMP = 0, -1, -2, -3


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    return load("append")


def test_appending_from_cython_gives_the_same_batch_as_from_python(kernel: ModuleType) -> None:
    writer = BatchWriter(1234)
    assert kernel.append_many(writer, b"key", b"value", 100) == APPENDED
    assert writer.finish() == build([(b"key", b"value", (), 1234)] * 100)


@pytest.mark.parametrize("pieces", [[], [b""], [b"whole"], [b"a", b"", b"bc" * 5000, b"d"]])
@pytest.mark.parametrize("key", [None, b"", b"routing.key"])
def test_a_value_appended_in_pieces_equals_the_whole_value(
    kernel: ModuleType, key: bytes | None, pieces: list[bytes]
) -> None:
    pairs = [("amqp.properties", b"\x00\x00"), ("amqp.exchange", b"")]
    headers, count = encode_headers(pairs)
    writer = BatchWriter(0)
    assert kernel.append_pieces(writer, key, pieces, headers, count, 77) == APPENDED
    assert writer.finish() == build([(key, b"".join(pieces), pairs, 77)])


def test_a_record_that_does_not_fit_is_refused_and_changes_nothing(kernel: ModuleType) -> None:
    writer = BatchWriter(0, bytes_max=HEADER_BYTES + 50)
    assert kernel.append_many(writer, b"k", b"v" * 100, 1) == TOO_LARGE
    assert kernel.append_pieces(writer, None, [b"v" * 30, b"v" * 30], b"", 0, 1) == TOO_LARGE
    assert (writer.count, writer.size) == (0, HEADER_BYTES)
    assert kernel.append_many(writer, b"k", b"v", 100) == TOO_LARGE
    assert 0 < writer.count < 100
    assert len(writer.finish()) <= HEADER_BYTES + 50


def test_a_timestamp_too_far_from_the_first_is_refused(kernel: ModuleType) -> None:
    writer = BatchWriter(0)
    assert kernel.append_pieces(writer, None, [b"v"], b"", 0, -(2**63)) == APPENDED
    assert kernel.append_pieces(writer, None, [b"v"], b"", 0, 2**62) == BAD_TIMESTAMP
    assert writer.count == 1
