"""CRC32C against the crc32c package and the vectors of RFC 3720, with and without the CPU instruction."""

import os
from collections.abc import Callable

import crc32c as reference
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.record.batch.crc32c import crc32c, crc32c_software

Checksum = Callable[..., int]

VECTORS = {
    b"": 0,
    b"123456789": 0xE3069283,
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(reversed(range(32))): 0x113FDB5C,
}


@pytest.mark.parametrize("path", [crc32c, crc32c_software])
@pytest.mark.parametrize(("data", "expected"), VECTORS.items())
def test_crc32c_matches_the_vectors_of_the_rfc(path: Checksum, data: bytes, expected: int) -> None:
    assert path(data) == expected


@pytest.mark.parametrize("path", [crc32c, crc32c_software])
@given(data=st.binary(max_size=2000), before=st.binary(max_size=50))
def test_crc32c_matches_the_package_and_can_be_continued(path: Checksum, data: bytes, before: bytes) -> None:
    assert path(data) == reference.crc32c(data)
    assert path(data, path(before)) == reference.crc32c(before + data)


def test_crc32c_is_correct_at_sizes_around_the_interleaved_runs() -> None:
    data = os.urandom(40_000)
    for step in (768, 12_288, 24_576, 36_864):
        for size in range(step - 9, step + 10):
            for start in range(3):
                piece = data[start : start + size]
                assert crc32c(piece) == crc32c_software(piece) == reference.crc32c(piece)
