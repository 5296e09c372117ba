# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Writes large bytes as JSON strings: as text, or as base64. The size is known before anything is allocated.

Works without the GIL: the encoders of Python and msgspec hold it, and for a value of many megabytes they would stop the
event loop from whichever thread they run in.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t
from libc.string cimport memcpy

from headrace.errors import InvalidInput

cdef uint8_t WIDTHS[256]                # bytes that an ASCII character takes in a JSON string; 0 for others
cdef uint8_t SHORT[32]                  # the letter of a short escape such as \n, or 0
cdef const uint8_t* HEX = b"0123456789abcdef"
cdef const uint8_t* BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"


cdef int _fill_tables() except -1:
    cdef int i
    for i in range(256):
        WIDTHS[i] = 0 if i >= 0x80 else 1 if i >= 0x20 else 6
    WIDTHS[ord('"')] = WIDTHS[ord("\\")] = 2
    for i in range(32):
        SHORT[i] = 0
    for character, letter in (("\b", "b"), ("\t", "t"), ("\n", "n"), ("\f", "f"), ("\r", "r")):
        SHORT[ord(character)] = ord(letter)
        WIDTHS[ord(character)] = 2
    return 0


_fill_tables()


cdef int _sequence(const uint8_t* p, const uint8_t* end) noexcept nogil:
    """The length of the UTF-8 sequence of a character beyond ASCII, or 0 if it is not valid."""
    cdef uint8_t first = p[0]
    cdef uint8_t low = 0x80, high = 0xBF
    cdef int size, i
    if first < 0xC2 or first > 0xF4:
        return 0
    if first < 0xE0:
        size = 2
    elif first < 0xF0:
        size = 3
        if first == 0xE0:
            low = 0xA0          # a shorter sequence exists
        elif first == 0xED:
            high = 0x9F         # surrogates
    else:
        size = 4
        if first == 0xF0:
            low = 0x90
        elif first == 0xF4:
            high = 0x8F         # past the last character
    if end - p < size or p[1] < low or p[1] > high:
        return 0
    for i in range(2, size):
        if p[i] < 0x80 or p[i] > 0xBF:
            return 0
    return size


cdef Py_ssize_t _text_size(const uint8_t* p, const uint8_t* end) noexcept nogil:
    cdef Py_ssize_t size = 2
    cdef int width
    while p < end:
        width = WIDTHS[p[0]]
        if width:
            size += width
            p += 1
            continue
        width = _sequence(p, end)
        if width == 0:
            return -1
        size += width
        p += width
    return size


cdef void _write_text(const uint8_t* p, const uint8_t* end, uint8_t* to) noexcept nogil:
    cdef uint8_t c
    to[0] = c'"'
    to += 1
    while p < end:
        c = p[0]
        p += 1
        if c >= 0x80 or WIDTHS[c] == 1:
            to[0] = c
            to += 1
        elif WIDTHS[c] == 2:
            to[0] = c'\\'
            to[1] = SHORT[c] if c < 32 else c
            to += 2
        else:
            memcpy(to, b"\\u00", 4)
            to[4] = HEX[c >> 4]
            to[5] = HEX[c & 15]
            to += 6
    to[0] = c'"'


cdef void _write_base64(const uint8_t* p, Py_ssize_t size, uint8_t* to) noexcept nogil:
    cdef Py_ssize_t at = 0
    to[0] = c'"'
    to += 1
    while at + 2 < size:
        to[0] = BASE64[p[at] >> 2]
        to[1] = BASE64[(p[at] & 3) << 4 | p[at + 1] >> 4]
        to[2] = BASE64[(p[at + 1] & 15) << 2 | p[at + 2] >> 6]
        to[3] = BASE64[p[at + 2] & 63]
        at += 3
        to += 4
    if size - at == 1:
        to[0] = BASE64[p[at] >> 2]
        to[1] = BASE64[(p[at] & 3) << 4]
        to[2] = to[3] = c'='
        to += 4
    elif size - at == 2:
        to[0] = BASE64[p[at] >> 2]
        to[1] = BASE64[(p[at] & 3) << 4 | p[at + 1] >> 4]
        to[2] = BASE64[(p[at + 1] & 15) << 2]
        to[3] = c'='
        to += 4
    to[0] = c'"'


def text_size(data):
    """The bytes that data takes as a JSON string, with quotes; -1 if it is not UTF-8."""
    cdef Py_buffer view
    cdef Py_ssize_t size
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            size = _text_size(<const uint8_t*>view.buf, <const uint8_t*>view.buf + view.len)
        return size
    finally:
        PyBuffer_Release(&view)


def base64_size(Py_ssize_t size):
    """The bytes that data of this size takes as a JSON string of base64, with quotes."""
    return (size + 2) // 3 * 4 + 2


def text(data):
    """Data as a JSON string. InvalidInput if it is not UTF-8."""
    cdef Py_buffer view
    cdef Py_ssize_t size = text_size(data)
    cdef uint8_t* to
    if size < 0:
        raise InvalidInput("the data is not UTF-8")
    found = PyBytes_FromStringAndSize(NULL, size)
    to = <uint8_t*>PyBytes_AS_STRING(found)
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            _write_text(<const uint8_t*>view.buf, <const uint8_t*>view.buf + view.len, to)
    finally:
        PyBuffer_Release(&view)
    return found


def base64_text(data):
    """Data as a JSON string of base64."""
    cdef Py_buffer view
    cdef uint8_t* to
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        found = PyBytes_FromStringAndSize(NULL, base64_size(view.len))
        to = <uint8_t*>PyBytes_AS_STRING(found)
        with nogil:
            _write_base64(<const uint8_t*>view.buf, view.len, to)
    finally:
        PyBuffer_Release(&view)
    return found
