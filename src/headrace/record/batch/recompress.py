"""The same batch under another codec. Records are not parsed: only the payload is decompressed and compressed again."""

from headrace.record.batch.crc32c import crc32c
from headrace.record.compression.codecs import compress, decompress
from headrace.record.layout import (
    ATTRIBUTES_AT,
    CODEC_MASK,
    CRC_AT,
    DECOMPRESSED_BYTES_MAX,
    HEADER_BYTES,
    LENGTH_AT,
    NONE,
    PREFIX_BYTES,
)
from headrace.record.types import BatchInfo, Buffer


def recompress(
    buf: memoryview,
    info: BatchInfo,
    codec: int,
    *,
    only_if_smaller: bool = True,
    decompressed_bytes_max: int = DECOMPRESSED_BYTES_MAX,
) -> Buffer:
    """The batch that `info` describes, compressed with `codec`.

    Returned as it is if it has that codec already, or, with `only_if_smaller`, if compressing it saves nothing."""
    whole = buf[info.position : info.end]
    if info.codec == codec or info.is_control:
        return whole
    payload = decompress(info.codec, whole[HEADER_BYTES:], decompressed_bytes_max)
    packed: Buffer = payload if codec == NONE else compress(codec, payload)
    if only_if_smaller and codec != NONE and len(packed) >= info.size - HEADER_BYTES:
        return whole
    made = bytearray(whole[:HEADER_BYTES])
    made += packed
    attributes = (info.attributes & ~CODEC_MASK) | codec
    made[LENGTH_AT : LENGTH_AT + 4] = (len(made) - PREFIX_BYTES).to_bytes(4, "big")
    made[ATTRIBUTES_AT : ATTRIBUTES_AT + 2] = (attributes & 0xFFFF).to_bytes(2, "big")
    made[CRC_AT : CRC_AT + 4] = crc32c(memoryview(made)[ATTRIBUTES_AT:]).to_bytes(4, "big")
    return made
