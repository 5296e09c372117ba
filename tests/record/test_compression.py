"""Codecs: round trips, the framings that Kafka's clients use, and data that unfolds further than it may."""

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
PACKED = [GZIP, SNAPPY, LZ4, ZSTD]
TEXT = json.dumps([{"id": i, "name": f"name-{i % 17}", "ok": True} for i in range(5000)]).encode()


@pytest.fixture(scope="module", autouse=True, params=["the system's zstd", "cramjam's zstd"])
def zstd_decoder(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everything here holds for both: which of them a broker has depends on its machine."""
    is_ours = request.param == "cramjam's zstd"
    if not libzstd.FOUND and not is_ours:
        pytest.skip(NO_LIBRARY)
    with pytest.MonkeyPatch.context() as patch:
        if is_ours:
            guess = codecs._DECOMPRESS[ZSTD][1]
            patch.setitem(codecs._DECOMPRESS, ZSTD, (codecs._zstd_by_cramjam, guess))
        yield


@given(data=st.binary(min_size=1, max_size=300), place=st.integers(0, 300), change=st.integers(0, 255))
def test_zstd_data_with_a_damaged_byte_fill_their_room_at_most_and_say_the_same_again(
    data: bytes, place: int, change: int
) -> None:
    """What comes out of damage is any bytes, and not the same from two versions of the library: the batch has a
    checksum for that. Nothing of what was in the room, or unfolded before, comes out."""
    packed = bytearray(compress(ZSTD, data * 3))
    packed[place % len(packed)] ^= change
    unfold = codecs._DECOMPRESS[ZSTD][0]

    def said(filling: int) -> bytes | None:
        room = bytearray([filling]) * (3 * len(data) + 8)
        try:
            size = unfold(bytes(packed), memoryview(room)[:-8])
        except (CorruptBatch, codecs._RoomTooSmall):
            return None
        assert room[-8:] == bytes([filling]) * 8
        return bytes(room[:size])

    first = said(0)
    assert said(255) == first
    assert change or first == data * 3


@pytest.mark.parametrize("kind", ["as they are", "one byte repeated"])
def test_a_zstd_block_larger_than_blocks_may_be_is_refused_by_both(kind: str) -> None:
    """The window is 1 KB, and so no block unfolds to more. The system's library takes it if it has all at once, and
    consumers that read streams would not."""
    size, is_repeated = 2000, kind == "one byte repeated"
    header = (size << 3 | (1 if is_repeated else 0) << 1 | 1).to_bytes(3, "little")
    packed = b"\x28\xb5\x2f\xfd" + bytes([0, 0]) + header + (b"x" if is_repeated else b"x" * size)
    with pytest.raises(CorruptBatch):
        decompress(ZSTD, packed, 1 << 20)


def test_a_zstd_window_that_no_decoder_takes_unless_told_to_is_refused_by_both() -> None:
    window_log, last_block = 28, (1 << 3 | 1).to_bytes(3, "little") + b"x"
    packed = b"\x28\xb5\x2f\xfd" + bytes([0, (window_log - 10) << 3]) + last_block
    with pytest.raises(DecompressedTooLarge):
        decompress(ZSTD, packed, 1 << 30)


def behind_its_window(window_log: int) -> tuple[bytes, bytes]:
    """Zstd data that says less of its window than it uses, and what it unfolds to for who has no need of one."""
    seed = Random(1).randbytes(1_000_000)
    parameters = zstandard.ZstdCompressionParameters(
        window_log=21, hash_log=20, chain_log=20, strategy=zstandard.STRATEGY_BTOPT, write_content_size=False
    )
    packed = bytearray(zstandard.ZstdCompressor(compression_params=parameters).compress(seed + seed[:5000]))
    assert len(packed) < len(seed) + 1000, "it refers to the beginning"
    packed[5] = (window_log - 10) << 3
    return bytes(packed), seed + seed[:5000]


def test_zstd_data_that_refer_behind_their_window_are_refused_by_both() -> None:
    packed, data = behind_its_window(20)
    assert decompress(ZSTD, packed, 4 * MB) == data
    packed, _ = behind_its_window(17)
    with pytest.raises(CorruptBatch):
        decompress(ZSTD, packed, 4 * MB)


@pytest.mark.skipif(not libzstd.FOUND, reason=NO_LIBRARY)
def test_zstd_data_of_which_a_decoder_of_streams_makes_other_bytes_are_refused() -> None:
    """It had what it was given last where the data mean what was there before, and said nothing: a broker with the
    library and a consumer read different records."""
    packed, data = behind_its_window(19)
    room = memoryview(bytearray(2 * MB))
    size = codecs._zstd_by_cramjam(packed, room)
    assert size == len(data) and room[:size] != data
    with pytest.raises(CorruptBatch, match="behind its window"):
        codecs._by_system_zstd(packed, room)


def test_a_zstd_block_that_unfolds_to_more_than_it_may_is_damage_and_not_too_much() -> None:
    """It says 78 bytes in its header, and that it is all of them: no room would be enough."""
    packed = bytes.fromhex("28b52ffd204e0d0100d04de7ca7d81d58d902fd612064643947944302d1e456cc9466f510100a6cf391a")
    with pytest.raises(CorruptBatch):
        decompress(ZSTD, packed, 1 << 20)


@pytest.mark.parametrize("codec", CODEC_NAMES)
@given(data=st.binary(max_size=1000))
def test_what_is_compressed_comes_back(codec: int, data: bytes) -> None:
    assert decompress(codec, compress(codec, data), len(data)) == data


@pytest.mark.parametrize("codec", PACKED)
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_will_do(codec: int, kind: type) -> None:
    packed = compress(codec, kind(TEXT))
    assert len(packed) < len(TEXT) / 3
    assert decompress(codec, kind(packed), len(TEXT)) == TEXT


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_the_limit_is_exact(codec: int) -> None:
    packed = compress(codec, TEXT)
    assert decompress(codec, packed, len(TEXT)) == TEXT
    for limit in (len(TEXT) - 1, 1000, 1, 0):
        with pytest.raises(DecompressedTooLarge, match=CODEC_NAMES[codec]):
            decompress(codec, packed, limit)


@pytest.mark.parametrize("codec", PACKED)
def test_data_larger_than_every_guess_is_still_unfolded(codec: int) -> None:
    """All zeros unfold hundreds of times: more than the first buffer holds, when the size is not declared."""
    data = bytes(3 * MB + 1)
    assert decompress(codec, compress(codec, data), 4 * MB) == data


@pytest.mark.parametrize("codec", PACKED)
def test_no_truncation_gives_a_part(codec: int) -> None:
    """Nothing at all may unfold to nothing; what is cut anywhere else is refused."""
    packed = compress(codec, b"hello hello hello hello " * 3)
    for cut in range(len(packed)):
        try:
            found = decompress(codec, packed[:cut], 1000)
        except CorruptBatch:
            continue
        assert found == b""
        assert cut == (len(XERIAL_HEADER) if codec == SNAPPY else 0)


@pytest.mark.parametrize("codec", PACKED)
def test_what_is_not_of_the_codec_is_refused(codec: int) -> None:
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


def test_snappy_is_written_as_the_java_client_writes_it() -> None:
    packed = compress(SNAPPY, TEXT)
    assert packed.startswith(b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01")
    pieces = [TEXT[i : i + XERIAL_BLOCK_BYTES] for i in range(0, len(TEXT), XERIAL_BLOCK_BYTES)]
    assert packed == xerial(*pieces)


def test_snappy_is_read_with_and_without_xerial_framing() -> None:
    assert decompress(SNAPPY, bytes(cramjam.snappy.compress_raw(TEXT)), len(TEXT)) == TEXT
    assert decompress(SNAPPY, xerial(TEXT), len(TEXT)) == TEXT
    assert decompress(SNAPPY, xerial(b"a", b"", b"bc" * 50_000), MB) == b"a" + b"bc" * 50_000
    assert decompress(SNAPPY, xerial(), MB) == b""


def test_a_vector_of_the_xerial_library_is_read() -> None:
    """From kafka-python's tests, which took it from SnappyOutputStream."""
    vector = (
        b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01\x00\x00\x00\x18"
        b"\xac\x02\x14SNAPPY\xfe\x06\x00\xfe\x06\x00\xfe\x06\x00\xfe\x06\x00\x96\x06\x00"
        b"\x00\x00\x00\x18\xac\x02\x14XERIAL\xfe\x06\x00\xfe\x06\x00\xfe\x06\x00\xfe\x06\x00\x96\x06\x00"
    )
    assert decompress(SNAPPY, vector, 1000) == b"SNAPPY" * 50 + b"XERIAL" * 50


def test_xerial_versions_in_the_other_byte_order_are_read() -> None:
    """As Redpanda has written them."""
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
def test_snappy_blocks_that_lie_about_their_size_are_refused(damaged: bytes) -> None:
    with pytest.raises(CorruptBatch):
        decompress(SNAPPY, damaged, 2**32)


def test_snappy_in_more_blocks_than_anybody_writes_is_refused() -> None:
    """16 MB of empty ones took 640 MB and 13 seconds to find out that there is nothing in them."""
    block = struct.pack(">i", 1) + b"\x00"
    assert decompress(SNAPPY, XERIAL_HEADER + block * 1000, MB) == b""
    with pytest.raises(CorruptBatch, match="snappy blocks"):
        decompress(SNAPPY, XERIAL_HEADER + block * (XERIAL_BLOCKS_MAX + 1), MB)


def test_gzip_of_more_members_than_anybody_writes_is_refused() -> None:
    """16 MB of empty ones took five seconds."""
    member = compress(GZIP, b"")
    assert decompress(GZIP, member * GZIP_MEMBERS_MAX, MB) == b""
    with pytest.raises(CorruptBatch, match="gzip members"):
        decompress(GZIP, member * (GZIP_MEMBERS_MAX + 1), MB)


def test_lz4_blocks_do_not_lean_on_each_other() -> None:
    """Kafka's Java client refuses a frame whose blocks are linked."""
    packed = compress(LZ4, TEXT)
    assert packed[:4] == b"\x04\x22\x4d\x18"
    assert packed[4] & 0x20, "the bit that says that blocks are independent"
    assert not packed[4] & 0x04, "no checksum over the content, which Java does not write either"


def test_gzip_of_two_members_and_zstd_of_two_frames_are_read_whole() -> None:
    assert decompress(GZIP, gzip.compress(b"a" * 9) + gzip.compress(b"b" * 9), 100) == b"a" * 9 + b"b" * 9
    packer = zstandard.ZstdCompressor()
    assert decompress(ZSTD, packer.compress(b"a" * 9) + packer.compress(b"b" * 9), 100) == b"a" * 9 + b"b" * 9


@pytest.mark.parametrize("size", [0, 1, 255, 256, 257, 65_535, 65_536, 65_792, 100_000, 5 * MB])
@pytest.mark.parametrize("declared", [True, False])
def test_zstd_with_and_without_its_size_is_read(size: int, declared: bool) -> None:
    packed = zstandard.ZstdCompressor(write_content_size=declared).compress(b"z" * size)
    assert decompress(ZSTD, packed, size) == b"z" * size


def bomb(codec: int, size: int) -> bytes:
    """A small batch that unfolds to size bytes; snappy cannot be small, so it is as small as it gets."""
    packed = compress(codec, bytes(size))
    message = oracle.Message(None, b"", [], 1)
    return oracle.batch([message], oracle.Fields(attributes=codec), packed=packed)


@pytest.mark.parametrize("codec", PACKED)
def test_a_bomb_is_refused_by_every_reader(codec: int) -> None:
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
    # Not ru_maxrss: a child inherits that of the process that started it.
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read()).group(1))
packed = open(sys.argv[2], "rb").read()
validate(build([(None, b"x" * 1000, (), 1)], codec=int(sys.argv[1])))     # warm up
before = peak_kb()
try:
    decompress(int(sys.argv[1]), packed, 64 << 20)
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
    """Blocks that repeat one byte, and a window of 128 MB, the largest that decoders take unasked."""
    block = struct.pack("<I", (128 * 1024) << 3 | 1 << 1)[:3] + b"\x00"
    return b"\x28\xb5\x2f\xfd\x00" + bytes([17 << 3]) + block * 8192 + b"\x01\x00\x00"


def zstd_blocks(window_log: int) -> bytes:
    """Compressed blocks, whose size nobody knows before they are unfolded."""
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, write_content_size=False)
    packer = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    pattern = bytes(range(256)) * (MB // 256)
    return b"".join(packer.compress(pattern) for _ in range(256)) + packer.flush()


def two_frames() -> bytes:
    return zstandard.ZstdCompressor().compress(b"small") + zstd_blocks(27)


BOMBS: dict[str, tuple[int, Callable[[], bytes]]] = {
    "gzip": (GZIP, gzip_members),
    "snappy": (SNAPPY, snappy_blocks),
    "lz4": (LZ4, lz4_blocks),
    "zstd that repeats a byte": (ZSTD, zstd_repeats),
    "zstd with a window of 2 MB": (ZSTD, lambda: zstd_blocks(21)),
    "zstd with a window of half the limit": (ZSTD, lambda: zstd_blocks(25)),
    "zstd with a window of the limit": (ZSTD, lambda: zstd_blocks(26)),
    "zstd in two frames, the second with a large window": (ZSTD, two_frames),
}


@pytest.mark.process
@pytest.mark.parametrize("name", BOMBS)
def test_memory_stays_under_twice_the_limit(name: str, tmp_path: Path) -> None:
    """256 MB or more against a limit of 64 MB, in a process of its own so that the peak is that of the call."""
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
def test_the_outline_of_zstd_data_holds_what_unfolds(
    seed: bytes, repeats: int, level: int, declared: bool, checksum: bool, window_log: int
) -> None:
    data = seed * repeats
    parameters = zstandard.ZstdCompressionParameters(
        compression_level=level, window_log=window_log, write_content_size=declared, write_checksum=checksum
    )
    packed = zstandard.ZstdCompressor(compression_params=parameters).compress(data)
    skipped = struct.pack("<II", 0x184D2A57, 5) + b"hello"
    for whole in (packed, skipped + packed + skipped):
        found = outline(whole)
        assert found is not None
        least, most, window, narrow = found
        assert least <= len(data) <= most
        assert window >= min(len(data), 1 << window_log)
        assert narrow >= min(window, 1 << window_log)
        assert decompress(ZSTD, whole, max(len(data), 1)) == data
    for cut in range(1, len(packed)):
        assert outline(packed[:cut]) is None


@pytest.mark.parametrize("codec", PACKED)
def test_a_count_larger_than_the_records_is_refused_before_room_is_made_for_it(codec: int) -> None:
    batch = bytearray(build([(None, b"x" * 1000, (), 1)], codec=codec))
    batch[23:27] = struct.pack(">i", 2**31 - 2)
    batch[57:61] = struct.pack(">i", 2**31 - 1)
    signed = oracle.sign(batch)
    for call in (validate, records, columns):
        with pytest.raises(CorruptBatch, match=r"count|more records"):
            call(signed)  # type: ignore[operator]
