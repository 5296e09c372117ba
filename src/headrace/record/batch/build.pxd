from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t


cdef enum AppendResult:
    APPENDED = 0
    APPEND_NO_MEMORY = -1
    APPEND_TOO_LARGE = -2       # the record would take the batch over its limit; the batch is unchanged
    APPEND_BAD_TIMESTAMP = -3   # the delta to the first timestamp overflows 64 bits; the batch is unchanged


cdef struct Part:
    const uint8_t* data
    Py_ssize_t size


cdef class BatchWriter:
    cdef uint8_t* _buffer
    cdef Py_ssize_t _capacity
    cdef Py_ssize_t _used               # bytes used, including the space for the batch header
    cdef Py_ssize_t _limit
    cdef Py_ssize_t _keep
    cdef int64_t _timestamp             # for records without a timestamp
    cdef int64_t _base_timestamp
    cdef int64_t _max_timestamp
    cdef int32_t _count

    cdef AppendResult append_raw(
        self,
        const uint8_t* key, Py_ssize_t key_size,            # size -1: null
        const uint8_t* value, Py_ssize_t value_size,        # size -1: null
        const uint8_t* headers, Py_ssize_t headers_size,    # encoded headers without their count
        int32_t header_count,
        int64_t timestamp_ms,                               # -1: use the writer's
    ) noexcept nogil
    cdef AppendResult append_parts(
        self,
        const uint8_t* key, Py_ssize_t key_size,
        const Part* parts, Py_ssize_t part_count,           # the value, as consecutive pieces
        const uint8_t* headers, Py_ssize_t headers_size,
        int32_t header_count,
        int64_t timestamp_ms,
    ) noexcept nogil
    cdef uint8_t* open_record(
        self,
        const uint8_t* key, Py_ssize_t key_size,
        Py_ssize_t value_size,
        Py_ssize_t headers_size, int32_t header_count,
        int64_t timestamp_ms,
        AppendResult* result,
    ) noexcept nogil
    cdef AppendResult _reserve(self, Py_ssize_t size) noexcept nogil
    cdef void _write_header(
        self, uint8_t* p, Py_ssize_t size, int16_t attributes,
        int64_t producer_id, int16_t producer_epoch, int32_t base_sequence,
    ) noexcept nogil
    cdef void _reset(self) noexcept


cdef Py_ssize_t header_size(Py_ssize_t name_size, Py_ssize_t value_size) noexcept nogil
cdef uint8_t* put_header(
    uint8_t* p, const uint8_t* name, Py_ssize_t name_size, const uint8_t* value, Py_ssize_t value_size
) noexcept nogil
