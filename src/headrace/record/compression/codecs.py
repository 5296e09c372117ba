"""Batch compression and decompression: gzip, snappy, lz4 and zstd.

Decompression never writes more than its limit. A size that the data declares is only a guess for the size of the
first output buffer, capped by the limit. The pages of that buffer cost memory only as far as the data fills them.
"""

import struct
from collections.abc import Callable

import cramjam

from headrace.errors import CorruptBatch, DecompressedTooLarge, UnknownCodec
from headrace.record.compression import libzstd
from headrace.record.compression.scratch import filled
from headrace.record.compression.zstd_bounds import outline
from headrace.record.layout import CODEC_NAMES, GZIP, LZ4, NONE, SNAPPY, ZSTD
from headrace.record.types import Buffer

# Kafka's defaults, except for lz4: on JSON, Kafka's level 9 took twenty times the CPU of level 1 and saved 30 % of the
# bytes (zstd saves more for less CPU).
GZIP_LEVEL = 6
LZ4_LEVEL = 1
ZSTD_LEVEL = 3

# Kafka's Java client writes snappy in the format of xerial's SnappyOutputStream: a header, then blocks of raw snappy,
# each preceded by its size. Other clients send raw snappy without this framing.
XERIAL_MAGIC = b"\x82SNAPPY\x00"
XERIAL_HEADER = XERIAL_MAGIC + struct.pack(">ii", 1, 1)
XERIAL_BLOCK_BYTES = 32 * 1024
ZSTD_WINDOW_BYTES = 8 * 1024 * 1024
ZSTD_WINDOW_BYTES_MAX = 128 * 1024 * 1024
SNAPPY_RATIO_MAX = 22  # the densest snappy element encodes 64 bytes in 3
# Each block costs a call and an object: a batch of empty blocks would take 40 times its size in memory, and seconds.
# xerial's blocks have at least 1 KB, so this many blocks hold at least 64 MB.
XERIAL_BLOCKS_MAX = 1 << 16
GZIP_MAGIC = b"\x1f\x8b\x08"
GZIP_MEMBER_BYTES_MIN = 18
GZIP_MEMBERS_MAX = 1 << 14  # each member takes several microseconds to create a decoder; clients write one

GUESS_BYTES_MIN = 4 * 1024
GUESS_RATIO = 6
GROWTH = 4
_FULL = "failed to write whole buffer"  # cramjam's error message if the output does not fit


class _RoomTooSmall(Exception):
    """The decompressed data does not fit the output buffer, whose size was a guess."""


def compress(codec: int, data: Buffer) -> bytes:
    match codec:
        case 0:
            return bytes(data)
        case 1:
            return bytes(cramjam.gzip.compress(data, level=GZIP_LEVEL))
        case 2:
            return _compress_xerial(memoryview(data))
        case 3:
            # Independent blocks: Java clients reject a block that refers to the previous one.
            lz4 = cramjam.lz4.Compressor(level=LZ4_LEVEL, content_checksum=False, block_linked=False)
            lz4.compress(bytes(data))
            return bytes(lz4.finish())
        case 4:
            return bytes(cramjam.zstd.compress(data, level=ZSTD_LEVEL))
    raise UnknownCodec(f"no codec has the number {codec}")


def decompress(codec: int, data: Buffer, limit_bytes: int) -> bytes:
    """The decompressed data. Raises DecompressedTooLarge above limit_bytes and CorruptBatch for invalid data."""
    if codec == NONE:
        if len(data) > limit_bytes:
            raise _too_large(codec, limit_bytes)
        return bytes(data)
    if codec == SNAPPY:
        return _decompress_snappy(memoryview(data), limit_bytes)
    if codec not in _UNFOLD:
        raise UnknownCodec(f"no codec has the number {codec}")
    unfold, guess = _UNFOLD[codec]
    size = min(limit_bytes, max(guess(data, limit_bytes), GUESS_BYTES_MIN, GUESS_RATIO * len(data)))
    while True:
        try:
            return filled(size, lambda room: unfold(data, room))
        except _RoomTooSmall:
            if size >= limit_bytes:
                raise _too_large(codec, limit_bytes) from None
        size = min(limit_bytes, size * GROWTH)


def _too_large(codec: int, limit_bytes: int) -> DecompressedTooLarge:
    return DecompressedTooLarge(f"{CODEC_NAMES[codec]} data unfolds past the limit of {limit_bytes:,} bytes")


def _gzip_guess(data: Buffer, limit_bytes: int) -> int:
    """The size in the trailer, modulo 2^32. Raises CorruptBatch for too many members."""
    # In random data these three bytes occur about once in 16 MB, so valid data does not reach the limit by chance.
    if len(data) > GZIP_MEMBERS_MAX * GZIP_MEMBER_BYTES_MIN and bytes(data).count(GZIP_MAGIC) > GZIP_MEMBERS_MAX:
        raise CorruptBatch(f"more than {GZIP_MEMBERS_MAX:,} gzip members")
    return int.from_bytes(data[-4:], "little") if len(data) >= 18 else 0


def _zstd_guess(data: Buffer, limit_bytes: int) -> int:
    """An upper bound from the block headers: never too small, and at most 128 KB too large per block."""
    found = outline(data)
    if found is None:
        raise CorruptBatch("not zstd data: its blocks do not fill it")
    least, most, window, _ = found
    # A decoder may allocate a window in addition to our output. The window may take half the limit, so that both stay
    # under twice the limit. 8 MB are always allowed, because every decoder should support that; more than 128 MB never,
    # because no decoder accepts that by default.
    if least > limit_bytes or window > min(max(limit_bytes // 2, ZSTD_WINDOW_BYTES), ZSTD_WINDOW_BYTES_MAX):
        raise _too_large(ZSTD, limit_bytes)
    return most


def _lz4_guess(data: Buffer, limit_bytes: int) -> int:
    """The content size in the frame header; 0 if the header has none."""
    return int.from_bytes(data[6:14], "little") if len(data) >= 14 and data[4] & 0x08 else 0


_Unfold = Callable[[Buffer, memoryview], int]  # returns the number of bytes written, or raises _RoomTooSmall


def _by_cramjam(codec: int, decompress_into: _Unfold) -> _Unfold:
    def unfold(data: Buffer, room: memoryview) -> int:
        try:
            return decompress_into(data, room)
        except cramjam.DecompressionError as error:
            if _FULL in str(error):
                raise _RoomTooSmall from None
            raise CorruptBatch(f"not {CODEC_NAMES[codec]} data: {error}") from None

    return unfold


def _by_system_zstd(data: Buffer, room: memoryview) -> int:
    if not len(data):
        raise CorruptBatch("not zstd data: there is none")
    size = libzstd.decompress_into(data, room)
    found = outline(data)
    if found is not None and size > found[3] and not libzstd.streams_the_same(data, room[:size]):
        # This one-pass decoder has the whole output at hand, so it also resolves references beyond the window. The
        # streaming decoder of a consumer has overwritten those bytes by then: it would copy wrong data or fail. The
        # second pass is rarely needed, as few batches are larger than their window.
        raise CorruptBatch("not zstd data: it refers to what lies behind its window")
    if size >= 0:
        return size
    if found is not None and found[1] <= len(room):
        raise CorruptBatch("not zstd data: a block unfolds to more than it may")  # no buffer would be large enough
    raise _RoomTooSmall


_zstd_by_cramjam = _by_cramjam(ZSTD, cramjam.zstd.decompress_into)
_UNFOLD: dict[int, tuple[_Unfold, Callable[[Buffer, int], int]]] = {
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
    """Needs no guess: raw snappy begins with its decompressed size, and its compression ratio has a known maximum."""
    blocks = _xerial_blocks(data) if data[: len(XERIAL_MAGIC)] == XERIAL_MAGIC else [data]
    sizes = [_snappy_size(block) for block in blocks]
    total = sum(sizes)
    if total > limit_bytes:
        raise _too_large(SNAPPY, limit_bytes)

    def unfold(room: memoryview) -> int:
        at = 0
        for block, size in zip(blocks, sizes, strict=True):
            if cramjam.snappy.decompress_raw_into(block, room[at : at + size]) != size:
                raise CorruptBatch("a snappy block is shorter than it says")
            at += size
        return at

    try:
        return filled(total, unfold)
    except cramjam.DecompressionError as error:
        raise CorruptBatch(f"not snappy data: {error}") from None


def _xerial_blocks(data: memoryview) -> list[memoryview]:
    # The two version numbers are ignored: some producers write them in the other byte order.
    blocks = []
    at = len(XERIAL_HEADER)
    if len(data) < at:
        raise CorruptBatch("the snappy header is cut short")
    while at < len(data):
        if len(data) - at < 4:
            raise CorruptBatch("a snappy block is cut short")
        (size,) = struct.unpack_from(">i", data, at)
        at += 4
        if not 0 < size <= len(data) - at:
            raise CorruptBatch("a snappy block does not fit the data")
        blocks.append(data[at : at + size])
        if len(blocks) > XERIAL_BLOCKS_MAX:
            raise CorruptBatch(f"more than {XERIAL_BLOCKS_MAX:,} snappy blocks")
        at += size
    return blocks


def _snappy_size(block: memoryview) -> int:
    """The decompressed size that the block declares. Raises CorruptBatch if a block of this length cannot hold it."""
    size = 0
    for i, byte in enumerate(block[:5]):
        size |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            if size > SNAPPY_RATIO_MAX * len(block):
                raise CorruptBatch("a snappy block declares more than it can hold")
            return size
    raise CorruptBatch("a snappy block has no size")
