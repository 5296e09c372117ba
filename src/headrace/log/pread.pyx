"""A read that never waits for the disk, into memory that is not cleared first. Only disk.py calls it."""

import os

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize

cdef extern from *:
    """
    #include <errno.h>
    #include <sys/uio.h>

    static Py_ssize_t headrace_pread_nowait(int file, char *buffer, Py_ssize_t size, long long position) {
    #ifdef RWF_NOWAIT
        struct iovec part = {buffer, (size_t)size};
        Py_ssize_t got;
        do {
            got = preadv2(file, &part, 1, position, RWF_NOWAIT);
        } while (got < 0 && errno == EINTR);
        return got < 0 ? -(Py_ssize_t)errno : got;
    #else
        return -EOPNOTSUPP;
    #endif
    }
    """
    Py_ssize_t headrace_pread_nowait(int file, char *buffer, Py_ssize_t size, long long position) noexcept nogil


def pread_nowait(int file, Py_ssize_t size, long long position):
    """What the page cache has from position on without a gap; an OSError with EAGAIN when that is nothing."""
    if size < 0:
        raise ValueError(f"{size} bytes cannot be read")
    cdef bytes data = PyBytes_FromStringAndSize(NULL, size)
    cdef char* buffer = PyBytes_AS_STRING(data)
    cdef Py_ssize_t got
    with nogil:
        got = headrace_pread_nowait(file, buffer, size, position)
    if got < 0:
        raise OSError(-got, os.strerror(-got))
    return data if got == size else data[:got]
