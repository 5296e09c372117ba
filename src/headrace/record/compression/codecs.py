"""The codecs of a batch: gzip, snappy, lz4 and zstd. The decompressed size is limited before anything is written.

A size that the data declares is only a guess for the first buffer, capped by the limit. The pages of that buffer take
memory only as far as the data fills them.
"""

import struct
from collections.abc import Callable

import cramjam

from headrace.errors import ChecksumMismatch, CorruptBatch, DecompressedTooLarge, UnknownCodec
from headrace.record.compression import libzstd
from headrace.record.compression.scratch import filled
from headrace.record.compression.zstd_bounds import outline
from headrace.record.layout import CODEC_NAMES, GZIP, LZ4, NONE, SNAPPY, ZSTD
from headrace.record.types import Buffer

# Kafka's defaults, except for lz4: on JSON, level 9 took twenty times the CPU of level 1 and saved 30 % of the bytes
# (zstd saves more for less).
GZIP_LEVEL = 6
LZ4_LEVEL = 1
ZSTD_LEVEL = 3

# Kafka's Java client writes snappy in the format of xerial's SnappyOutputStream: a header, then blocks of raw snappy,
# each preceded by its size. Other clients write raw snappy.
XERIAL_MAGIC = b"\x82SNAPPY\x00"
XERIAL_HEADER = XERIAL_MAGIC + struct.pack(">ii", 1, 1)
XERIAL_BLOCK_BYTES = 32 * 1024
ZSTD_WINDOW_BYTES = 8 * 1024 * 1024
ZSTD_WINDOW_BYTES_MAX = 128 * 1024 * 1024
SNAPPY_RATIO_MAX = 22  # the densest snappy element encodes 64 bytes in 3
# Each block is a call and an object here: a batch of empty blocks would take 40 times its memory, and seconds. With the
# minimum of 1 KB that xerial uses for a block, this many blocks hold 64 MB.
XERIAL_BLOCKS_MAX = 1 << 16
GZIP_MAGIC = b"\x1f\x8b\x08"
GZIP_MEMBER_BYTES_MIN = 18
GZIP_MEMBERS_MAX = 1 << 14  # each needs a decoder, which takes microseconds to create; clients write only one

MAX_BYTES = 1 << 31
GUESS_BYTES_MIN = 4 * 1024
GUESS_RATIO = 6
GROWTH = 4
_FULL = "failed to write whole buffer"  # cramjam's error when the output does not fit


class _RoomTooSmall(Exception):
    """The decompressed data is larger than the buffer."""


def compress(codec: int, data: Buffer) -> bytes:
    match codec:
        case 0:
            return bytes(data)
        case 1:
            return bytes(cramjam.gzip.compress(data, level=GZIP_LEVEL))
        case 2:
            return _compress_xerial(memoryview(data))
        case 3:
            # Java clients refuse blocks that refer to the previous block.
            lz4 = cramjam.lz4.Compressor(level=LZ4_LEVEL, content_checksum=False, block_linked=False)
            lz4.compress(bytes(data))
            return bytes(lz4.finish())
        case 4:
            return bytes(cramjam.zstd.compress(data, level=ZSTD_LEVEL))
    raise UnknownCodec(f"unknown codec {codec}")


def decompress(codec: int, data: Buffer, limit_bytes: int) -> bytes:
    """Raises DecompressedTooLarge past limit_bytes, and CorruptBatch if the data is not in the codec's format."""
    if codec == NONE:
        if len(data) > limit_bytes:
            raise _too_large(codec, limit_bytes)
        return bytes(data)
    if codec == SNAPPY:
        return _decompress_snappy(memoryview(data), limit_bytes)
    if codec not in _DECOMPRESS:
        raise UnknownCodec(f"unknown codec {codec}")
    decompress_into, guess = _DECOMPRESS[codec]
    size = min(limit_bytes, max(guess(data, limit_bytes), GUESS_BYTES_MIN, GUESS_RATIO * len(data)))
    while True:
        try:
            return filled(size, lambda room: decompress_into(data, room))
        except _RoomTooSmall:
            if size >= limit_bytes:
                raise _too_large(codec, limit_bytes) from None
        size = min(limit_bytes, size * GROWTH)


def estimate(codec: int, data: Buffer) -> int:
    """About how many bytes the data decompresses to, without decompressing it. The data may declare a wrong size, so
    this only decides where to decompress it."""
    try:
        if codec == SNAPPY:
            view = memoryview(data)
            if view[: len(XERIAL_MAGIC)] == XERIAL_MAGIC:
                return GUESS_RATIO * len(view)
            return _snappy_size(view)
        if codec in _DECOMPRESS:
            return max(_DECOMPRESS[codec][1](data, MAX_BYTES), len(data))
    except (CorruptBatch, DecompressedTooLarge):
        pass  # decompressing reports it
    return len(data)


def _too_large(codec: int, limit_bytes: int) -> DecompressedTooLarge:
    return DecompressedTooLarge(f"{CODEC_NAMES[codec]} data exceeds the limit of {limit_bytes:,} decompressed bytes")


def _gzip_guess(data: Buffer, limit_bytes: int) -> int:
    """The size in the trailer, modulo 2^32."""
    # By chance these three bytes occur about once in 16 MB.
    if len(data) > GZIP_MEMBERS_MAX * GZIP_MEMBER_BYTES_MIN and bytes(data).count(GZIP_MAGIC) > GZIP_MEMBERS_MAX:
        raise CorruptBatch(f"more than {GZIP_MEMBERS_MAX:,} gzip members")
    return int.from_bytes(data[-4:], "little") if len(data) >= 18 else 0


def _zstd_guess(data: Buffer, limit_bytes: int) -> int:
    """The maximum that the blocks can hold: never too small, and at most 128 KB too large per block."""
    found = outline(data)
    if found is None:
        raise CorruptBatch("not zstd data: the blocks do not cover the data")
    least, most, window, _ = found
    # A decoder may allocate a window besides the output. The window may take half the limit, so that both together stay
    # below twice the limit; 8 MB in any case, which every decoder should accept; and never more than decoders accept by
    # default.
    if least > limit_bytes or window > min(max(limit_bytes // 2, ZSTD_WINDOW_BYTES), ZSTD_WINDOW_BYTES_MAX):
        raise _too_large(ZSTD, limit_bytes)
    return most


def _lz4_guess(data: Buffer, limit_bytes: int) -> int:
    """The content size in the frame header, or 0 if there is none."""
    return int.from_bytes(data[6:14], "little") if len(data) >= 14 and data[4] & 0x08 else 0


_Decompress = Callable[[Buffer, memoryview], int]  # returns the bytes written, or raises _RoomTooSmall


def _by_cramjam(codec: int, decompress_into: _Decompress) -> _Decompress:
    def decompress_into_room(data: Buffer, room: memoryview) -> int:
        try:
            return decompress_into(data, room)
        except cramjam.DecompressionError as error:
            if _FULL in str(error):
                raise _RoomTooSmall from None
            # cramjam has one exception for everything: like a full buffer, a wrong checksum shows in its text only.
            kind = ChecksumMismatch if "checksum" in str(error) or "CRC" in str(error) else CorruptBatch
            raise kind(f"not {CODEC_NAMES[codec]} data: {error}") from None

    return decompress_into_room


def _by_system_zstd(data: Buffer, room: memoryview) -> int:
    if not len(data):
        raise CorruptBatch("not zstd data: it is empty")
    size = libzstd.decompress_into(data, room)
    found = outline(data)
    if found is not None and size > found[3] and not libzstd.streams_the_same(data, room[:size]):
        # Decompressing into one buffer also resolves references to data behind the window. A streaming decoder of a
        # consumer has overwritten those bytes, and fails or returns others. Few batches are larger than their window.
        raise CorruptBatch("not zstd data: it refers to data behind its window")
    if size >= 0:
        return size
    if found is not None and found[1] <= len(room):
        raise CorruptBatch("not zstd data: a block is larger than allowed")  # a larger buffer would not help
    raise _RoomTooSmall


_zstd_by_cramjam = _by_cramjam(ZSTD, cramjam.zstd.decompress_into)
_DECOMPRESS: dict[int, tuple[_Decompress, Callable[[Buffer, int], int]]] = {
    GZIP: (_by_cramjam(GZIP, cramjam.gzip.decompress_into), _gzip_guess),
    LZ4: (_by_cramjam(LZ4, cramjam.lz4.decompress_into), _lz4_guess),
    ZSTD: (_by_system_zstd if libzstd.FOUND else _zstd_by_cramjam, _zstd_guess),
}


def _compress_xerial(data: memoryview) -> bytes:
    parts = [XERIAL_HEADER]
    for at in range(0, len(data), XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(data[at : at + XERIAL_BLOCK_BYTES]))
        parts.append(struct.pack(">i", len(block)))
        parts.append(block)
    return b"".join(parts)


def _decompress_snappy(data: memoryview, limit_bytes: int) -> bytes:
    """Raw snappy starts with its decompressed size, which cannot exceed a known multiple of its compressed size."""
    blocks = _xerial_blocks(data) if data[: len(XERIAL_MAGIC)] == XERIAL_MAGIC else [data]
    sizes = [_snappy_size(block) for block in blocks]
    total = sum(sizes)
    if total > limit_bytes:
        raise _too_large(SNAPPY, limit_bytes)

    def decompress_into_room(room: memoryview) -> int:
        at = 0
        for block, size in zip(blocks, sizes, strict=True):
            if cramjam.snappy.decompress_raw_into(block, room[at : at + size]) != size:
                raise CorruptBatch("a snappy block is shorter than its declared size")
            at += size
        return at

    try:
        return filled(total, decompress_into_room)
    except cramjam.DecompressionError as error:
        raise CorruptBatch(f"not snappy data: {error}") from None


def _xerial_blocks(data: memoryview) -> list[memoryview]:
    # The two version numbers are ignored: some producers write them in the other byte order.
    blocks = []
    at = len(XERIAL_HEADER)
    if len(data) < at:
        raise CorruptBatch("the snappy header is truncated")
    while at < len(data):
        if len(data) - at < 4:
            raise CorruptBatch("a snappy block is truncated")
        (size,) = struct.unpack_from(">i", data, at)
        at += 4
        if not 0 < size <= len(data) - at:
            raise CorruptBatch("a snappy block exceeds the data")
        blocks.append(data[at : at + size])
        if len(blocks) > XERIAL_BLOCKS_MAX:
            raise CorruptBatch(f"more than {XERIAL_BLOCKS_MAX:,} snappy blocks")
        at += size
    return blocks


def _snappy_size(block: memoryview) -> int:
    """The decompressed size that the block declares, if the block can hold that much."""
    size = 0
    for i, byte in enumerate(block[:5]):
        size |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            if size > SNAPPY_RATIO_MAX * len(block):
                raise CorruptBatch("a snappy block declares more than it can hold")
            return size
    raise CorruptBatch("a snappy block has no size")
