# cython: nonecheck=True
"""The ends of files that a round appends to: the journal, a segment, the slots. What every round asks of them, so
compiled; everything else about them is in journal.py, segment.py, tail.py, slots.py and files.py, whose classes are made
of these. Nothing here touches a file: a step is carried out by a chain.
"""

from headrace.log.disk.io_chain cimport Step, new_step
from headrace.log.segments.index cimport Walker, journal_entry, pack_slot, total

cdef enum:
    SLOT_BYTES = 64
    JOURNAL = -1                # in place of a log's id, in the first slot
    INDEX_DUE_BYTES = 4096      # of entries that are not in their file
    RELATIVE_MAX = 0x7FFFFFFF   # what fits an index entry, with room

JOURNAL_ID = JOURNAL


cdef class OpenFile:
    def __init__(self, str path not None, int file):
        self.path = path
        self.file = file
        self.users = 1


cdef class OpenFiles:
    """Which files are open, and who may close them. The lock is held for all of that, and never for longer."""

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
        """A file that is open anyway, kept open until `let_go`; None rather than open it."""
        self._lock.acquire()
        try:
            entry = self._open.get(path)
            return None if entry is None else self._use(entry)
        finally:
            self._lock.release()

    cpdef object let_go(self, OpenFile entry, bint dirty=False):
        """Dirty: it has been written, or a part of it, and was not synced afterwards; see `write`."""
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
                self.disk.close(entry.file)  # forgotten while it was in use
            elif entry.path not in self._dirty:
                self._idle[entry.path] = entry
        finally:
            self._lock.release()


cdef class JournalEnd:
    """The file that entries are written to, if there is one, and how far it is filled."""

    def __init__(self, long long file_bytes):
        self._file_bytes = file_bytes

    cpdef Step step(self, list buffers):
        """The write of one entry, if this file has room for it; then `wrote`, or `blank` if it failed."""
        cdef list entry
        if self._file is None:
            return None
        entry = journal_entry(self._number, self.sequence + 1, self._synced, buffers)
        if self._position + total(entry) > self._file_bytes:
            return None
        return new_step(self._file, entry, self._position)

    cpdef object wrote(self, Step step):
        cdef Py_ssize_t size = total(step.buffers)
        self.sequence += 1
        self._position += size
        self.bytes_written += size

    cpdef Step sync_step(self):
        """The sync of what was written, and is about to be; None after a failure, of which `sync` tells."""
        return None if self._file is None or self._failure is not None else new_step(self._file, None, 0)

    cpdef object synced_all(self):
        self._synced = self.sequence

    @property
    def synced(self):
        """Sequence of the last entry known to be on stable storage."""
        return self._synced

    @property
    def is_unsynced(self):
        return self.sequence > self._synced


cdef class SlotFile:
    """Which log has which slot."""

    def __init__(self):
        self._places = {}
        self._free = []

    cpdef Step step(self, ends):
        cdef long long log_id, epoch, start, visible_end, durable_end, stable_end
        log_id, epoch, start, visible_end, durable_end, stable_end = ends
        place = self._places.get(log_id)
        if place is None:
            place = self._free.pop() if self._free else self._next
            if place == self._next:
                self._next += 1
            self._places[log_id] = place
        packed = pack_slot(log_id, epoch, start, visible_end, durable_end, stable_end)
        return new_step(self._file, (packed,), <Py_ssize_t>place * SLOT_BYTES)

    cpdef Step sequence_step(self, long long sequence):
        """The journal's slot is the first."""
        return new_step(self._file, (pack_slot(JOURNAL, 0, 0, sequence, sequence, sequence),), 0)


cdef class SegmentEnd:
    """What is written to a segment, and what is derived from it."""

    def __init__(self, segment, Walker walker not None):
        self.segment = segment
        self.walker = walker

    @property
    def index_is_due(self):
        return len(self.walker.index) >= INDEX_DUE_BYTES

    cpdef object appended(self, data):
        self.walker.walk_whole(data)
        self._publish()

    cpdef object _publish(self):
        cdef Walker walker = self.walker
        segment = self.segment
        segment.max_timestamp = walker.max_timestamp
        segment.records = walker.records
        segment.size = walker.position
        segment.next_offset = walker.next_offset


cdef class TailEnd:
    """The segment that a log is written to, if there is one."""

    def __init__(self, OpenFiles files not None, settings, clock):
        self._files = files
        self.settings = settings
        self._clock = clock
        self._written = {}

    cpdef OpenFile hold(self, Py_ssize_t size):
        """The file, held for a write of so many bytes behind what is there, at `writer.position`. None when there is
        more to do than that: a segment to begin, a file to open, an index to write. Then `writer.appended`."""
        cdef SegmentEnd writer = self.writer
        if writer is None or writer.walker.position == 0 or len(writer.walker.index) >= INDEX_DUE_BYTES:
            return None
        if self._is_full(writer, size):
            return None
        return self._files.hold(writer.segment.data_path)

    cpdef bint _is_full(self, SegmentEnd writer, Py_ssize_t size) except -1:
        cdef Walker walker = writer.walker
        if walker.position == 0:
            return False
        settings, segment = self.settings, writer.segment
        if walker.position + size > <long long>settings.segment_size:
            return True
        if walker.next_offset - <long long>segment.base > RELATIVE_MAX:
            return True
        return <long long>self._clock.now_ms() - <long long>segment.created_ms > active_ms_max(settings)

    @property
    def is_unsynced(self):
        return len(self._written) > 0


cdef long long active_ms_max(settings) except? -1:
    """How long a segment is written to: only what is sealed can be compacted in time."""
    cdef long long lag_ms = settings.compaction_lag_max_ms, age_ms = settings.segment_age_ms
    return age_ms if lag_ms < 0 or settings.cleanup_policy == "delete" else min(age_ms, lag_ms)
