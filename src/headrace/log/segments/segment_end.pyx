# cython: nonecheck=True
"""The end of the segment that a log is written to: the part of SegmentWriter (segment.py) that every round needs,
compiled. It does no I/O."""

from headrace.log.segments.index cimport Walker


cdef class SegmentEnd:
    """What was written to a segment, and the facts derived from it."""

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
