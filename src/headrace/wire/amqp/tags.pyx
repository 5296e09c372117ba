"""The delivery tags of one channel: maps each unacknowledged tag to its source and offset.

Tags count up from one and most acks come in order, so the tags are a ring: the slot of a tag is its number modulo
the capacity. A few tags that stay unacknowledged while later ones come and go move to a sorted array (`held`), because
the ring would otherwise grow with every delivery after them. Acks are merged into ranges of offsets per source, so
that a thousand acks in one read become one settled range. A source is a small number that the channel assigns: one
per consumer, or per queue read with basic.get.
"""

from libc.stdlib cimport free, realloc
from libc.stdint cimport int32_t, int64_t, uint64_t

cdef enum:
    SETTLED = -1        # the source of a slot whose tag is acknowledged
    UNKNOWN = -1
    RING_MIN = 16
    RING_SPARSE = 1024  # a ring up to this size grows without a look at its slots
    KEPT_MAX = 4096     # a larger array is freed when it is empty
    FOLD_BACK = 8       # ranges an ack searches for one to extend: acks of several consumers alternate


cdef class TagRing:
    def __cinit__(self):
        self.base = 1
        self.next = 1

    def __dealloc__(self):
        free(self.slots)
        free(self.held)
        free(self.counts)
        free(self.folded)

    def __sizeof__(self):
        return (object.__sizeof__(self) + self.capacity * sizeof(Slot) + self.held_capacity * sizeof(Held)
                + self.sources_capacity * sizeof(int64_t) + self.folded_capacity * sizeof(Folded))

    def add_source(self):
        """Assigns the number of a new source."""
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
        """The number of unacknowledged tags of this source."""
        if not 0 <= source < self.sources:
            raise IndexError(source)
        return self.counts[source]

    @property
    def unacked(self):
        return self.outstanding

    @property
    def oldest_tag(self):
        """The lowest unacknowledged tag, or the next tag if there is none."""
        return self.held[self.held_first].tag if self.held_first < self.held_end else self.base

    @property
    def next_tag(self):
        return self.next

    def add(self, int32_t source, int64_t offset):
        """Assigns the next tag; source -1 is a delivery that needs no ack."""
        if source >= self.sources:
            raise IndexError(source)
        return self.push(source, offset)

    cdef int make_room(self) except -1:
        """Makes room in a full ring: doubles it, or moves its tags to `held` if most of them are acknowledged."""
        cdef Py_ssize_t wanted = max(RING_MIN, self.capacity * 2), live = 0
        cdef Slot* slots
        cdef uint64_t tag
        if self.capacity >= RING_SPARSE:
            for tag in range(self.base, self.next):
                live += self.slots[tag & (self.capacity - 1)].source != SETTLED
            if live * 4 <= self.capacity:
                return self.move_to_held(live)
        slots = <Slot*>realloc(NULL, wanted * sizeof(Slot))
        if slots == NULL:
            raise MemoryError
        for tag in range(self.base, self.next):
            slots[tag & (wanted - 1)] = self.slots[tag & (self.capacity - 1)]
        free(self.slots)
        self.slots = slots
        self.capacity = wanted
        return 0

    cdef int move_to_held(self, Py_ssize_t live) except -1:
        """Moves the `live` unacknowledged tags from the ring to `held`. The ring is empty afterwards."""
        cdef Py_ssize_t i, kept = 0
        cdef void* grown
        cdef Slot* slot
        cdef uint64_t tag
        if self.held_end + live > self.held_capacity:
            for i in range(self.held_first, self.held_end):
                if self.held[i].slot.source != SETTLED:
                    self.held[kept] = self.held[i]
                    kept += 1
            self.held_first, self.held_end = 0, kept
            if (kept + live) * 2 > self.held_capacity:      # else the next call would have to walk the array again soon
                grown = realloc(self.held, (kept + live) * 2 * sizeof(Held))
                if grown == NULL:
                    raise MemoryError
                self.held = <Held*>grown
                self.held_capacity = (kept + live) * 2
        for tag in range(self.base, self.next):
            slot = &self.slots[tag & (self.capacity - 1)]
            if slot.source != SETTLED:
                self.held[self.held_end].tag = tag
                self.held[self.held_end].slot = slot[0]
                self.held_end += 1
        self.base = self.next
        return 0

    cdef uint64_t push(self, int32_t source, int64_t offset) except 0:
        cdef uint64_t tag = self.next
        cdef Slot* slot
        if source < 0 and self.base == tag:     # the ring is empty: a tag that needs no ack takes no slot
            self.base = self.next = tag + 1
            return tag
        if <Py_ssize_t>(tag - self.base) == self.capacity:
            self.make_room()
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
        while self.held_first < self.held_end and self.held[self.held_first].slot.source == SETTLED:
            self.held_first += 1
        while self.base < self.next and self.slots[self.base & (self.capacity - 1)].source == SETTLED:
            self.base += 1
        # Free the memory of a burst.
        if self.base == self.next and self.capacity > KEPT_MAX:
            free(self.slots)
            self.slots = NULL
            self.capacity = 0
        if self.held_first == self.held_end and self.held_capacity > KEPT_MAX:
            free(self.held)
            self.held = NULL
            self.held_first = self.held_end = self.held_capacity = 0

    cdef Py_ssize_t held_until(self, uint64_t tag) noexcept:
        """The end index of the held tags up to this tag."""
        cdef Py_ssize_t low = self.held_first, high = self.held_end, middle
        while low < high:
            middle = (low + high) >> 1
            if self.held[middle].tag <= tag:
                low = middle + 1
            else:
                high = middle
        return low

    cdef Slot* find(self, uint64_t tag) noexcept:
        """NULL if the tag is not outstanding."""
        cdef Slot* slot
        cdef Py_ssize_t i
        if tag >= self.base:
            if tag >= self.next:
                return NULL
            slot = &self.slots[tag & (self.capacity - 1)]
        else:
            i = self.held_until(tag) - 1
            if i < self.held_first or self.held[i].tag != tag:
                return NULL
            slot = &self.held[i].slot
        return slot if slot.source != SETTLED else NULL

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

    cdef int settle_acked(self, Slot* slot) except -1:
        if slot.source != SETTLED:
            self.fold(slot.source, slot.offset)
            self.settle_slot(slot)
        return 0

    cdef int ack(self, uint64_t tag, bint multiple) except -2:
        """0, or UNKNOWN if the tag is not outstanding. Tag 0 with multiple means all tags."""
        cdef uint64_t t
        cdef Py_ssize_t i
        cdef Slot* slot
        if tag == 0 and multiple:
            tag = self.next - 1
        else:
            slot = self.find(tag)
            if slot == NULL:
                return UNKNOWN
            if not multiple:
                self.settle_acked(slot)
                if tag <= self.base:
                    self.trim()
                return 0
        for i in range(self.held_first, self.held_until(tag)):
            self.settle_acked(&self.held[i].slot)
        for t in range(self.base, tag + 1):
            self.settle_acked(&self.slots[t & (self.capacity - 1)])
        self.trim()
        return 0

    def settle(self, uint64_t tag, bint multiple):
        """Acks from Python; False if the tag is not outstanding."""
        return self.ack(tag, multiple) == 0

    def acked(self):
        """The ranges acked since the last call: (source, start, end)."""
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

    cdef int take_slot(self, Slot* slot, list out) except -1:
        if slot.source != SETTLED:
            out.append((slot.source, slot.offset))
            self.settle_slot(slot)
        return 0

    def take(self, uint64_t tag, bint multiple):
        """Removes tags without acking them: [(source, offset)] in tag order, or None if unknown."""
        cdef uint64_t t
        cdef Py_ssize_t i
        cdef Slot* slot
        cdef list out = []
        if tag == 0 and multiple:
            tag = self.next - 1
        else:
            slot = self.find(tag)
            if slot == NULL:
                return None
            if not multiple:
                self.take_slot(slot, out)
                self.trim()
                return out
        for i in range(self.held_first, self.held_until(tag)):
            self.take_slot(&self.held[i].slot, out)
        for t in range(self.base, tag + 1):
            self.take_slot(&self.slots[t & (self.capacity - 1)], out)
        self.trim()
        return out

    def peek(self, uint64_t tag, bint multiple):
        """The tags that an ack of this tag would cover, or None if it is unknown. Transactions settle them later."""
        cdef uint64_t t
        cdef Py_ssize_t i
        if tag == 0 and multiple:
            tag = self.next - 1
        elif self.find(tag) == NULL:
            return None
        if not multiple:
            return [tag]
        return [
            self.held[i].tag for i in range(self.held_first, self.held_until(tag))
            if self.held[i].slot.source != SETTLED
        ] + [t for t in range(self.base, tag + 1) if self.slots[t & (self.capacity - 1)].source != SETTLED]
