from cpython.buffer cimport Py_buffer
from libc.stdint cimport uint8_t

from headrace.record.batch_layout cimport Batch


cdef class Payload:
    """The uncompressed records of a batch: in place, or decompressed into bytes that this object keeps alive."""
    cdef const uint8_t* start
    cdef const uint8_t* end
    cdef Py_buffer _view
    cdef bint _held

    cdef int open(self, object buf, const uint8_t* base, Py_ssize_t at, const Batch* batch, Py_ssize_t limit) except -1
    cdef void close(self) noexcept
