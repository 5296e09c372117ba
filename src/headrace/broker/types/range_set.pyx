"""A set of offsets, stored as sorted ranges: the settled and the returned messages of a queue.

Acks arrive nearly in order, so there are few ranges however many offsets the set holds. Adding at the end of the last
range is the common case. All else is a binary search and a memmove of the shorter side: a slow consumer among others
closes gaps near the front, of which there may be a hundred thousand.
"""

from libc.stdint cimport int64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memmove

cdef struct Range:
    int64_t start
    int64_t end


cdef class RangeSet:
    cdef Range* block
    cdef Range* ranges          # the first range; the space before it in the block is free
    cdef Py_ssize_t length
    cdef Py_ssize_t capacity
    cdef int64_t total

    def __init__(self, pairs=()):
        for start, end in pairs:
            self.add(start, end)

    def __dealloc__(self):
        free(self.block)

    def __len__(self):
        """Number of offsets in the set."""
        return self.total

    def __bool__(self):
        return self.length > 0

    def __iter__(self):
        """The ranges as (start, end), lowest first."""
        return iter([(self.ranges[i].start, self.ranges[i].end) for i in range(self.length)])

    def __contains__(self, int64_t offset):
        cdef Py_ssize_t i = self.find(offset)
        return i < self.length and self.ranges[i].start <= offset

    @property
    def runs(self):
        return self.length

    cdef Py_ssize_t find(self, int64_t offset) noexcept:
        """The first range that ends after the offset."""
        cdef Py_ssize_t low = 0
        cdef Py_ssize_t high = self.length
        cdef Py_ssize_t middle
        if high and self.ranges[high - 1].end <= offset:
            return high
        while low < high:
            middle = (low + high) >> 1
            if self.ranges[middle].end > offset:
                high = middle
            else:
                low = middle + 1
        return low

    cdef int make_room(self) except -1:
        """Make room for one more range at the end."""
        cdef Py_ssize_t free_before = self.ranges - self.block
        cdef Py_ssize_t wanted
        cdef void* grown
        if free_before > self.capacity // 2:
            memmove(self.block, self.ranges, self.length * sizeof(Range))
            self.ranges = self.block
        elif free_before + self.length == self.capacity:
            wanted = max(4, self.capacity * 2)
            grown = realloc(self.block, wanted * sizeof(Range))
            if grown == NULL:
                raise MemoryError
            self.block = <Range*>grown
            self.ranges = self.block + free_before
            self.capacity = wanted
        return 0

    cdef int open_at(self, Py_ssize_t i) except -1:
        if i < self.length - i and self.ranges > self.block:
            self.ranges -= 1
            memmove(&self.ranges[0], &self.ranges[1], i * sizeof(Range))
        else:
            self.make_room()
            memmove(&self.ranges[i + 1], &self.ranges[i], (self.length - i) * sizeof(Range))
        self.length += 1
        return 0

    cdef void close_at(self, Py_ssize_t i, Py_ssize_t count) noexcept:
        if i < self.length - i - count:
            memmove(&self.ranges[count], &self.ranges[0], i * sizeof(Range))
            self.ranges += count
        else:
            memmove(&self.ranges[i], &self.ranges[i + count], (self.length - i - count) * sizeof(Range))
        self.length -= count

    def add(self, int64_t start, int64_t end):
        """Add [start, end); returns how many offsets were new."""
        cdef Py_ssize_t i, last
        cdef int64_t before = self.total
        if start >= end:
            return 0
        if self.length and self.ranges[self.length - 1].end == start:
            self.ranges[self.length - 1].end = end
            self.total += end - start
            return end - start
        i = self.find(start - 1)            # also joins a range that ends at start
        if i == self.length or self.ranges[i].start > end:
            self.open_at(i)
            self.ranges[i].start = start
            self.ranges[i].end = end
            self.total += end - start
            return end - start
        last = i
        while last + 1 < self.length and self.ranges[last + 1].start <= end:
            last += 1
        start = min(start, self.ranges[i].start)
        end = max(end, self.ranges[last].end)
        for j in range(i, last + 1):
            self.total -= self.ranges[j].end - self.ranges[j].start
        self.ranges[i].start = start
        self.ranges[i].end = end
        self.total += end - start
        if last > i:
            self.close_at(i + 1, last - i)
        return self.total - before

    def remove(self, int64_t start, int64_t end):
        """Remove [start, end); returns how many offsets were in the set."""
        cdef int64_t before = self.total
        cdef int64_t tail
        cdef Py_ssize_t i, last
        if start >= end:
            return 0
        i = self.find(start)
        if i == self.length or self.ranges[i].start >= end:
            return 0
        if self.ranges[i].start < start:
            tail = self.ranges[i].end
            self.ranges[i].end = start
            if tail > end:
                self.open_at(i + 1)
                self.ranges[i + 1].start = end
                self.ranges[i + 1].end = tail
                self.total -= end - start
                return end - start
            self.total -= tail - start
            i += 1
        last = i
        while last < self.length and self.ranges[last].end <= end:
            self.total -= self.ranges[last].end - self.ranges[last].start
            last += 1
        if last > i:
            self.close_at(i, last - i)
        if i < self.length and self.ranges[i].start < end:
            self.total -= end - self.ranges[i].start
            self.ranges[i].start = end
        return before - self.total

    def first(self):
        """The lowest range, or None."""
        if not self.length:
            return None
        return self.ranges[0].start, self.ranges[0].end

    def gap(self, int64_t start, int64_t end):
        """The first run of [start, end) that is not in the set, or None."""
        cdef Py_ssize_t i
        if start >= end:
            return None
        i = self.find(start)
        if i < self.length and self.ranges[i].start <= start:
            start = self.ranges[i].end
            i += 1
            if start >= end:
                return None
        if i < self.length and self.ranges[i].start < end:
            end = self.ranges[i].start
        return start, end

    def count(self, int64_t start, int64_t end):
        """Number of offsets of [start, end) in the set."""
        cdef Py_ssize_t i
        cdef int64_t found = 0
        if start >= end:
            return 0
        i = self.find(start)
        while i < self.length and self.ranges[i].start < end:
            found += min(end, self.ranges[i].end) - max(start, self.ranges[i].start)
            i += 1
        return found

    def clear(self):
        self.ranges = self.block
        self.length = 0
        self.total = 0
