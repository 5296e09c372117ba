"""Tuning of glibc's malloc. Has no effect with other C libraries."""

import ctypes
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
MMAP_THRESHOLD_BYTES = 32 << 20  # glibc's maximum
TRIM_THRESHOLD_BYTES = 64 << 20


def keep_freed_memory() -> None:
    """Makes malloc reuse freed buffers instead of returning them to the system.

    On a virtual machine, mapping the pages of a new megabyte costs more than all work on its contents.
    """
    with suppress(OSError, AttributeError):  # not glibc
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)
        library.mallopt(M_TRIM_THRESHOLD, TRIM_THRESHOLD_BYTES)


def trim_allocator() -> None:
    """Returns freed memory to the system; otherwise malloc keeps it and it counts as used by the process."""
    with suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
