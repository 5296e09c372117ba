from libc.stdint cimport uint8_t


cdef class Walker:
    cdef readonly long long base, position, next_offset, max_timestamp, records, batches
    cdef readonly unsigned int headers_crc
    cdef readonly long long interval
    cdef long long last_indexed
    cdef public bytearray index
    cdef public bytearray time_index

    cpdef object walk_whole(self, buffers)
    cdef Py_ssize_t walked(self, const uint8_t* p, Py_ssize_t at, Py_ssize_t stop) except -1


cpdef bytes pack_slot(
    long long log_id, long long epoch, long long start, long long visible_end, long long durable_end,
    long long stable_end,
)
cpdef list journal_entry(
    unsigned long long number, unsigned long long sequence, unsigned long long synced, list body
)
cpdef Py_ssize_t total(buffers) except -1
