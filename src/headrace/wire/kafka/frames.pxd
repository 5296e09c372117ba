# Splits a byte stream into requests; see frames.pyx.
cimport cython
from libc.stdint cimport uint8_t


@cython.final
cdef class BufferPool:
    cdef list _free
    cdef Py_ssize_t _bytes
    cdef Py_ssize_t _bytes_max
    cdef Py_ssize_t _unused     # the minimum of free bytes since the last trim

    cpdef bytearray take(self, Py_ssize_t size)
    cpdef bytearray take_free(self, Py_ssize_t size)
    cpdef put_back(self, bytearray buffer)


@cython.final
cdef class FrameReader:
    cdef BufferPool _pool
    cdef bytearray _scratch
    cdef object _scratch_view   # keeps the scratch buffer from being resized
    cdef Py_ssize_t _max
    cdef uint8_t[4] _head       # bytes of an incomplete size prefix
    cdef int _head_bytes
    cdef bytearray _frame       # an incomplete request, or None
    cdef Py_ssize_t _size
    cdef Py_ssize_t _filled
    cdef Py_ssize_t _last_large     # size of the last request, if it was large

    cdef bint is_inside(self) noexcept
    cpdef object target(self)
    cpdef list arrived(self, Py_ssize_t count)
    cdef list _finish_or_grow(self)
    cdef list _cut(self, const uint8_t* data, Py_ssize_t end)
    cdef int _begin(self, Py_ssize_t size, const uint8_t* data, Py_ssize_t given) except -1
