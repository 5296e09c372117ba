from headrace.log.segments.index cimport Walker


cdef enum:
    INDEX_DUE_BYTES = 4096  # of index entries that are not in the index file yet


cdef class SegmentEnd:
    cdef readonly object segment
    cdef public Walker walker
    cdef public bint is_torn

    cpdef object appended(self, data)
    cpdef object _publish(self)
