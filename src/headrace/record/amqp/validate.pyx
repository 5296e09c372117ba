# cython: boundscheck=False, wraparound=False
"""Validates AMQP properties. The broker stores and delivers them unchanged, and consumers decode them, so every listener
validates them on arrival.
"""

from libc.stdint cimport uint8_t, uint16_t, uint64_t
from libc.string cimport memcmp

from headrace.record.raw cimport get16, get32

cdef enum:
    # Property flags in the order of the list. The lowest bit would announce a second word of flags.
    FLAG_CONTENT_TYPE = 0x8000
    FLAG_CONTENT_ENCODING = 0x4000
    FLAG_HEADERS = 0x2000
    FLAG_DELIVERY_MODE = 0x1000
    FLAG_PRIORITY = 0x0800
    FLAG_CORRELATION_ID = 0x0400
    FLAG_REPLY_TO = 0x0200
    FLAG_EXPIRATION = 0x0100
    FLAG_MESSAGE_ID = 0x0080
    FLAG_TIMESTAMP = 0x0040
    FLAG_TYPE = 0x0020
    FLAG_USER_ID = 0x0010
    FLAG_APP_ID = 0x0008
    FLAG_CLUSTER_ID = 0x0004
    FLAGS_UNKNOWN = 0x0003

    DEPTH_MAX = 16

cdef const char* REPLY_TO_ME = b"amq.rabbitmq.reply-to"


cdef Py_ssize_t skip_value(const uint8_t* p, const uint8_t* end, int depth) noexcept nogil:
    """The size of the field value at p, including its type letter, or BAD."""
    cdef Py_ssize_t left = end - p
    cdef Py_ssize_t size
    if left < 1:
        return BAD
    if p[0] in (b"t", b"b", b"B"):
        size = 2
    elif p[0] in (b"s", b"u", b"U"):
        size = 3
    elif p[0] in (b"I", b"i", b"f"):
        size = 5
    elif p[0] in (b"l", b"L", b"d", b"T"):
        size = 9
    elif p[0] == b"D":
        size = 6
    elif p[0] == b"V":
        size = 1
    elif p[0] in (b"S", b"x", b"F", b"A"):
        if left < 5 or get32(p + 1) > <uint64_t>(left - 5):
            return BAD
        size = 5 + <Py_ssize_t>get32(p + 1)
        if p[0] == b"F" and check_table(p + 5, p + size, depth + 1) == BAD:
            return BAD
        if p[0] == b"A" and check_array(p + 5, p + size, depth + 1) == BAD:
            return BAD
    else:
        return BAD
    return size if size <= left else BAD


cdef int check_array(const uint8_t* p, const uint8_t* end, int depth) noexcept nogil:
    cdef Py_ssize_t size
    if depth > DEPTH_MAX:
        return BAD
    while p < end:
        size = skip_value(p, end, depth)
        if size == BAD:
            return BAD
        p += size
    return PLAIN


cdef int check_table(const uint8_t* p, const uint8_t* end, int depth) noexcept nogil:
    """BAD, NEEDS_DECISION if the outermost table names more receivers (CC, BCC) or claims deaths, or PLAIN."""
    cdef Py_ssize_t size
    cdef int found = PLAIN
    if depth > DEPTH_MAX:
        return BAD
    while p < end:
        if end - p < 1 + <Py_ssize_t>p[0]:
            return BAD
        if depth == 1 and (
            (p[0] == 2 and memcmp(p + 1, b"CC", 2) == 0)
            or (p[0] == 3 and memcmp(p + 1, b"BCC", 3) == 0)
            or (p[0] == 7 and memcmp(p + 1, b"x-death", 7) == 0)
        ):
            found = NEEDS_DECISION
        p += 1 + <Py_ssize_t>p[0]
        size = skip_value(p, end, depth)
        if size == BAD:
            return BAD
        p += size
    return found


cdef int check_properties(const uint8_t* p, const uint8_t* end) noexcept nogil:
    """BAD unless flags and list match exactly, NEEDS_DECISION if a property requires a decision, or PLAIN."""
    cdef uint16_t flags, bit
    cdef int found = PLAIN, inner
    cdef Py_ssize_t size
    if end - p < 2:
        return BAD
    flags = get16(p)
    p += 2
    if flags & FLAGS_UNKNOWN:
        return BAD
    if flags & (FLAG_EXPIRATION | FLAG_USER_ID):
        found = NEEDS_DECISION
    bit = FLAG_CONTENT_TYPE
    while bit >= FLAG_CLUSTER_ID:
        if flags & bit:
            if bit == FLAG_HEADERS:
                if end - p < 4 or get32(p) > <uint64_t>(end - p - 4):
                    return BAD
                size = 4 + <Py_ssize_t>get32(p)
                inner = check_table(p + 4, p + size, 1)
                if inner == BAD:
                    return BAD
                found |= inner
            elif bit == FLAG_DELIVERY_MODE or bit == FLAG_PRIORITY:
                size = 1
            elif bit == FLAG_TIMESTAMP:
                size = 8
            else:
                size = 1 + <Py_ssize_t>p[0] if p < end else 1
            if size > end - p:
                return BAD
            if bit == FLAG_REPLY_TO and size == 22 and memcmp(p + 1, REPLY_TO_ME, 21) == 0:
                found = NEEDS_DECISION        # direct reply-to: the broker replaces it by an address of this channel
            p += size
        bit >>= 1
    return found if p == end else BAD


def properties_fault(const uint8_t[::1] data not None):
    """'bad', 'decision' or 'plain'."""
    if data.shape[0] == 0:
        return "bad"
    return {BAD: "bad", NEEDS_DECISION: "decision"}.get(
        check_properties(&data[0], &data[0] + data.shape[0]), "plain")
