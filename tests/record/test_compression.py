"""Codecs: round trips, the framings of Kafka's clients, and the limit on the decompressed size."""

import gzip
import json
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import cramjam
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import CorruptBatch, DecompressedTooLarge, UnknownCodec
from headrace.record.codec import LatestOffsets, build, columns, filter_batch, records, scan, validate
from headrace.record.compression import codecs, libzstd
from headrace.record.compression.codecs import (
    GZIP_MEMBERS_MAX,
    XERIAL_BLOCK_BYTES,
    XERIAL_BLOCKS_MAX,
    XERIAL_HEADER,
    compress,
    decompress,
)
from headrace.record.compression.zstd_bounds import outline
from headrace.record.layout import CODEC_NAMES, GZIP, LZ4, SNAPPY, ZSTD
from tests.record import oracle

MB = 1 << 20
NO_LIBRARY = "this system has no libzstd.so.1 (Debian: apt-get install libzstd1)"
COMPRESSING = [GZIP, SNAPPY, LZ4, ZSTD]
TEXT = json.dumps([{"id": i, "name": f"name-{i % 17}", "ok": True} for i in range(5000)]).encode()


@pytest.fixture(scope="module", autouse=True, params=["system libzstd", "cramjam"])
def zstd_decoder(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run every test with both decoders. Which one a broker uses depends on whether libzstd is installed."""
    is_cramjam = request.param == "cramjam"
    if not libzstd.FOUND and not is_cramjam:
        pytest.skip(NO_LIBRARY)
    with pytest.MonkeyPatch.context() as patch:
        if is_cramjam:
            guess = codecs._DECOMPRESS[ZSTD][1]
            patch.setitem(codecs._DECOMPRESS, ZSTD, (codecs._zstd_by_cramjam, guess))
        yield


@given(data=st.binary(min_size=1, max_size=300), index=st.integers(0, 300), change=st.integers(0, 255))
def test_damaged_zstd_data_never_overruns_the_buffer_and_gives_the_same_result_again(
    data: bytes, index: int, change: int
) -> None:
    """Damaged data may decompress to any bytes, and to different ones with another version of the library; the checksum
    of the batch detects that. The result never contains old content of the buffer or of an earlier call."""
    compressed = bytearray(compress(ZSTD, data * 3))
    compressed[index % len(compressed)] ^= change
    decompress_into = codecs._DECOMPRESS[ZSTD][0]

    def decompressed(fill: int) -> bytes | None:
        buffer = bytearray([fill]) * (3 * len(data) + 8)
        try:
            size = decompress_into(bytes(compressed), memoryview(buffer)[:-8])
        except (CorruptBatch, codecs._RoomTooSmall):
            return None
        assert buffer[-8:] == bytes([fill]) * 8
        return bytes(buffer[:size])

    first = decompressed(0)
    assert decompressed(255) == first
    assert change or first == data * 3


@pytest.mark.parametrize("kind", ["raw", "run-length encoded"])
def test_both_decoders_refuse_a_zstd_block_larger_than_the_window(kind: str) -> None:
    """The window is 1 KB, so no block may decompress to more. libzstd accepts such a block in a one-shot call, but
    consumers that decompress streams do not."""
    size, is_run = 2000, kind == "run-length encoded"
    header = (size << 3 | (1 if is_run else 0) << 1 | 1).to_bytes(3, "little")
    compressed = b"\x28\xb5\x2f\xfd" + bytes([0, 0]) + header + (b"x" if is_run else b"x" * size)
    with pytest.raises(CorruptBatch):
        decompress(ZSTD, compressed, 1 << 20)


def test_both_decoders_refuse_a_zstd_window_above_the_default_limit() -> None:
    window_log, last_block = 28, (1 << 3 | 1).to_bytes(3, "little") + b"x"
    compressed = b"\x28\xb5\x2f\xfd" + bytes([0, (window_log - 10) << 3]) + last_block
    with pytest.raises(DecompressedTooLarge):
        decompress(ZSTD, compressed, 1 << 30)


def behind_its_window(window_log: int) -> tuple[bytes, bytes]:
    """Zstd data that declares a smaller window than it uses, and its content for a decoder that needs no window."""
    seed = Random(1).randbytes(1_000_000)
    parameters = zstandard.ZstdCompressionParameters(
        window_log=21, hash_log=20, chain_log=20, strategy=zstandard.STRATEGY_BTOPT, write_content_size=False
    )
    compressed = bytearray(zstandard.ZstdCompressor(compression_params=parameters).compress(seed + seed[:5000]))
    assert len(compressed) < len(seed) + 1000, "the end must be a reference to the beginning"
    compressed[5] = (window_log - 10) << 3
    return bytes(compressed), seed + seed[:5000]


def test_both_decoders_refuse_zstd_data_that_refers_behind_its_window() -> None:
    compressed, data = behind_its_window(20)
    assert decompress(ZSTD, compressed, 4 * MB) == data
    compressed, _ = behind_its_window(17)
    with pytest.raises(CorruptBatch):
        decompress(ZSTD, compressed, 4 * MB)


@pytest.mark.skipif(not libzstd.FOUND, reason=NO_LIBRARY)
def test_zstd_data_that_a_streaming_decoder_would_misread_is_refused() -> None:
    """A streaming decoder copied recent bytes where the data refers to older ones, without an error, so that a broker
    with libzstd and a consumer would read different records."""
    compressed, data = behind_its_window(19)
    buffer = memoryview(bytearray(2 * MB))
    size = codecs._zstd_by_cramjam(compressed, buffer)
    assert size == len(data) and buffer[:size] != data
    with pytest.raises(CorruptBatch, match="behind its window"):
        codecs._by_system_zstd(compressed, buffer)


def test_a_zstd_block_beyond_its_declared_size_is_corrupt_rather_than_too_large() -> None:
    """The header declares 78 bytes in a single segment, so a larger buffer cannot help."""
    compressed = bytes.fromhex("28b52ffd204e0d0100d04de7ca7d81d58d902fd612064643947944302d1e456cc9466f510100a6cf391a")
    with pytest.raises(CorruptBatch):
        decompress(ZSTD, compressed, 1 << 20)


@pytest.mark.parametrize("codec", CODEC_NAMES)
@given(data=st.binary(max_size=1000))
def test_decompressing_returns_the_compressed_data(codec: int, data: bytes) -> None:
    assert decompress(codec, compress(codec, data), len(data)) == data


@pytest.mark.parametrize("codec", COMPRESSING)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_every_buffer_type_can_be_compressed_and_decompressed(codec: int, kind: type) -> None:
    compressed = compress(codec, kind(TEXT))
    assert len(compressed) < len(TEXT) / 3
    assert decompress(codec, kind(compressed), len(TEXT)) == TEXT


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_the_decompressed_size_limit_is_exact(codec: int) -> None:
    compressed = compress(codec, TEXT)
    assert decompress(codec, compressed, len(TEXT)) == TEXT
    for limit in (len(TEXT) - 1, 1000, 1, 0):
        with pytest.raises(DecompressedTooLarge, match=CODEC_NAMES[codec]):
            decompress(codec, compressed, limit)


@pytest.mark.parametrize("codec", COMPRESSING)
def test_data_larger_than_the_first_buffer_is_decompressed(codec: int) -> None:
    """Zeros expand several hundred times: more than the first buffer holds if the size is not declared."""
    data = bytes(3 * MB + 1)
    assert decompress(codec, compress(codec, data), 4 * MB) == data


@pytest.mark.parametrize("codec", COMPRESSING)
def test_truncated_data_never_decompresses_to_a_part(codec: int) -> None:
    """Empty input may decompress to nothing; a cut anywhere else is an error."""
    compressed = compress(codec, b"hello hello hello hello " * 3)
    for cut in range(len(compressed)):
        try:
            found = decompress(codec, compressed[:cut], 1000)
        except CorruptBatch:
            continue
        assert found == b""
        assert cut == (len(XERIAL_HEADER) if codec == SNAPPY else 0)


@pytest.mark.parametrize("codec", COMPRESSING)
def test_data_that_is_not_in_the_format_of_the_codec_is_refused(codec: int) -> None:
    for junk in (b"\x00" * 40, b"\xff" * 40, b"plain text, nothing else" * 3):
        with pytest.raises(CorruptBatch):
            decompress(codec, junk, MB)


@pytest.mark.parametrize("codec", [-1, 5, 6, 7, 100])
def test_an_unknown_codec_is_refused(codec: int) -> None:
    with pytest.raises(UnknownCodec):
        compress(codec, b"")
    with pytest.raises(UnknownCodec):
        decompress(codec, b"", 10)


def xerial(*blocks: bytes, header: bytes = XERIAL_HEADER) -> bytes:
    parts = [bytes(cramjam.snappy.compress_raw(block)) for block in blocks]
    return header + b"".join(struct.pack(">i", len(part)) + part for part in parts)


def test_snappy_is_framed_as_by_the_java_client() -> None:
    compressed = compress(SNAPPY, TEXT)
    assert compressed.startswith(b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01")
    pieces = [TEXT[i : i + XERIAL_BLOCK_BYTES] for i in range(0, len(TEXT), XERIAL_BLOCK_BYTES)]
    assert compressed == xerial(*pieces)


def test_snappy_is_decompressed_with_and_without_xerial_framing() -> None:
    assert decompress(SNAPPY, bytes(cramjam.snappy.compress_raw(TEXT)), len(TEXT)) == TEXT
    assert decompress(SNAPPY, xerial(TEXT), len(TEXT)) == TEXT
    assert decompress(SNAPPY, xerial(b"a", b"", b"bc" * 50_000), MB) == b"a" + b"bc" * 50_000
    assert decompress(SNAPPY, xerial(), MB) == b""


def test_a_vector_of_the_xerial_library_is_decompressed() -> None:
    """From kafka-python's tests, which took it from SnappyOutputStream."""
    vector = (
        b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x18"
        b"\xac\x02\x14SNAPPY\xfe\x06\x00\xfe\x06\x00\xfe\x06\x00\xfe\x06\x00\x96\x06\x00"
        b"\x00\x00\x00\x18\xac\x02\x14XERIAL\xfe\x06\x00\xfe\x06\x00\xfe\x06\x00\xfe\x06\x00\x96\x06\x00"
    )
    assert decompress(SNAPPY, vector, 1000) == b"SNAPPY" * 50 + b"XERIAL" * 50


def test_a_xerial_header_with_little_endian_versions_is_accepted() -> None:
    """Redpanda has written them in little-endian order."""
    header = XERIAL_HEADER[:8] + struct.pack("<ii", 1, 1)
    assert decompress(SNAPPY, xerial(TEXT, header=header), len(TEXT)) == TEXT


@pytest.mark.parametrize(
    "damaged",
    [
        XERIAL_HEADER[:10],
        XERIAL_HEADER + b"\x00\x00",
        XERIAL_HEADER + struct.pack(">i", 100) + b"short",
        XERIAL_HEADER + struct.pack(">i", -1) + b"short",
        XERIAL_HEADER + struct.pack(">i", 0),
        XERIAL_HEADER + struct.pack(">i", 2) + b"\xff\xff",
        XERIAL_HEADER + struct.pack(">i", 5) + b"\xff\xff\xff\xff\x07",
        XERIAL_HEADER + struct.pack(">i", 3) + b"\x05\x04\x61",
        b"\xff\xff\xff\xff\x0f\x00",
        b"\x80\x80\x80\x80\x80\x01",
        b"",
    ],
)
def test_snappy_blocks_with_a_wrong_size_are_refused(damaged: bytes) -> None:
    with pytest.raises(CorruptBatch):
        decompress(SNAPPY, damaged, 2**32)


def test_snappy_data_with_too_many_blocks_is_refused() -> None:
    """Decompressing 16 MB of empty blocks took 640 MB and 13 seconds."""
    block = struct.pack(">i", 1) + b"\x00"
    assert decompress(SNAPPY, XERIAL_HEADER + block * 1000, MB) == b""
    with pytest.raises(CorruptBatch, match="snappy blocks"):
        decompress(SNAPPY, XERIAL_HEADER + block * (XERIAL_BLOCKS_MAX + 1), MB)


def test_gzip_data_with_too_many_members_is_refused() -> None:
    """Decompressing 16 MB of empty members took five seconds."""
    member = compress(GZIP, b"")
    assert decompress(GZIP, member * GZIP_MEMBERS_MAX, MB) == b""
    with pytest.raises(CorruptBatch, match="gzip members"):
        decompress(GZIP, member * (GZIP_MEMBERS_MAX + 1), MB)


def test_lz4_blocks_are_independent() -> None:
    """Kafka's Java client refuses a frame whose blocks are linked."""
    compressed = compress(LZ4, TEXT)
    assert compressed[:4] == b"\x04\x22\x4d\x18"
    assert compressed[4] & 0x20, "the flag for independent blocks"
    assert not compressed[4] & 0x04, "no content checksum, as in the Java client"


def test_all_gzip_members_and_zstd_frames_are_decompressed() -> None:
    assert decompress(GZIP, gzip.compress(b"a" * 9) + gzip.compress(b"b" * 9), 100) == b"a" * 9 + b"b" * 9
    compressor = zstandard.ZstdCompressor()
    assert decompress(ZSTD, compressor.compress(b"a" * 9) + compressor.compress(b"b" * 9), 100) == b"a" * 9 + b"b" * 9


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 65_535, 65_536, 65_792, 100_000, 5 * MB])
@pytest.mark.parametrize("declared", [True, False])
def test_zstd_is_decompressed_with_and_without_a_declared_size(size: int, declared: bool) -> None:
    compressed = zstandard.ZstdCompressor(write_content_size=declared).compress(b"z" * size)
    assert decompress(ZSTD, compressed, size) == b"z" * size


def bomb(codec: int, size: int) -> bytes:
    """A small batch that decompresses to size bytes, or the smallest possible one with snappy."""
    compressed = compress(codec, bytes(size))
    message = oracle.Message(None, b"", [], 1)
    return oracle.batch([message], oracle.Fields(attributes=codec), body=compressed)


@pytest.mark.parametrize("codec", COMPRESSING)
def test_every_reader_refuses_a_decompression_bomb(codec: int) -> None:
    batch = bomb(codec, 8 * MB)
    for call in (
        lambda: validate(batch, decompressed_bytes_max=MB),
        lambda: records(batch, decompressed_bytes_max=MB),
        lambda: columns(batch, decompressed_bytes_max=MB),
        lambda: LatestOffsets().learn(batch, scan(batch)[0], decompressed_bytes_max=MB),
        lambda: filter_batch(batch, scan(batch)[0], (), decompressed_bytes_max=MB),
    ):
        with pytest.raises(DecompressedTooLarge):
            call()


MEMORY_PROGRAM = """
import re, sys
from headrace.errors import DecompressedTooLarge, CorruptBatch
from headrace.record.codec import build, validate
from headrace.record.compression.codecs import decompress
def peak_kb():
    # Not ru_maxrss: a child inherits the value of its parent.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1))
compressed = open(sys.argv[2], "rb").read()
validate(build([(None, b"x" * 1000, (), 1)], codec=int(sys.argv[1])))     # warm up
before = peak_kb()
try:
    decompress(int(sys.argv[1]), compressed, 64 << 20)
except DecompressedTooLarge:
    print(peak_kb() - before)
"""


def gzip_members() -> bytes:
    return gzip.compress(bytes(16 * MB), mtime=0) * 64


def snappy_blocks() -> bytes:
    block = bytes(cramjam.snappy.compress_raw(bytes(MB)))
    return XERIAL_HEADER + (struct.pack(">i", len(block)) + block) * 1024


def lz4_blocks() -> bytes:
    frame = compress(LZ4, bytes(64 * MB))
    return frame[:7] + frame[7:-4] * 16 + frame[-4:]


def zstd_repeats() -> bytes:
    """Run-length blocks with a window of 128 MB, the largest that decoders accept by default."""
    block = struct.pack("<I", (128 * 1024) << 3 | 1 << 1)[:3] + b"\x00"
    return b"\x28\xb5\x2f\xfd\x00" + bytes([17 << 3]) + block * 8192 + b"\x01\x00\x00"


def zstd_blocks(window_log: int) -> bytes:
    """Compressed blocks, whose size is unknown before decompression."""
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, write_content_size=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    pattern = bytes(range(256)) * (MB // 256)
    return b"".join(compressor.compress(pattern) for _ in range(256)) + compressor.flush()


def two_frames() -> bytes:
    return zstandard.ZstdCompressor().compress(b"small") + zstd_blocks(27)


BOMBS: dict[str, tuple[int, Callable[[], bytes]]] = {
    "gzip": (GZIP, gzip_members),
    "snappy": (SNAPPY, snappy_blocks),
    "lz4": (LZ4, lz4_blocks),
    "zstd with run-length blocks": (ZSTD, zstd_repeats),
    "zstd with a window of 2 MB": (ZSTD, lambda: zstd_blocks(21)),
    "zstd with a window of half the limit": (ZSTD, lambda: zstd_blocks(25)),
    "zstd with a window of the limit": (ZSTD, lambda: zstd_blocks(26)),
    "zstd in two frames, the second with a large window": (ZSTD, two_frames),
}


@pytest.mark.process
@pytest.mark.parametrize("name", BOMBS)
def test_a_decompression_bomb_uses_less_than_twice_the_limit_of_memory(name: str, tmp_path: Path) -> None:
    """At least 256 MB against a limit of 64 MB, in a separate process so that the peak is that of the call."""
    codec, make = BOMBS[name]
    path = tmp_path / "bomb"
    path.write_bytes(make())
    program = [sys.executable, "-c", MEMORY_PROGRAM, str(codec), str(path)]
    done = subprocess.run(program, capture_output=True, text=True, check=True)
    grown_kb = int(done.stdout)
    assert grown_kb < 2 * 64 * 1024, f"{grown_kb:,} kB"


@given(
    st.binary(max_size=300),
    st.integers(0, 3000),
    st.integers(1, 19),
    st.booleans(),
    st.booleans(),
    st.integers(10, 23),
)
def test_the_outline_of_zstd_data_bounds_the_decompressed_size(
    seed: bytes, repeats: int, level: int, declared: bool, checksum: bool, window_log: int
) -> None:
    data = seed * repeats
    parameters = zstandard.ZstdCompressionParameters(
        compression_level=level, window_log=window_log, write_content_size=declared, write_checksum=checksum
    )
    compressed = zstandard.ZstdCompressor(compression_params=parameters).compress(data)
    skipped = struct.pack("<II", 0x184D2A57, 5) + b"hello"
    for whole in (compressed, skipped + compressed + skipped):
        found = outline(whole)
        assert found is not None
        least, most, window, narrow = found
        assert least <= len(data) <= most
        assert window >= min(len(data), 1 << window_log)
        assert narrow >= min(window, 1 << window_log)
        assert decompress(ZSTD, whole, max(len(data), 1)) == data
    for cut in range(1, len(compressed)):
        assert outline(compressed[:cut]) is None


@pytest.mark.parametrize("codec", COMPRESSING)
def test_a_record_count_beyond_the_data_is_refused_before_allocating(codec: int) -> None:
    batch = bytearray(build([(None, b"x" * 1000, (), 1)], codec=codec))
    batch[23:27] = struct.pack(">i", 2**31 - 2)
    batch[57:61] = struct.pack(">i", 2**31 - 1)
    signed = oracle.sign(batch)
    for call in (validate, records, columns):
        with pytest.raises(CorruptBatch, match=r"count|more records"):
            call(signed)
