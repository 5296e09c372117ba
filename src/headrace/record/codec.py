"""The API of the batch kernels. Other packages import them from here, not from the modules that implement them."""

from headrace.record.arrow.read import columns
from headrace.record.batch.build import BatchWriter, build, encode_headers
from headrace.record.batch.decode import first_at, records, records_of, value_sizes
from headrace.record.batch.filter import filter_batch
from headrace.record.batch.latest_by_key import LatestOffsets, keep_latest, keep_listed
from headrace.record.batch.murmur2 import murmur2, partition_for
from headrace.record.batch.scan import (
    epochs_until,
    first_compressed,
    patch,
    patch_run,
    scan,
    trim,
    valid_until,
    validate,
)
from headrace.record.layout import CONTROL_COMMIT
from headrace.record.types import BatchInfo, Buffer

__all__ = [
    "BatchWriter",
    "LatestOffsets",
    "build",
    "columns",
    "encode_headers",
    "epochs_until",
    "filter_batch",
    "first_at",
    "first_compressed",
    "is_commit",
    "keep_latest",
    "keep_listed",
    "murmur2",
    "partition_for",
    "patch",
    "patch_run",
    "records",
    "records_of",
    "scan",
    "trim",
    "valid_until",
    "validate",
    "value_sizes",
]


def is_commit(data: Buffer, info: BatchInfo) -> bool:
    """Whether a control batch commits its transaction. The key of its only record is a version and a type, 16 bits
    each."""
    [marker] = records(data, info.position, info.end, control=True)
    return marker.key is not None and int.from_bytes(marker.key[2:4], "big") == CONTROL_COMMIT
