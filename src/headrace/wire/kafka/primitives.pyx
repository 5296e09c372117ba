# cython: boundscheck=False, wraparound=False, cdivision=True
"""The primitive types of the Kafka protocol.

Every read is bounds-checked, a count is accepted only if the remaining bytes could hold so many elements, and no memory
is allocated because of a length alone.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from headrace.errors import MalformedRequest


cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL


cdef enum:
    STRING_BYTES_MAX = 0x7FFF   # in every version, as in Kafka: a response of an older version has no room for more
    MESSAGE_CHARS_MAX = 1000


cdef class Reader:
    """Reads one request. Holds the buffer until it is deallocated."""

    def __init__(self, buffer, Py_ssize_t position=0, Py_ssize_t end=-1):
        self.begin(buffer, position, end)

    cdef int begin(self, buffer, Py_ssize_t position, Py_ssize_t end) except -1:
        if self.held:
            raise ValueError("a Reader can read only one buffer")
        PyObject_GetBuffer(buffer, &self.view, PyBUF_SIMPLE)
        self.held = True
        self.data = <const uint8_t*> self.view.buf
        self.end = self.view.len if end < 0 or end > self.view.len else end
        if position < 0 or position > self.end:
            raise MalformedRequest(f"position {position} is outside {self.end} bytes")
        self.position = position
        return 0

    def __dealloc__(self):
        if self.held:
            PyBuffer_Release(&self.view)

    cdef int need(self, Py_ssize_t size) except -1:
        if size < 0 or size > self.end - self.position:
            raise MalformedRequest(f"{size} bytes needed at position {self.position}, {self.end - self.position} left")
        return 0

    cdef int64_t int8(self) except? -1:
        self.need(1)
        cdef int64_t value = <signed char> self.data[self.position]
        self.position += 1
        return value

    cdef int64_t int16(self) except? -1:
        self.need(2)
        cdef const uint8_t* p = self.data + self.position
        self.position += 2
        return <int16_t> ((p[0] << 8) | p[1])

    cdef int64_t int32(self) except? -1:
        self.need(4)
        cdef const uint8_t* p = self.data + self.position
        self.position += 4
        return <int32_t> ((<uint32_t> p[0] << 24) | (<uint32_t> p[1] << 16) | (<uint32_t> p[2] << 8) | p[3])

    cdef int64_t int64(self) except? -1:
        self.need(8)
        cdef uint64_t value = 0
        cdef int i
        for i in range(8):
            value = (value << 8) | self.data[self.position + i]
        self.position += 8
        return <int64_t> value

    cdef uint32_t unsigned_varint(self) except? 0xFFFFFFFF:
        cdef uint64_t value = 0
        cdef int shift = 0
        cdef uint8_t byte
        while True:
            self.need(1)
            byte = self.data[self.position]
            self.position += 1
            value |= (<uint64_t> (byte & 0x7F)) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 28:
                raise MalformedRequest(f"varint at {self.position} is longer than 5 bytes")
        if value > 0xFFFFFFFE:
            raise MalformedRequest(f"varint at {self.position} is out of range")
        return <uint32_t> value

    cdef Py_ssize_t length(self, bint flexible, bint wide, bint nullable) except? -2:
        """The length of a string (narrow) or octets (wide), checked against the remaining bytes; -1 is null."""
        cdef Py_ssize_t size
        if flexible:
            size = <Py_ssize_t> self.unsigned_varint() - 1
        elif wide:
            size = self.int32()
        else:
            size = self.int16()
        if size < 0:
            if size == -1 and nullable:
                return -1
            raise MalformedRequest(f"length {size} at {self.position}")
        if not wide and size > STRING_BYTES_MAX:
            raise MalformedRequest(f"string of {size:,} bytes at {self.position} is too long")
        self.need(size)
        return size

    cdef Py_ssize_t count(self, bint flexible, bint nullable, Py_ssize_t element_bytes_min) except? -2:
        cdef Py_ssize_t size
        if flexible:
            size = <Py_ssize_t> self.unsigned_varint() - 1
        else:
            size = self.int32()
        if size < 0:
            if size == -1 and nullable:
                return -1
            raise MalformedRequest(f"array of {size} at {self.position}")
        if size * element_bytes_min > self.end - self.position:
            raise MalformedRequest(f"array of {size} at {self.position}, {self.end - self.position} bytes left")
        return size

    cdef object string(self, bint flexible, bint nullable):
        cdef Py_ssize_t size = self.length(flexible, False, nullable)
        if size < 0:
            return None
        cdef const char* start = <const char*> self.data + self.position
        self.position += size
        try:
            return PyUnicode_DecodeUTF8(start, size, NULL)
        except UnicodeDecodeError as error:
            raise MalformedRequest(f"string before {self.position} is not UTF-8") from error

    cdef object octets(self, bint flexible, bint nullable):
        cdef Py_ssize_t size = self.length(flexible, True, nullable)
        if size < 0:
            return None
        return self.fixed(size)

    cdef bytes fixed(self, Py_ssize_t size):
        self.need(size)
        cdef bytes value = PyBytes_FromStringAndSize(<const char*> self.data + self.position, size)
        self.position += size
        return value

    cdef int skip_tags(self) except -1:
        cdef uint32_t left = self.unsigned_varint()
        cdef uint32_t size
        while left:
            self.unsigned_varint()
            size = self.unsigned_varint()
            self.need(size)
            self.position += size
            left -= 1
        return 0


cdef Reader reader_of(buffer, Py_ssize_t position, Py_ssize_t end):
    """Reader(buffer, position, end) without the cost of Python arguments: one is made for every request."""
    cdef Reader reader = Reader.__new__(Reader)
    reader.begin(buffer, position, end)
    return reader


cdef class Writer:
    """Collects one response in a buffer of its own."""

    def __cinit__(self, Py_ssize_t capacity=256):
        self.data = <uint8_t*> malloc(capacity)
        if self.data == NULL:
            raise MemoryError
        self.capacity = capacity
        self.size = 0

    def __dealloc__(self):
        free(self.data)

    cdef int reserve(self, Py_ssize_t more) except -1:
        cdef Py_ssize_t wanted = self.size + more
        cdef uint8_t* larger
        if wanted <= self.capacity:
            return 0
        while self.capacity < wanted:
            self.capacity *= 2
        larger = <uint8_t*> realloc(self.data, self.capacity)
        if larger == NULL:
            raise MemoryError
        self.data = larger
        return 0

    cdef int int8(self, int64_t value) except -1:
        self.reserve(1)
        self.data[self.size] = <uint8_t> value
        self.size += 1
        return 0

    cdef int int16(self, int64_t value) except -1:
        self.reserve(2)
        self.data[self.size] = <uint8_t> (value >> 8)
        self.data[self.size + 1] = <uint8_t> value
        self.size += 2
        return 0

    cdef int int32(self, int64_t value) except -1:
        self.reserve(4)
        self.put_int32_at(self.size, value)
        self.size += 4
        return 0

    cdef int int64(self, int64_t value) except -1:
        cdef int i
        self.reserve(8)
        for i in range(8):
            self.data[self.size + i] = <uint8_t> (<uint64_t> value >> (56 - 8 * i))
        self.size += 8
        return 0

    cdef int unsigned_varint(self, uint64_t value) except -1:
        self.reserve(10)
        while value >= 0x80:
            self.data[self.size] = <uint8_t> (value | 0x80)
            self.size += 1
            value >>= 7
        self.data[self.size] = <uint8_t> value
        self.size += 1
        return 0

    cdef int length(self, Py_ssize_t value, bint flexible, bint wide) except -1:
        """-1 is null."""
        if flexible:
            return self.unsigned_varint(value + 1)
        if wide:
            return self.int32(value)
        if value > STRING_BYTES_MAX:
            raise OverflowError(f"string of {value} bytes is too long")
        return self.int16(value)

    cdef int count(self, Py_ssize_t value, bint flexible) except -1:
        return self.unsigned_varint(value + 1) if flexible else self.int32(value)

    cdef int raw(self, const uint8_t* source, Py_ssize_t size) except -1:
        self.reserve(size)
        memcpy(self.data + self.size, source, size)
        self.size += size
        return 0

    cdef int octets(self, object value, bint flexible) except -1:
        cdef Py_buffer view
        if value is None:
            return self.length(-1, flexible, True)
        PyObject_GetBuffer(value, &view, PyBUF_SIMPLE)
        try:
            self.length(view.len, flexible, True)
            self.raw(<const uint8_t*> view.buf, view.len)
        finally:
            PyBuffer_Release(&view)
        return 0

    cdef int fixed(self, bytes value) except -1:
        return self.raw(<const uint8_t*> PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value))

    cdef int string(self, str value, bint flexible) except -1:
        cdef Py_ssize_t size = 0
        cdef const char* text
        if value is None:
            return self.length(-1, flexible, False)
        text = PyUnicode_AsUTF8AndSize(value, &size)
        self.length(size, flexible, False)
        return self.raw(<const uint8_t*> text, size)

    cdef int message(self, str value, bint flexible) except -1:
        """Write an error message. It may contain a name of any length, so it is truncated."""
        if value is not None and len(value) > MESSAGE_CHARS_MAX:
            value = value[:MESSAGE_CHARS_MAX]
        return self.string(value, flexible)

    cdef void put_int32_at(self, Py_ssize_t position, int64_t value) noexcept:
        self.data[position] = <uint8_t> (value >> 24)
        self.data[position + 1] = <uint8_t> (value >> 16)
        self.data[position + 2] = <uint8_t> (value >> 8)
        self.data[position + 3] = <uint8_t> value

    cdef bytes finish(self):
        return PyBytes_FromStringAndSize(<const char*> self.data, self.size)
