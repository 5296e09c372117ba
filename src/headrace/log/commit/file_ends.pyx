# cython: nonecheck=True
"""The ends of the files that a round writes to: the journal, the slots, and the last segment of a log.

These are the compiled base classes of Journal (journal.py), Slots (slots.py) and Tail (log_writer.py): the part of them
that every round needs. Nothing here does I/O: a method returns a Step, and an I/O chain carries it out.
"""

from headrace.log.disk.io_chain cimport Step, new_step
from headrace.log.disk.open_files cimport OpenFile, OpenFiles
from headrace.log.segments.index cimport Walker, journal_entry, pack_slot, total
from headrace.log.segments.segment_end cimport INDEX_DUE_BYTES, SegmentEnd

cdef enum:
    SLOT_BYTES = 64
    JOURNAL = -1                # stands for a log's id in the first slot
    RELATIVE_MAX = 0x7FFFFFFF   # largest offset relative to its segment's base that an index entry can hold

JOURNAL_ID = JOURNAL


cdef class JournalEnd:
    """The journal file that entries are written to, if there is one, and how far it is filled."""

    def __init__(self, long long file_bytes):
        self._file_bytes = file_bytes

    cpdef Step step(self, list buffers):
        """The write of one entry; None if the file has no room for it. Followed by `wrote` once it is written."""
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
        """The sync of everything written so far and of the step before it. None after a failed sync: `Journal.sync`
        then raises."""
        return None if self._file is None or self._failure is not None else new_step(self._file, None, 0)

    cpdef object synced_all(self):
        self._synced = self.sequence

    @property
    def synced(self):
        """Sequence number of the last entry that a sync has covered."""
        return self._synced

    @property
    def is_unsynced(self):
        return self.sequence > self._synced


cdef class SlotFile:
    """Assigns a slot to each log."""

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
        """The journal's slot, which is the first."""
        return new_step(self._file, (pack_slot(JOURNAL, 0, 0, sequence, sequence, sequence),), 0)


cdef class TailEnd:
    """The segment that a log is written to, if there is one, and the files it wrote without the journal."""

    def __init__(self, OpenFiles files not None, settings, clock):
        self._files = files
        self.settings = settings
        self._clock = clock
        self._written = {}

    cpdef OpenFile hold(self, Py_ssize_t size):
        """The segment's file, held open for a write of `size` bytes at its end; `writer.appended` must follow.

        None when an append takes more than one write: a segment to begin, a file to open, or an index to write."""
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
    """How long a segment may stay active: only sealed segments are compacted, and compaction may have a deadline."""
    cdef long long lag_ms = settings.compaction_lag_max_ms, age_ms = settings.segment_age_ms
    return age_ms if lag_ms < 0 or settings.cleanup_policy == "delete" else min(age_ms, lag_ms)
