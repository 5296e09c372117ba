# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Bounds of zstd data, without decoding it: its decompressed size and the memory that a decoder needs.

A zstd decoder keeps a window in addition to its output, as large as the frame requests, and four bytes of input can
repeat one byte 128 K times. The frame and block headers alone reveal both. The format is RFC 8878.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t, uint32_t, uint64_t

cdef enum:
    MAGIC = 0xFD2FB528
    SKIPPABLE = 0x184D2A50      # and the next fifteen numbers
    BLOCK_MAX = 128 * 1024
    BLOCK_RAW = 0
    BLOCK_REPEATED = 1
    BLOCK_COMPRESSED = 2
    WINDOW_LOG_MIN = 10

cdef struct Outline:
    uint64_t least              # lower bound of the decompressed size
    uint64_t most               # upper bound of the decompressed size
    uint64_t window             # largest window of any frame
    uint64_t narrow             # smallest window of the frames that could decompress to more than their window


cdef inline uint64_t _little(const uint8_t* p, int width) noexcept nogil:
    cdef uint64_t value = 0
    cdef int i
    for i in range(width):
        value |= <uint64_t>p[i] << (8 * i)
    return value


cdef const uint8_t* _frame(const uint8_t* p, const uint8_t* end, Outline* out) noexcept nogil:
    """The position after the frame whose magic number ends at p, or NULL if the frame is invalid."""
    cdef uint8_t descriptor
    cdef bint single_segment, last = False
    cdef int size_width, dictionary_width
    cdef uint64_t window, block, before = out.most
    cdef uint32_t header, size, kind
    if p >= end:
        return NULL
    descriptor = p[0]
    single_segment = (descriptor >> 5) & 1
    size_width = (1 if single_segment else 0) if descriptor >> 6 == 0 else 1 << (descriptor >> 6)
    dictionary_width = 4 if descriptor & 3 == 3 else descriptor & 3
    if end - p < 1 + (0 if single_segment else 1) + dictionary_width + size_width:
        return NULL
    p += 1
    if single_segment:
        p += dictionary_width
        window = _little(p, size_width) + (256 if size_width == 2 else 0)
    else:
        window = <uint64_t>1 << (WINDOW_LOG_MIN + (p[0] >> 3))
        window += (window // 8) * (p[0] & 7)
        p += 1 + dictionary_width
    p += size_width
    out.window = max(out.window, window)
    block = min(window, <uint64_t>BLOCK_MAX)
    while not last:
        if end - p < 3:
            return NULL
        header = <uint32_t>_little(p, 3)
        last = header & 1
        kind = (header >> 1) & 3
        size = header >> 3
        p += 3
        if size > block:  # streaming decoders reject such a block, one-pass decoders do not
            return NULL
        if kind == BLOCK_REPEATED:
            out.least += size
            out.most += size
            size = 1
        elif kind == BLOCK_RAW:
            out.least += size
            out.most += size
        elif kind == BLOCK_COMPRESSED:
            out.most += block
        else:
            return NULL
        if size > end - p:
            return NULL
        p += size
    if not single_segment and out.most - before > window:
        out.narrow = min(out.narrow, window)
    if descriptor & 4:
        if end - p < 4:
            return NULL
        p += 4
    return p


cdef bint _outline(const uint8_t* p, const uint8_t* end, Outline* out) noexcept nogil:
    cdef uint32_t magic
    cdef uint64_t size
    while p < end:
        if end - p < 8:
            return False
        magic = <uint32_t>_little(p, 4)
        if magic == <uint32_t>MAGIC:
            p = _frame(p + 4, end, out)
            if p == NULL:
                return False
        elif magic & <uint32_t>0xFFFFFFF0 == <uint32_t>SKIPPABLE:
            size = _little(p + 4, 4)
            p += 8
            if size > <uint64_t>(end - p):
                return False
            p += size
        else:
            return False
    return True


def outline(data):
    """(least, most, window, narrow): lower and upper bound of the decompressed size, the largest window that a frame
    requests, and the smallest window of the frames that could decompress to more than their window. None if the data
    is not a sequence of complete frames."""
    cdef Py_buffer view
    cdef Outline out
    cdef bint whole
    out.least = out.most = out.window = 0
    out.narrow = <uint64_t>-1
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        whole = _outline(<const uint8_t*>view.buf, <const uint8_t*>view.buf + view.len, &out)
    finally:
        PyBuffer_Release(&view)
    return (out.least, out.most, out.window, out.narrow) if whole else None
