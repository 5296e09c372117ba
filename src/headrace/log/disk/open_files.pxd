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
    cpdef object release(self, OpenFile entry, bint dirty=*)
