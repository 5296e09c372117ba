"""LogAppendTime: one time for all records of a batch, set by the broker."""

from headrace.errors import CorruptBatch
from headrace.record.batch.crc32c import crc32c
from headrace.record.layout import (
    ATTRIBUTES_AT,
    CRC_AT,
    LOG_APPEND_TIME_BIT,
    MAX_TIMESTAMP_AT,
    RECORDS_AT,
)


def stamp_append_time(batch: bytearray | memoryview, now_ms: int) -> None:
    """Give all records of one whole, valid batch the broker's time, in place, and renew the checksum."""
    if len(batch) < RECORDS_AT:
        raise CorruptBatch("the batch is shorter than its header")
    attributes = int.from_bytes(batch[ATTRIBUTES_AT : ATTRIBUTES_AT + 2], "big") | LOG_APPEND_TIME_BIT
    batch[ATTRIBUTES_AT : ATTRIBUTES_AT + 2] = attributes.to_bytes(2, "big")
    batch[MAX_TIMESTAMP_AT : MAX_TIMESTAMP_AT + 8] = now_ms.to_bytes(8, "big")
    batch[CRC_AT : CRC_AT + 4] = crc32c(memoryview(batch)[ATTRIBUTES_AT:]).to_bytes(4, "big")
