# For the wire kernels: from headrace.record.codec cimport BatchWriter, ...
from headrace.record.build cimport (
    APPEND_BAD_TIMESTAMP, APPEND_NO_MEMORY, APPEND_TOO_LARGE, APPENDED, AppendResult, BatchWriter, Part, header_size, put_header,
)
from headrace.record.checksum cimport crc32c_of
from headrace.record.partition cimport murmur2_of
