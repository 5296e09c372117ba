"""Buffers that end at a page boundary before an unreadable page, so that reading past the end crashes the process."""

import ctypes
import mmap

_PAGE = mmap.PAGESIZE
_PROT_NONE, _PROT_ALL = 0, 3
_libc = ctypes.CDLL(None, use_errno=True)


class GuardedBytes:
    """A buffer followed by an unreadable page. Reusable for many inputs; use as a context manager."""

    def __init__(self, size_max: int) -> None:
        pages = -(-size_max // _PAGE)
        self._map = mmap.mmap(-1, (pages + 1) * _PAGE)
        self._end = pages * _PAGE
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._guard = ctypes.c_void_p(start + self._end)
        self._protect(_PROT_NONE)

    def _protect(self, mode: int) -> None:
        if _libc.mprotect(self._guard, ctypes.c_size_t(_PAGE), mode):
            raise OSError(ctypes.get_errno(), "mprotect")

    def hold(self, data: bytes | bytearray) -> memoryview:
        """Return a view of a copy of data that ends exactly at the guard page."""
        view = memoryview(self._map)[self._end - len(data) : self._end]
        view[:] = data
        return view

    def __enter__(self) -> "GuardedBytes":
        return self

    def __exit__(self, *_: object) -> None:
        self._protect(_PROT_ALL)
