"""The one place to import the batch kernels from; build, scan, decode and the rest are how they are cut."""

from headrace.record.arrow.read import columns
from headrace.record.batch.build import BatchWriter, build, encode_headers
from headrace.record.batch.decode import first_at, records
from headrace.record.batch.filter import filter_batch
from headrace.record.batch.latest_by_key import LatestOffsets, keep_latest, keep_listed
from headrace.record.batch.murmur2 import murmur2, partition_for
from headrace.record.batch.scan import epochs_until, patch, patch_run, scan, trim, valid_until, validate

__all__ = [
    "BatchWriter",
    "LatestOffsets",
    "build",
    "columns",
    "encode_headers",
    "epochs_until",
    "filter_batch",
    "first_at",
    "keep_latest",
    "keep_listed",
    "murmur2",
    "partition_for",
    "patch",
    "patch_run",
    "records",
    "scan",
    "trim",
    "valid_until",
    "validate",
]
