from libc.stdint cimport int32_t, int64_t

cdef int64_t number_run(object buf, Py_ssize_t start, Py_ssize_t end, int64_t base_offset, int32_t leader_epoch) except -1
cdef list validated(
    object buf, Py_ssize_t batch_bytes_max, Py_ssize_t decompressed_bytes_max, int64_t records_max,
    int64_t headers_max, bint deep, bint repair, bint keyed, Py_ssize_t* left_bytes, bint in_thread,
    int64_t lowest_timestamp, int64_t highest_timestamp,
)
