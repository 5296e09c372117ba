from libc.stdint cimport uint8_t

cdef enum:
    BAD = -1
    PLAIN = 0
    NEEDS_DECISION = 1      # somebody has to look at what a property says

cdef int check_properties(const uint8_t* p, const uint8_t* end) noexcept nogil
