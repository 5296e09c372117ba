from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from headrace.publish_counts cimport PublishCounts
from headrace.wire.amqp.tags cimport TagRing

cdef class Target:
    cdef readonly list owners
    cdef list writers           # of the batches; None until the target is opened
    cdef list batches
    cdef readonly bint slow
    cdef readonly bint durable
    cdef PublishCounts counts

    cdef int open(self) except -1


cdef class Runs:
    cdef list batches
    cdef object last
    cdef uint64_t* firsts
    cdef Py_ssize_t capacity

    cdef int begin(self, uint64_t sequence, batches) except -1


cdef class ChannelState:
    cdef readonly int number
    cdef readonly TagRing tags
    cdef public bint closing
    cdef public bint fast_acks
    cdef public bint tx
    cdef public bint touched_disk
    cdef public uint64_t sequence
    cdef readonly uint64_t messages
    cdef readonly uint64_t dropped
    cdef Runs runs
    cdef bint acked
    cdef bint published
    cdef bint python
    cdef int state
    cdef Target target
    cdef bytes method
    cdef bytes properties
    cdef uint64_t body_left
    cdef uint8_t* body
    cdef Py_ssize_t body_used
    cdef Py_ssize_t body_capacity

    cdef int keep_body(self, const uint8_t* data, Py_ssize_t size) except -1


cdef class Scanner:
    cdef object events
    cdef public uint32_t frame_max
    cdef public uint64_t messages
    cdef public uint64_t bytes
    cdef dict channels
    cdef dict routes
    cdef list published
    cdef list acked
    cdef int64_t version
    cdef int64_t now_ms
    cdef int last_number
    cdef ChannelState last_channel
    cdef bytes last_method
    cdef uint32_t last_size
    cdef Target last_target
    cdef uint8_t* head
    cdef Py_ssize_t head_capacity

    cdef ChannelState channel_of(self, int number)
    cdef int check_version(self) except -1
    cdef bint on_method_frame(self, int number, const uint8_t* p, uint32_t size) except -1
    cdef bint on_publish(self, ChannelState channel, const uint8_t* p, uint32_t size) except -1
    cdef bint on_header_frame(self, int number, const uint8_t* p, uint32_t size) except -1
    cdef bint on_body_frame(self, int number, const uint8_t* p, uint32_t size) except -1
    cdef bint on_content(
        self, ChannelState channel, const uint8_t* properties, Py_ssize_t properties_size,
        const uint8_t* body, Py_ssize_t body_size,
    ) except -1
    cdef int append(
        self, Target target, bytes method, const uint8_t* properties, Py_ssize_t properties_size,
        const uint8_t* body, Py_ssize_t body_size,
    ) except -1
