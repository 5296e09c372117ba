from libc.stdint cimport int32_t, uint8_t

cdef int32_t murmur2_of(const uint8_t* data, Py_ssize_t length) noexcept nogil
