# How a connection's bytes become requests; see frames.pyx.
cimport cython
from libc.stdint cimport uint8_t


@cython.final
cdef class BufferPool:
    cdef list _free
    cdef Py_ssize_t _bytes
    cdef Py_ssize_t _bytes_max
    cdef Py_ssize_t _unused     # the least that was free since the last trim

    cpdef bytearray take(self, Py_ssize_t size)
    cpdef bytearray take_free(self, Py_ssize_t size)
    cpdef give(self, bytearray buffer)


@cython.final
cdef class FrameReader:
    cdef BufferPool _pool
    cdef bytearray _scratch
    cdef object _scratch_view   # of the whole; as long as it lives, the scratch buffer stays where it is
    cdef Py_ssize_t _max
    cdef uint8_t[4] _head       # the first bytes of a size that is not whole
    cdef int _head_bytes
    cdef bytearray _frame       # a request that is not whole, None if there is none
    cdef Py_ssize_t _size
    cdef Py_ssize_t _filled
    cdef Py_ssize_t _last_large     # bytes of the request before, if it was large

    cdef bint is_inside(self) noexcept
    cpdef object target(self)
    cpdef list arrived(self, Py_ssize_t count)
    cdef list _finish_or_grow(self)
    cdef list _cut(self, const uint8_t* data, Py_ssize_t end)
    cdef int _begin(self, Py_ssize_t size, const uint8_t* data, Py_ssize_t given) except -1
