cimport cython
from libc.stdint cimport int32_t, int64_t, uint64_t

cdef struct Slot:
    int64_t offset
    int32_t source

cdef struct Held:
    uint64_t tag
    Slot slot

cdef struct Folded:
    int64_t start
    int64_t end
    int32_t source

@cython.final
cdef class TagRing:
    cdef Slot* slots
    cdef Py_ssize_t capacity
    cdef uint64_t base
    cdef uint64_t next
    cdef Held* held             # below base, ascending
    cdef Py_ssize_t held_first
    cdef Py_ssize_t held_end
    cdef Py_ssize_t held_capacity
    cdef Py_ssize_t outstanding
    cdef int64_t* counts
    cdef Py_ssize_t sources
    cdef Py_ssize_t sources_capacity
    cdef Folded* folded
    cdef Py_ssize_t folded_count
    cdef Py_ssize_t folded_capacity

    cdef uint64_t push(self, int32_t source, int64_t offset) except 0
    cdef int ack(self, uint64_t tag, bint multiple) except -2
    cdef Slot* find(self, uint64_t tag) noexcept
    cdef Py_ssize_t held_until(self, uint64_t tag) noexcept
    cdef int settle_acked(self, Slot* slot) except -1
    cdef int take_slot(self, Slot* slot, list out) except -1
    cdef int fold(self, int32_t source, int64_t offset) except -1
    cdef void settle_slot(self, Slot* slot) noexcept
    cdef void trim(self) noexcept
    cdef int make_room(self) except -1
    cdef int move_to_held(self, Py_ssize_t live) except -1
