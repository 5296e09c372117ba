from headrace.log.disk.io_chain cimport Step
from headrace.log.segments.index cimport Walker


cdef class OpenFile:
    cdef readonly str path
    cdef readonly int file
    cdef public int users


cdef class OpenFiles:
    cdef public object disk
    cdef public object _lock, _idle
    cdef public dict _open
    cdef public set _dirty

    cpdef OpenFile _use(self, OpenFile entry)
    cpdef OpenFile hold(self, str path)
    cpdef object let_go(self, OpenFile entry, bint dirty=*)


cdef class JournalEnd:
    cdef public object _file, _failure
    cdef public long long _file_bytes, _number, _position, _synced
    cdef public long long sequence, bytes_written

    cpdef Step step(self, list buffers)
    cpdef object wrote(self, Step step)
    cpdef Step sync_step(self)
    cpdef object synced_all(self)


cdef class SlotFile:
    cdef public object _file
    cdef public dict _places
    cdef public list _free
    cdef public Py_ssize_t _next

    cpdef Step step(self, ends)
    cpdef Step sequence_step(self, long long sequence)


cdef class SegmentEnd:
    cdef readonly object segment
    cdef public Walker walker
    cdef public bint is_torn

    cpdef object appended(self, data)
    cpdef object _publish(self)


cdef class TailEnd:
    cdef public SegmentEnd writer
    cdef readonly OpenFiles _files
    cdef readonly object _clock
    cdef public object settings
    cdef public dict _written

    cpdef OpenFile hold(self, Py_ssize_t size)
    cpdef bint _is_full(self, SegmentEnd writer, Py_ssize_t size) except -1
