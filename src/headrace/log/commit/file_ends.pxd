from headrace.log.disk.io_chain cimport Step
from headrace.log.disk.open_files cimport OpenFile, OpenFiles
from headrace.log.segments.segment_end cimport SegmentEnd


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


cdef class TailEnd:
    cdef public SegmentEnd writer
    cdef readonly OpenFiles _files
    cdef readonly object _clock
    cdef public object settings
    cdef public dict _written

    cpdef OpenFile hold(self, Py_ssize_t size)
    cpdef bint _is_full(self, SegmentEnd writer, Py_ssize_t size) except -1
