"""How the C library's allocator treats memory that is free again."""

import ctypes
from contextlib import suppress

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
LARGEST_KEPT = 32 << 20  # the most that glibc takes
KEPT_BYTES_MAX = 64 << 20


def keep_freed_memory() -> None:
    """Have the C library hand buffers out again instead of giving each back to the system: on a virtual machine the
    pages of a new megabyte cost more than all that is done with it."""
    with suppress(OSError, AttributeError):  # another C library than glibc
        library = ctypes.CDLL(None)
        library.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT)
        library.mallopt(M_TRIM_THRESHOLD, KEPT_BYTES_MAX)


def trim_allocator() -> None:
    """Hands freed memory back to the system: the C library keeps it, and it would count as used for ever."""
    with suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
