# The primitive types of the Kafka protocol, with a bounds check on every read.
cimport cython
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t


@cython.final
@cython.freelist(8)
cdef class Reader:
    cdef const uint8_t* data
    cdef Py_ssize_t position
    cdef Py_ssize_t end
    cdef Py_buffer view
    cdef bint held

    cdef int begin(self, buffer, Py_ssize_t position, Py_ssize_t end) except -1
    cdef int need(self, Py_ssize_t size) except -1
    cdef int64_t int8(self) except? -1
    cdef int64_t int16(self) except? -1
    cdef int64_t int32(self) except? -1
    cdef int64_t int64(self) except? -1
    cdef uint32_t unsigned_varint(self) except? 0xFFFFFFFF
    cdef Py_ssize_t length(self, bint flexible, bint wide, bint nullable) except? -2
    cdef Py_ssize_t count(self, bint flexible, bint nullable, Py_ssize_t element_bytes_min) except? -2
    cdef object string(self, bint flexible, bint nullable)
    cdef object octets(self, bint flexible, bint nullable)
    cdef bytes fixed(self, Py_ssize_t size)
    cdef int skip_tags(self) except -1


cdef Reader reader_of(buffer, Py_ssize_t position, Py_ssize_t end)


cdef class Writer:
    cdef uint8_t* data
    cdef Py_ssize_t size
    cdef Py_ssize_t capacity

    cdef int reserve(self, Py_ssize_t more) except -1
    cdef int int8(self, int64_t value) except -1
    cdef int int16(self, int64_t value) except -1
    cdef int int32(self, int64_t value) except -1
    cdef int int64(self, int64_t value) except -1
    cdef int unsigned_varint(self, uint64_t value) except -1
    cdef int length(self, Py_ssize_t value, bint flexible, bint wide) except -1
    cdef int count(self, Py_ssize_t value, bint flexible) except -1
    cdef int raw(self, const uint8_t* source, Py_ssize_t size) except -1
    cdef int octets(self, object value, bint flexible) except -1
    cdef int fixed(self, bytes value) except -1
    cdef int string(self, str value, bint flexible) except -1
    cdef int message(self, str value, bint flexible) except -1
    cdef void put_int32_at(self, Py_ssize_t position, int64_t value) noexcept
    cdef bytes finish(self)
