# cython: nonecheck=True
"""Which files are open and who uses them: the part of FileCache (file_cache.py) that every round needs, compiled."""


cdef class OpenFile:
    def __init__(self, str path not None, int file):
        self.path = path
        self.file = file
        self.users = 1


cdef class OpenFiles:
    """Use counts of open files. The lock protects them and is never held across disk I/O."""

    def __init__(self, disk, lock, idle):
        self.disk = disk
        self._lock = lock
        self._idle = idle
        self._open = {}
        self._dirty = set()

    cpdef OpenFile _use(self, OpenFile entry):
        self._idle.pop(entry.path, None)
        entry.users += 1
        return entry

    cpdef OpenFile hold(self, str path):
        """Keep a file open until `release`, if it is open; never opens one."""
        self._lock.acquire()
        try:
            entry = self._open.get(path)
            return None if entry is None else self._use(entry)
        finally:
            self._lock.release()

    cpdef object release(self, OpenFile entry, bint dirty=False):
        """`dirty`: the file was written, even in part, and not synced since; see FileCache.write."""
        cdef bint is_known
        self._lock.acquire()
        try:
            is_known = self._open.get(entry.path) is entry
            entry.users -= 1
            if dirty and is_known:
                self._dirty.add(entry.path)
            if entry.users:
                return
            if not is_known:
                self.disk.close(entry.file)  # `forget` dropped it while it was in use
            elif entry.path not in self._dirty:
                self._idle[entry.path] = entry
        finally:
            self._lock.release()
