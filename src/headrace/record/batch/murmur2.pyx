# cython: boundscheck=False, wraparound=False, cdivision=True
"""Maps keys to partitions with murmur2, exactly as every Kafka client does."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, uint8_t, uint32_t

from headrace.errors import InvalidInput


cdef int32_t murmur2_of(const uint8_t* data, Py_ssize_t length) noexcept nogil:
    cdef uint32_t m = 0x5BD1E995
    cdef uint32_t h = <uint32_t>0x9747B28C ^ <uint32_t>length
    cdef uint32_t k
    cdef const uint8_t* p = data
    while length >= 4:
        k = <uint32_t>p[0] | <uint32_t>p[1] << 8 | <uint32_t>p[2] << 16 | <uint32_t>p[3] << 24
        k *= m
        k ^= k >> 24
        k *= m
        h = (h * m) ^ k
        p += 4
        length -= 4
    if length >= 3:
        h ^= <uint32_t>p[2] << 16
    if length >= 2:
        h ^= <uint32_t>p[1] << 8
    if length >= 1:
        h ^= <uint32_t>p[0]
        h *= m
    h ^= h >> 13
    h *= m
    h ^= h >> 15
    return <int32_t>h


cdef int32_t _of_buffer(key) except? 0:
    cdef Py_buffer view
    cdef int32_t found
    PyObject_GetBuffer(key, &view, PyBUF_SIMPLE)
    found = murmur2_of(<const uint8_t*>view.buf, view.len)
    PyBuffer_Release(&view)
    return found


def murmur2(key):
    """The hash as a signed 32-bit integer, as in Java."""
    return _of_buffer(key)


def partition_for(key, int32_t partitions):
    """The partition of a key in a topic with that many partitions, the same as every Kafka client computes."""
    if partitions < 1:
        raise InvalidInput("a stream has at least one partition")
    return (<uint32_t>_of_buffer(key) & 0x7FFFFFFF) % <uint32_t>partitions
