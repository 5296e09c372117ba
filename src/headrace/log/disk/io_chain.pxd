cdef class Step:
    cdef readonly int file
    cdef readonly object buffers
    cdef readonly long long position


cdef inline Step new_step(int file, object buffers, long long position):
    cdef Step step = Step.__new__(Step)
    step.file = file
    step.buffers = buffers
    step.position = position
    return step
