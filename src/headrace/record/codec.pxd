# For the wire kernels: from headrace.record.codec cimport BatchWriter, ...
from headrace.record.batch.build cimport (
    APPEND_BAD_TIMESTAMP, APPEND_NO_MEMORY, APPEND_TOO_LARGE, APPENDED, AppendResult, BatchWriter, Part, header_size, put_header,
)
from headrace.record.batch.crc32c cimport crc32c_of
from headrace.record.batch.murmur2 cimport murmur2_of
