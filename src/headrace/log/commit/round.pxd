from headrace.log.commit.file_ends cimport TailEnd


cdef class Ticket:
    cdef public bint done
    cdef public object error
    cdef public long long base_offset, next_offset
    cdef object _callback, _make_future
    cdef list _more

    cpdef object add_callback(self, callback)
    cpdef object resolve(self, error=*)
    cdef int call_all(self, first, list more) except -1


cdef class TicketGroup:
    cdef object _callback
    cdef Py_ssize_t _unresolved
    cdef readonly bint has_errors

    cpdef object add(self, Ticket ticket)
    cpdef object close(self)


cdef class LogEnd:
    cdef readonly str slug
    cdef public long long id, start_offset, next_offset, visible_end, durable_end, unflushed_bytes
    cdef public int epoch
    cdef public list epochs
    cdef object _settings
    cdef readonly object write_mode
    cdef bint _syncs_before_confirm, _goes_through_journal, _rides_alone  # of the write mode
    cdef public object damage
    cdef public bint is_closed, is_deleted, is_frozen
    cdef public TailEnd tail
    cdef public object _stable_limit
    cdef Staging _staging

    cpdef long long stable_below(self, long long end) except? -1
    cpdef tuple ends_at(self, long long next_offset)
    cpdef object check_append(self, batch, infos)


cdef class RoundPart:
    cdef public LogEnd log
    cdef public object data
    cdef public Ticket ticket
    cdef public bint atomic
    cdef public long long base_offset, next_offset


cdef class Unit:
    cdef public Ticket ticket
    cdef public list parts, changes
    cdef public Py_ssize_t size
    cdef public bint lazy, rides_alone

    cdef bint drop_deleted(self) except -1


cdef class Staging:
    cdef readonly object status, pending, defer, make_future
    cdef public object start_round
    cdef public object in_flight
    cdef public Py_ssize_t pending_bytes
    cdef public bint is_scheduled

    cpdef object stage(self, Unit unit)
