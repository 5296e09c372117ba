"""The one place to import the batch kernels from; build, scan, decode and partition are how they are cut."""

from headrace.record.build import BatchWriter, build, encode_headers
from headrace.record.decode import records
from headrace.record.partition import murmur2, partition_for
from headrace.record.scan import patch, patch_run, scan, trim, valid_until, validate

__all__ = [
    "BatchWriter",
    "build",
    "encode_headers",
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
