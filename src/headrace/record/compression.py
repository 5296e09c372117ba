"""The codecs of a batch: gzip, snappy, lz4, zstd. What unfolds is bounded before it is written.

No size that the data declares is trusted: it is a first guess for the buffer, capped by the limit, and the
buffer grows only as far as the data really fills it.
"""

import struct

import cramjam

from headrace.errors import CorruptBatch, DecompressedTooLarge, UnknownCodec
from headrace.record.layout import CODEC_NAMES, GZIP, LZ4, NONE, SNAPPY, ZSTD
from headrace.record.types import Buffer

# Kafka's defaults, except lz4: its default of 9 costs ten times the CPU for a few per cent.
GZIP_LEVEL = 6
LZ4_LEVEL = 1
ZSTD_LEVEL = 3

XERIAL_MAGIC = b"\x82SNAPPY\x00"
XERIAL_HEADER = XERIAL_MAGIC + struct.pack(">ii", 1, 1)
XERIAL_BLOCK_BYTES = 32 * 1024
SNAPPY_RATIO_MAX = 22  # the densest snappy element gives 64 bytes for 3

GUESS_BYTES_MIN = 64 * 1024
GUESS_RATIO = 6
_FULL = "failed to write whole buffer"


def compress(codec: int, data: Buffer) -> bytes:
    match codec:
        case 0:
            return bytes(data)
        case 1:
            return bytes(cramjam.gzip.compress(data, level=GZIP_LEVEL))
        case 2:
            return _compress_xerial(memoryview(data))
        case 3:
            # Java clients refuse blocks that lean on the block before.
            lz4 = cramjam.lz4.Compressor(level=LZ4_LEVEL, content_checksum=False, block_linked=False)
            lz4.compress(bytes(data))
            return bytes(lz4.finish())
        case 4:
            return bytes(cramjam.zstd.compress(data, level=ZSTD_LEVEL))
    raise UnknownCodec(f"no codec has the number {codec}")


def decompress(codec: int, data: Buffer, limit_bytes: int) -> bytes:
    """At most limit_bytes, or DecompressedTooLarge. Bytes that are not of this codec: CorruptBatch."""
    if codec == NONE:
        if len(data) > limit_bytes:
            raise _too_large(codec, limit_bytes)
        return bytes(data)
    if codec == SNAPPY:
        return _decompress_snappy(memoryview(data).cast("B"), limit_bytes)
    unfold = _UNFOLD.get(codec)
    if unfold is None:
        raise UnknownCodec(f"no codec has the number {codec}")
    size = min(limit_bytes, max(GUESS_BYTES_MIN, GUESS_RATIO * len(data)))
    while True:
        out = bytearray(size)
        try:
            written = unfold(data, out)
        except cramjam.DecompressionError as error:
            if _FULL not in str(error):
                raise CorruptBatch(f"not {CODEC_NAMES[codec]} data: {error}") from None
            if size >= limit_bytes:
                raise _too_large(codec, limit_bytes) from None
            size = min(limit_bytes, size * 4)
        else:
            return bytes(memoryview(out)[:written])


_UNFOLD = {
    GZIP: cramjam.gzip.decompress_into,
    LZ4: cramjam.lz4.decompress_into,
    ZSTD: cramjam.zstd.decompress_into,
}


def _too_large(codec: int, limit_bytes: int) -> DecompressedTooLarge:
    return DecompressedTooLarge(f"{CODEC_NAMES[codec]} data unfolds past the limit of {limit_bytes:,} bytes")


def _compress_xerial(data: memoryview) -> bytes:
    parts = [XERIAL_HEADER]
    for at in range(0, len(data), XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(data[at : at + XERIAL_BLOCK_BYTES]))
        parts.append(struct.pack(">i", len(block)))
        parts.append(block)
    return b"".join(parts)


def _decompress_snappy(data: memoryview, limit_bytes: int) -> bytes:
    blocks = list(_xerial_blocks(data)) if data[:8] == XERIAL_MAGIC else [data]
    sizes = [_snappy_size(block) for block in blocks]
    if sum(sizes) > limit_bytes:
        raise _too_large(SNAPPY, limit_bytes)
    out = bytearray(sum(sizes))
    view = memoryview(out)
    at = 0
    for block, size in zip(blocks, sizes, strict=True):
        try:
            written = cramjam.snappy.decompress_raw_into(block, view[at : at + size]) if size else 0
        except cramjam.DecompressionError as error:
            raise CorruptBatch(f"not snappy data: {error}") from None
        if written != size:
            raise CorruptBatch("a snappy block is shorter than it says")
        at += size
    return bytes(out)


def _xerial_blocks(data: memoryview) -> "list[memoryview]":
    blocks = []
    at = len(XERIAL_HEADER)
    while at < len(data):
        if len(data) - at < 4:
            raise CorruptBatch("a snappy block is cut short")
        (size,) = struct.unpack_from(">i", data, at)
        at += 4
        if not 0 <= size <= len(data) - at:
            raise CorruptBatch("a snappy block is longer than the data")
        blocks.append(data[at : at + size])
        at += size
    return blocks


def _snappy_size(block: memoryview) -> int:
    """The size the block declares, once it is one that the block could hold."""
    size = 0
    for i, byte in enumerate(block[:5]):
        size |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            if size > SNAPPY_RATIO_MAX * len(block):
                raise CorruptBatch("a snappy block declares more than it can hold")
            return size
    raise CorruptBatch("a snappy block has no size")
