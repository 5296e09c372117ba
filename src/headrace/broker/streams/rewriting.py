"""Batches that a topic's settings do not let stay as they came: another codec, or the broker's time."""

from headrace.errors import CorruptBatch
from headrace.record.batch.crc32c import crc32c
from headrace.record.compression import codecs
from headrace.record.layout import (
    ATTRIBUTES_AT,
    CODEC_MASK,
    CRC_AT,
    LENGTH_AT,
    LOG_APPEND_TIME_BIT,
    MAX_TIMESTAMP_AT,
    PREFIX_BYTES,
    RECORDS_AT,
)


def recompress(batch: memoryview, codec: int, decompressed_bytes_max: int) -> bytearray:
    """One whole, valid batch with its records under another codec."""
    attributes = int.from_bytes(batch[ATTRIBUTES_AT : ATTRIBUTES_AT + 2], "big")
    records = codecs.decompress(attributes & CODEC_MASK, batch[RECORDS_AT:], decompressed_bytes_max)
    result = bytearray(batch[:RECORDS_AT])
    result += codecs.compress(codec, records)
    attributes = (attributes & ~CODEC_MASK) | codec
    result[ATTRIBUTES_AT : ATTRIBUTES_AT + 2] = attributes.to_bytes(2, "big")
    result[LENGTH_AT : LENGTH_AT + 4] = (len(result) - PREFIX_BYTES).to_bytes(4, "big")
    seal(result)
    return result


def stamp(batch: bytearray | memoryview, now_ms: int) -> None:
    """The broker's time for all records of a whole, valid batch, in place."""
    if len(batch) < RECORDS_AT:
        raise CorruptBatch("shorter than a header")
    attributes = int.from_bytes(batch[ATTRIBUTES_AT : ATTRIBUTES_AT + 2], "big") | LOG_APPEND_TIME_BIT
    batch[ATTRIBUTES_AT : ATTRIBUTES_AT + 2] = attributes.to_bytes(2, "big")
    batch[MAX_TIMESTAMP_AT : MAX_TIMESTAMP_AT + 8] = now_ms.to_bytes(8, "big")
    seal(batch)


def seal(batch: bytearray | memoryview) -> None:
    checksum = crc32c(memoryview(batch)[ATTRIBUTES_AT:])
    batch[CRC_AT : CRC_AT + 4] = checksum.to_bytes(4, "big")
