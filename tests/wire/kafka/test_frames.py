"""Splitting the byte stream into requests, however it arrives, and refusing sizes before memory is allocated."""

import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import MalformedRequest
from headrace.wire.kafka.frames import FIRST_BYTES, PEEK_BYTES, BufferPool, FrameReader

REQUESTS = [b"a" * 5, b"b", b"c" * 300, b"d" * 70_000]


def reader() -> FrameReader:
    return FrameReader(BufferPool(), bytearray(64 * 1024))


def framed(*requests: bytes) -> bytes:
    return b"".join(struct.pack(">i", len(request)) + request for request in requests)


def whole(pairs: list[tuple[bytearray, int]]) -> list[bytes]:
    return [bytes(buffer[:size]) for buffer, size in pairs]


def test_requests_do_not_depend_on_how_bytes_arrive() -> None:
    stream = framed(*REQUESTS[:3])
    for cut in range(1, len(stream)):
        frames = reader()
        assert whole(frames.feed(stream[:cut]) + frames.feed(stream[cut:])) == REQUESTS[:3]
        assert not frames.waiting


def test_requests_may_arrive_byte_by_byte() -> None:
    frames = reader()
    got = [pair for at in range(len(framed(*REQUESTS[:3]))) for pair in frames.feed(framed(*REQUESTS[:3])[at : at + 1])]
    assert whole(got) == REQUESTS[:3]


@given(
    sizes=st.lists(st.sampled_from([1, 3, 4, 300, 5000, FIRST_BYTES - 1, FIRST_BYTES, 3 * FIRST_BYTES]), max_size=6),
    reads=st.lists(st.sampled_from([1, 2, 3, 5, 1000, PEEK_BYTES, 70_000]), min_size=1, max_size=6),
    is_given_back=st.booleans(),
)
def test_requests_of_any_size_are_read_as_they_were_framed(
    sizes: list[int], reads: list[int], is_given_back: bool
) -> None:
    """Reads like a socket: at most the size of the target; each buffer is reused."""
    pool = BufferPool()
    frames = FrameReader(pool, bytearray(64 * 1024))
    requests = [bytes([index + 1]) * size for index, size in enumerate(sizes)]
    stream = framed(*requests)
    got: list[bytes] = []
    position, turn = 0, 0
    while position < len(stream):
        target = frames.target()
        # Byte by byte only at first: the large ones would take too long.
        step = min(reads[turn % len(reads)] if turn < 20 else 70_000, len(target), len(stream) - position)
        target[:step] = stream[position : position + step]
        for buffer, size in frames.arrived(step):
            got.append(bytes(buffer[:size]))
            if is_given_back:
                pool.put_back(buffer)
        position, turn = position + step, turn + 1
        assert frames.held_bytes <= max(FIRST_BYTES, 4 * max(sizes))
    assert got == requests
    assert not frames.waiting


@pytest.mark.parametrize("begun", [b"", framed(bytes(5000))[:1000]])
def test_more_bytes_than_the_target_holds_are_an_error(begun: bytes) -> None:
    frames = reader()
    frames.feed(begun)
    for count in (-1, len(frames.target()) + 1, 2**40):
        with pytest.raises(ValueError, match="do not fit"):
            frames.arrived(count)
    assert bool(begun) == frames.waiting


def test_a_large_request_is_assembled_from_many_reads() -> None:
    large = bytes(range(256)) * 8192  # 2 MiB, above every growth threshold
    frames = reader()
    got = []
    stream = framed(large, b"after", large)
    for at in range(0, len(stream), 60_001):
        got += frames.feed(stream[at : at + 60_001])
    assert whole(got) == [large, b"after", large]


def test_a_returned_buffer_is_reused() -> None:
    pool = BufferPool()
    frames = FrameReader(pool, bytearray(4096))
    [(buffer, _)] = frames.feed(framed(b"x" * FIRST_BYTES))
    pool.put_back(buffer)
    [(again, size)] = frames.feed(framed(b"y" * (FIRST_BYTES - 0)))
    assert again is buffer
    assert bytes(again[:size]) == b"y" * FIRST_BYTES


def test_buffers_unused_for_a_while_are_released() -> None:
    pool = BufferPool()
    for buffer in [pool.take(FIRST_BYTES) for _ in range(8)]:
        pool.put_back(buffer)
    pool.trim()
    assert pool.free_bytes == 8 * FIRST_BYTES, "a recent burst"
    taken = [pool.take(FIRST_BYTES) for _ in range(3)]
    for buffer in taken:
        pool.put_back(buffer)
    pool.trim()
    assert pool.free_bytes == 3 * FIRST_BYTES, "five were not needed since the last trim"
    assert pool.release(1) == FIRST_BYTES
    assert pool.free_bytes == 2 * FIRST_BYTES


def test_the_pool_keeps_no_more_than_its_limit() -> None:
    pool = BufferPool(bytes_max=2 * FIRST_BYTES)
    for _ in range(4):
        pool.put_back(bytearray(FIRST_BYTES))
    assert pool.free_bytes == 2 * FIRST_BYTES


@pytest.mark.parametrize("size", [-1, 0, -(2**31), 100 * 1024 * 1024 + 1, 2**31 - 1])
def test_an_invalid_size_is_refused(size: int) -> None:
    with pytest.raises(MalformedRequest):
        reader().feed(struct.pack(">i", size))


def test_an_announced_size_allocates_no_memory() -> None:
    frames = reader()
    tracemalloc.start()
    try:
        frames.feed(struct.pack(">i", 99 * 1024 * 1024) + b"x")
        assert tracemalloc.get_traced_memory()[1] < 1024 * 1024
    finally:
        tracemalloc.stop()


def test_an_announced_size_takes_no_free_buffer() -> None:
    pool = BufferPool()
    pool.put_back(bytearray(16 * FIRST_BYTES))
    frames = FrameReader(pool, bytearray(64 * 1024))
    frames.feed(struct.pack(">i", 16 * FIRST_BYTES))
    assert frames.held_bytes == FIRST_BYTES, "only a client that just sent as much is trusted"


def test_an_idle_connection_holds_no_buffer() -> None:
    scratch = bytearray(64 * 1024)
    frames = FrameReader(BufferPool(), scratch)
    frames.feed(framed(b"x" * 1000))
    assert not frames.waiting
    assert frames.held_bytes == 0
    assert frames.target().obj is scratch


def test_consecutive_large_requests_are_hardly_copied() -> None:
    pool = BufferPool()
    frames = FrameReader(pool, bytearray(64 * 1024))
    large = bytes(range(256)) * 8192
    [(buffer, _)] = frames.feed(framed(large))
    pool.put_back(buffer)
    assert len(frames.target()) == PEEK_BYTES, "the rest of the next request is read into its own buffer"
    stream = framed(large)
    assert frames.feed(stream[:PEEK_BYTES]) == []
    assert frames.target().obj is buffer and len(frames.target()) == len(stream) - PEEK_BYTES
    assert whole(frames.feed(stream[PEEK_BYTES:])) == [large]
    frames.feed(framed(b"small"))
    assert len(frames.target()) == 64 * 1024, "many small requests are read at once again"
