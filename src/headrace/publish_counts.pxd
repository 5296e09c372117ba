from libc.stdint cimport int64_t

cdef class PublishCounts:
    cdef public int64_t published   # messages
    cdef public int64_t routed      # copies: one for each queue that the message was routed to
    cdef public int64_t returned    # to their publisher: mandatory, and routed to no queue
    cdef public int64_t dropped     # neither mandatory nor routed to a queue
    cdef public int64_t confirmed   # counted for a whole vhost only
