"""The delivery tags of one channel: which source and offset each outstanding tag stands for.

Tags of a channel count up from one and most acks come in order, so the tags are a ring: the slot
of a tag is its number modulo the capacity. Acks are folded into ranges of offsets per source on
the way, so that a thousand acks in one read become one settled range. A source is a small number
that the channel gives out: one per consumer, or per queue read with basic.get.
"""

from libc.stdlib cimport free, realloc
from libc.stdint cimport int32_t, int64_t, uint64_t

cdef enum:
    SETTLED = -1        # the source of a slot whose tag is done
    UNKNOWN = -1
    RING_MIN = 16
    FOLD_BACK = 8       # how many ranges back an ack looks for one to extend: consumers that take turns


cdef class TagRing:
    def __cinit__(self):
        self.base = 1
        self.next = 1

    def __dealloc__(self):
        free(self.slots)
        free(self.counts)
        free(self.folded)

    def add_source(self):
        """A new source, as a number."""
        cdef Py_ssize_t wanted
        cdef void* grown
        if self.sources == self.sources_capacity:
            wanted = max(4, self.sources_capacity * 2)
            grown = realloc(self.counts, wanted * sizeof(int64_t))
            if grown == NULL:
                raise MemoryError
            self.counts = <int64_t*>grown
            self.sources_capacity = wanted
        self.counts[self.sources] = 0
        self.sources += 1
        return self.sources - 1

    def in_flight(self, Py_ssize_t source):
        """How many tags of this source wait for an ack."""
        if not 0 <= source < self.sources:
            raise IndexError(source)
        return self.counts[source]

    @property
    def unacked(self):
        return self.outstanding

    @property
    def oldest_tag(self):
        """The lowest tag that waits for an ack, or the next one when none does."""
        return self.base

    @property
    def next_tag(self):
        return self.next

    def add(self, int32_t source, int64_t offset):
        """Gives out the next tag; source -1 is a delivery that needs no ack."""
        if source >= self.sources:
            raise IndexError(source)
        return self.push(source, offset)

    cdef int grow(self) except -1:
        cdef Py_ssize_t wanted = max(RING_MIN, self.capacity * 2)
        cdef Slot* slots = <Slot*>realloc(NULL, wanted * sizeof(Slot))
        cdef uint64_t tag
        if slots == NULL:
            raise MemoryError
        for tag in range(self.base, self.next):
            slots[tag & (wanted - 1)] = self.slots[tag & (self.capacity - 1)]
        free(self.slots)
        self.slots = slots
        self.capacity = wanted
        return 0

    cdef uint64_t push(self, int32_t source, int64_t offset) except 0:
        cdef uint64_t tag = self.next
        cdef Slot* slot
        if source < 0 and self.base == tag:     # nothing outstanding: a tag without ack leaves no trace
            self.base = self.next = tag + 1
            return tag
        if <Py_ssize_t>(tag - self.base) == self.capacity:
            self.grow()
        slot = &self.slots[tag & (self.capacity - 1)]
        slot.source = source
        slot.offset = offset
        self.next = tag + 1
        if source >= 0:
            self.counts[source] += 1
            self.outstanding += 1
        return tag

    cdef void settle_slot(self, Slot* slot) noexcept:
        self.counts[slot.source] -= 1
        self.outstanding -= 1
        slot.source = SETTLED

    cdef void trim(self) noexcept:
        while self.base < self.next and self.slots[self.base & (self.capacity - 1)].source == SETTLED:
            self.base += 1
        if self.base == self.next and self.capacity > 4096:     # a burst's ring is not kept for ever
            free(self.slots)
            self.slots = NULL
            self.capacity = 0

    cdef int fold(self, int32_t source, int64_t offset) except -1:
        cdef Py_ssize_t i = self.folded_count - 1
        cdef Py_ssize_t stop = max(-1, i - FOLD_BACK)
        cdef Py_ssize_t wanted
        cdef void* grown
        while i > stop:
            if self.folded[i].source == source:
                if self.folded[i].end == offset:
                    self.folded[i].end = offset + 1
                    return 0
                break
            i -= 1
        if self.folded_count == self.folded_capacity:
            wanted = max(8, self.folded_capacity * 2)
            grown = realloc(self.folded, wanted * sizeof(Folded))
            if grown == NULL:
                raise MemoryError
            self.folded = <Folded*>grown
            self.folded_capacity = wanted
        self.folded[self.folded_count].source = source
        self.folded[self.folded_count].start = offset
        self.folded[self.folded_count].end = offset + 1
        self.folded_count += 1
        return 0

    cdef int ack(self, uint64_t tag, bint multiple) except -2:
        """0, or UNKNOWN when the tag is not outstanding. Tag 0 with multiple means all of them."""
        cdef uint64_t t
        cdef Slot* slot
        if tag == 0 and multiple:
            tag = self.next - 1
            if tag < self.base:
                return 0
        elif tag < self.base or tag >= self.next or self.slots[tag & (self.capacity - 1)].source == SETTLED:
            return UNKNOWN
        for t in range(self.base if multiple else tag, tag + 1):
            slot = &self.slots[t & (self.capacity - 1)]
            if slot.source != SETTLED:
                self.fold(slot.source, slot.offset)
                self.settle_slot(slot)
        if multiple or tag == self.base:
            self.trim()
        return 0

    def settle(self, uint64_t tag, bint multiple):
        """Acks from Python; False when the tag is not outstanding."""
        return self.ack(tag, multiple) == 0

    def acked(self):
        """What was acked since the last call: (source, first offset, offset after the last)."""
        cdef Py_ssize_t i
        cdef list out = [
            (self.folded[i].source, self.folded[i].start, self.folded[i].end) for i in range(self.folded_count)
        ]
        self.folded_count = 0
        if self.folded_capacity > 1024:
            free(self.folded)
            self.folded = NULL
            self.folded_capacity = 0
        return out

    def take(self, uint64_t tag, bint multiple):
        """Removes tags without acking them: [(source, offset)] in tag order, or None if unknown."""
        cdef uint64_t t
        cdef uint64_t first
        cdef Slot* slot
        cdef list out = []
        if tag == 0 and multiple:
            tag = self.next - 1
            if tag < self.base:
                return out
        elif tag < self.base or tag >= self.next or self.slots[tag & (self.capacity - 1)].source == SETTLED:
            return None
        first = self.base if multiple else tag
        for t in range(first, tag + 1):
            slot = &self.slots[t & (self.capacity - 1)]
            if slot.source != SETTLED:
                out.append((slot.source, slot.offset))
                self.settle_slot(slot)
        self.trim()
        return out

    def peek(self, uint64_t tag, bint multiple):
        """The tags that an ack of this tag would cover: for transactions, which settle later."""
        cdef uint64_t t
        if tag == 0 and multiple:
            tag = self.next - 1
        elif tag < self.base or tag >= self.next or self.slots[tag & (self.capacity - 1)].source == SETTLED:
            return None
        return [
            t for t in range(self.base if multiple else tag, tag + 1)
            if self.slots[t & (self.capacity - 1)].source != SETTLED
        ]
