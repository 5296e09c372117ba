"""send(2) on a file descriptor. Python offers it only on socket objects, and creating one takes four system calls."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.exc cimport PyErr_SetFromErrno

cdef extern from "<sys/socket.h>" nogil:
    Py_ssize_t c_send "send"(int file, const void* data, size_t size, int flags)

cdef extern from *:
    """
    #include <sys/socket.h>
    #ifdef MSG_MORE
    #define HEADRACE_MORE MSG_MORE
    #else
    #define HEADRACE_MORE 0
    #endif
    #ifdef MSG_NOSIGNAL
    #define HEADRACE_QUIET MSG_NOSIGNAL
    #else
    #define HEADRACE_QUIET 0
    #endif
    """
    int MORE "HEADRACE_MORE"
    int QUIET "HEADRACE_QUIET"


def send(int file, data not None, Py_ssize_t start, bint is_more):
    """Send data[start:] and return the number of bytes accepted; BlockingIOError if none. is_more sets MSG_MORE: the
    rest of the packet follows at once."""
    cdef Py_buffer view
    cdef Py_ssize_t count
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    try:
        if not 0 <= start < view.len:
            raise ValueError(f"start {start} is outside the {view.len} bytes of data")
        with nogil:
            count = c_send(file, <const char*> view.buf + start, view.len - start, QUIET | (MORE if is_more else 0))
        if count < 0:
            PyErr_SetFromErrno(OSError)
        return count
    finally:
        PyBuffer_Release(&view)
