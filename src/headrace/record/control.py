"""Control batches: how a transaction ended."""

from headrace.record import codec
from headrace.record.layout import CONTROL_COMMIT
from headrace.record.types import BatchInfo, Buffer


def is_commit(data: Buffer, info: BatchInfo) -> bool:
    """Of a control batch. Its one record's key is a version and a type, 16 bits each."""
    [marker] = codec.records(data, info.position, info.end, control=True)
    return marker.key is not None and int.from_bytes(marker.key[2:4], "big") == CONTROL_COMMIT
