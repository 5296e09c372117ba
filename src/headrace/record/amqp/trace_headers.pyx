# cython: boundscheck=False, wraparound=False
"""Finds the trace headers (W3C Trace Context and Baggage) in the properties of an AMQP message.

They are copied into record headers, so that consumers of other protocols can continue the trace: tracing libraries do not
decode AMQP properties.
"""

from libc.stdint cimport uint8_t, uint16_t, uint64_t
from libc.string cimport memcmp

from headrace.record.amqp.validate cimport BAD, skip_value
from headrace.record.raw cimport get16, get32

cdef enum:
    FLAG_CONTENT_TYPE = 0x8000
    FLAG_CONTENT_ENCODING = 0x4000
    FLAG_HEADERS = 0x2000


cdef inline bint is_trace_name(const uint8_t* name, Py_ssize_t size) noexcept nogil:
    if size == 11:
        return memcmp(name, b"traceparent", 11) == 0
    if size == 10:
        return memcmp(name, b"tracestate", 10) == 0
    return size == 7 and memcmp(name, b"baggage", 7) == 0


cdef inline bint has_name_of(Py_ssize_t size, const Trace* found, int count) noexcept nogil:
    """Compares by length first: no two of the names are equally long."""
    cdef int i
    for i in range(count):
        if found[i].name_size == size:
            return True
    return False


cdef int find_traces(const uint8_t* p, const uint8_t* end, Trace* out) noexcept nogil:
    """Fills `out`, which has room for TRACES_MAX, in the order of the message's headers, and returns their number. The
    first of duplicate names counts. Malformed properties have none."""
    cdef uint16_t flags
    cdef Py_ssize_t size, name_size
    cdef int found = 0, i
    cdef const uint8_t* name
    if end - p < 2:
        return 0
    flags = get16(p)
    if not flags & FLAG_HEADERS:
        return 0
    p += 2
    for i in range(((flags & FLAG_CONTENT_TYPE) != 0) + ((flags & FLAG_CONTENT_ENCODING) != 0)):
        if p >= end or end - p < 1 + <Py_ssize_t>p[0]:
            return 0
        p += 1 + <Py_ssize_t>p[0]
    if end - p < 4 or get32(p) > <uint64_t>(end - p - 4):
        return 0
    end = p + 4 + get32(p)
    p += 4
    while p < end and found < TRACES_MAX:
        name, name_size = p + 1, p[0]
        if end - p < 1 + name_size:
            return 0
        p += 1 + name_size
        size = skip_value(p, end, 1)
        if size == BAD:
            return 0
        if p[0] == b"S" and is_trace_name(name, name_size) and not has_name_of(name_size, out, found):
            out[found] = Trace(name, p + 5, name_size, size - 5)
            found += 1
        p += size
    return found


def traces_of(const uint8_t[::1] properties not None):
    """((name, value), ...) in a message's properties, as copied into the record."""
    cdef Trace found[TRACES_MAX]
    cdef int i, count = 0
    if properties.shape[0]:
        count = find_traces(&properties[0], &properties[0] + properties.shape[0], found)
    return tuple([
        (found[i].name[:found[i].name_size].decode("ascii"), <bytes>found[i].value[:found[i].value_size])
        for i in range(count)
    ])
