"""Compressed request bodies are decompressed in steps: one over the limit is refused with few bytes in memory."""

import gzip
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from headrace.errors import DecompressedTooLarge, InvalidInput
from headrace.wire.http import bodies

MB = 1 << 20
FOLDS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress}


class Produced:
    """The bytes that zlib has produced, and the most that were alive at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.total = self.alive = self.most_alive = self.largest = 0
        make = zlib.decompressobj
        counter = self

        class Piece(bytes):
            def __init__(self, data: bytes) -> None:
                counter.total += len(data)
                counter.alive += len(data)
                counter.largest = max(counter.largest, len(data))
                counter.most_alive = max(counter.most_alive, counter.alive)

            def __del__(self) -> None:
                counter.alive -= len(self)

        class Inflater:
            def __init__(self, window_bits: int) -> None:
                self._inflater = make(window_bits)

            def __getattr__(self, name: str) -> Any:
                return getattr(self._inflater, name)

            def decompress(self, data: Any, most: int = 0) -> bytes:
                return Piece(self._inflater.decompress(data, most))

        monkeypatch.setattr(zlib, "decompressobj", Inflater)


@pytest.mark.parametrize("encoding", FOLDS)
def test_a_body_over_the_limit_is_refused_with_few_bytes_in_memory(
    monkeypatch: pytest.MonkeyPatch, encoding: str
) -> None:
    """512 MB out of 512 KB took 170 MB before it was refused."""
    folded = FOLDS[encoding](bytes(100 * MB))
    produced = Produced(monkeypatch)
    with pytest.raises(DecompressedTooLarge, match="limit of 67,108,864 bytes"):
        bodies.decompress(folded, encoding, 64 * MB)
    assert produced.total <= 65 * MB, "no more is decompressed than it takes to know"
    assert produced.most_alive <= 9 * MB and produced.largest <= MB


@pytest.mark.parametrize("encoding", FOLDS)
@pytest.mark.parametrize("size", [0, 1, 100_000, bodies.KEPT_BYTES_MAX, bodies.KEPT_BYTES_MAX + 1, 20 * MB])
def test_bodies_of_any_size_are_decompressed(encoding: str, size: int) -> None:
    data = (b"0123456789" * (size // 10 + 1))[:size]
    assert bytes(bodies.decompress(FOLDS[encoding](data), encoding, max(size, 1))) == data
    if size:
        with pytest.raises(DecompressedTooLarge):
            bodies.decompress(FOLDS[encoding](data), encoding, size - 1)


def test_several_members_are_one_body() -> None:
    parts = [b"a" * 300_000, b"", b"b" * 10, b"c" * (9 * MB)]
    folded = b"".join(map(gzip.compress, parts))
    assert bytes(bodies.decompress(folded, "gzip", 20 * MB)) == b"".join(parts)
    with pytest.raises(InvalidInput):
        bodies.decompress(gzip.compress(b"") * 101, "gzip", MB)


@pytest.mark.parametrize("cut", [1, 5, 9, 20])
def test_a_truncated_body_is_refused(cut: int) -> None:
    with pytest.raises(InvalidInput, match="not valid gzip data"):
        bodies.decompress(gzip.compress(b"x" * 1000)[:-cut], "gzip", MB)
    with pytest.raises(InvalidInput, match="not valid gzip data"):
        bodies.decompress(gzip.compress(b"x" * 1000) + b"rest", "gzip", MB)
