from libc.stdint cimport uint8_t

cdef enum:
    TRACES_MAX = 3

cdef struct Trace:
    const uint8_t* name
    const uint8_t* value
    Py_ssize_t name_size
    Py_ssize_t value_size

cdef int find_traces(const uint8_t* p, const uint8_t* end, Trace* out) noexcept nogil
