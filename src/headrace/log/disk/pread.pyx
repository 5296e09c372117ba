"""Reads that never wait for the disk, into memory that is not cleared first, and a test for whether one would wait.
Used by disk.py and read/file_range.py only."""

import os

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize

cdef extern from *:
    """
    #include <errno.h>
    #include <stdint.h>
    #include <sys/uio.h>
    #include <unistd.h>
    #ifdef __linux__
    #include <sys/syscall.h>
    /* Since Linux 6.5; the same number on every architecture that Python supports. */
    #ifndef __NR_cachestat
    #define __NR_cachestat 451
    #endif
    #endif

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

    struct headrace_range { uint64_t offset, size; };
    struct headrace_cached { uint64_t cached, dirty, writeback, evicted, recently_evicted; };

    static int headrace_is_cached(int file, long long position, long long size) {
    #ifdef __NR_cachestat
        long long page = sysconf(_SC_PAGESIZE);
        struct headrace_range range = {(uint64_t)position, (uint64_t)size};
        struct headrace_cached found;
        if (syscall(__NR_cachestat, file, &range, &found, 0) != 0) return 0;
        return (long long)found.cached >= (position + size - 1) / page - position / page + 1;
    #else
        return 0;
    #endif
    }
    """
    int headrace_is_cached(int file, long long position, long long size) noexcept nogil
    Py_ssize_t headrace_pread_nowait(int file, char *buffer, Py_ssize_t size, long long position) noexcept nogil


def pread_nowait(int file, Py_ssize_t size, long long position):
    """The bytes from position on that are in the page cache without a gap; OSError with EAGAIN if there are none."""
    if size < 0:
        raise ValueError(f"cannot read {size} bytes")
    cdef bytes data = PyBytes_FromStringAndSize(NULL, size)
    cdef char* buffer = PyBytes_AS_STRING(data)
    cdef Py_ssize_t got
    with nogil:
        got = headrace_pread_nowait(file, buffer, size, position)
    if got < 0:
        raise OSError(-got, os.strerror(-got))
    return data if got == size else data[:got]


def is_cached(int file, long long position, long long size):
    """Whether the whole range is in the page cache. False if the system cannot tell (Linux before 6.5)."""
    return size > 0 and headrace_is_cached(file, position, size) == 1
