# cython: boundscheck=False, wraparound=False, cdivision=True
"""Index lookups, the walk over batch headers that builds indexes and seals, and the encoding of slots and journal
entries. No files and no policy."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, int32_t, uint64_t, int64_t
from libc.string cimport memset

from headrace.record.batch.crc32c cimport crc32c_of
from headrace.record.raw cimport put_le

cdef enum:
    PREFIX = 12             # base offset and length
    HEADER = 61
    OFFSET_ENTRY = 8
    TIME_ENTRY = 16
    SLOT = 64
    SLOT_CHECKED = 60
    ENTRY_HEADER = 36
    ENTRY_MAGIC = 0x48524A45
    SECTOR = 512
    TIME_CHECKED = 12       # bytes of a time entry that its checksum covers, together with the segment's base

cdef inline uint32_t _u32(const uint8_t* p) noexcept nogil:
    return (<uint32_t>p[0] << 24) | (<uint32_t>p[1] << 16) | (<uint32_t>p[2] << 8) | p[3]


cdef inline int64_t _i64(const uint8_t* p) noexcept nogil:
    return <int64_t>((<uint64_t>_u32(p) << 32) | _u32(p + 4))


cdef inline void _put_u32(uint8_t* p, uint32_t v) noexcept nogil:
    p[0] = v >> 24
    p[1] = (v >> 16) & 0xFF
    p[2] = (v >> 8) & 0xFF
    p[3] = v & 0xFF


cdef inline void _put_i64(uint8_t* p, int64_t v) noexcept nogil:
    _put_u32(p, <uint32_t>(v >> 32))
    _put_u32(p + 4, <uint32_t>v)


cdef inline Py_ssize_t _count_below(const uint8_t* base, Py_ssize_t count, int64_t relative_offset) noexcept nogil:
    cdef Py_ssize_t low = 0, high = count, middle
    while low < high:
        middle = (low + high) >> 1
        if <int64_t>_u32(base + middle * OFFSET_ENTRY) <= relative_offset:
            low = middle + 1
        else:
            high = middle
    return low


cdef inline Py_ssize_t _find(const uint8_t* base, Py_ssize_t count, int64_t relative_offset) noexcept nogil:
    cdef Py_ssize_t below = _count_below(base, count, relative_offset)
    return 0 if below == 0 else <Py_ssize_t>_u32(base + (below - 1) * OFFSET_ENTRY + 4)


cdef tuple _entry(const uint8_t* base, Py_ssize_t count, int64_t relative_offset):
    cdef Py_ssize_t below = _count_below(base, count, relative_offset)
    if below == 0:
        return 0, 0
    base += (below - 1) * OFFSET_ENTRY
    return _u32(base + 4), _u32(base)


def find_position(bytes entries not None, long long relative_offset):
    """Position of the last index entry at or below relative_offset; 0 when there is none."""
    return _find(<const uint8_t*><char*>entries, len(entries) // OFFSET_ENTRY, relative_offset)


def find_entry(bytes entries not None, long long relative_offset):
    """(position, relative offset) of the last index entry at or below relative_offset; zeros when there is none."""
    return _entry(<const uint8_t*><char*>entries, len(entries) // OFFSET_ENTRY, relative_offset)


cdef _end(const uint8_t* base, Py_ssize_t count, int64_t position_max, int64_t relative_offset):
    cdef Py_ssize_t low = 0, high = _count_below(base, count, relative_offset), middle
    while low < high:
        middle = (low + high) >> 1
        if <int64_t>_u32(base + middle * OFFSET_ENTRY + 4) <= position_max:
            low = middle + 1
        else:
            high = middle
    if low == 0:
        return None
    base += (low - 1) * OFFSET_ENTRY
    return _u32(base + 4), _u32(base)


def find_end(bytes entries not None, long long position_max, long long relative_offset):
    """(position, relative offset) of the last index entry that lies at or below both; None when there is none."""
    return _end(<const uint8_t*><char*>entries, len(entries) // OFFSET_ENTRY, position_max, relative_offset)


cdef inline uint32_t _time_crc(int64_t segment_base, const uint8_t* entry) noexcept nogil:
    cdef uint8_t base[8]
    _put_i64(base, segment_base)
    return crc32c_of(entry, TIME_CHECKED, crc32c_of(base, 8, 0))


def find_offset_for_time(const uint8_t[::1] entries not None, long long segment_base, long long timestamp):
    """Relative offset of the last time-index entry whose running maximum is below timestamp; 0 when none.

    Nothing in the data would show that too much was skipped, so only entries that match their checksum are used. Any
    sound entry below the timestamp gives a correct start; if one is damaged, the search only begins earlier.
    """
    cdef Py_ssize_t low = 0
    cdef Py_ssize_t high = entries.shape[0] // TIME_ENTRY
    cdef Py_ssize_t middle
    if high == 0:
        return 0
    cdef const uint8_t* base = &entries[0]
    cdef const uint8_t* entry
    while low < high:
        middle = (low + high) >> 1
        if _i64(base + middle * TIME_ENTRY) < timestamp:
            low = middle + 1
        else:
            high = middle
    while low > 0:
        low -= 1
        entry = base + low * TIME_ENTRY
        if _i64(entry) < timestamp and _u32(entry + TIME_CHECKED) == _time_crc(segment_base, entry):
            return _u32(entry + 8)
    return 0


def first_damaged_time_entry(const uint8_t[::1] entries not None, long long segment_base):
    """The number of the first time-index entry that does not match its checksum; -1 when all match."""
    cdef Py_ssize_t at
    for at in range(entries.shape[0] // TIME_ENTRY):
        if _u32(&entries[at * TIME_ENTRY] + TIME_CHECKED) != _time_crc(segment_base, &entries[at * TIME_ENTRY]):
            return at
    return -1


def is_sound(
    const uint8_t[::1] entries not None, const uint8_t[::1] times not None, long long segment_base, long long size,
    long long next_offset,
):
    """Whether both indexes of a segment of `size` bytes can be right, as far as they themselves show: they have the same
    entries, in ascending order, and the checksums of the time index match."""
    cdef Py_ssize_t count = entries.shape[0] // OFFSET_ENTRY, at
    cdef int64_t offset = -1, position = -1
    cdef const uint8_t* entry
    cdef const uint8_t* time
    if entries.shape[0] != count * OFFSET_ENTRY or times.shape[0] != count * TIME_ENTRY:
        return False
    for at in range(count):
        entry = &entries[at * OFFSET_ENTRY]
        time = &times[at * TIME_ENTRY]
        if <int64_t>_u32(entry) <= offset or <int64_t>_u32(entry + 4) <= position or (at == 0 and _u32(entry + 4) != 0):
            return False
        offset = _u32(entry)
        position = _u32(entry + 4)
        if position >= size or segment_base + offset >= next_offset:
            return False
        if _u32(time + 8) != offset or _u32(time + TIME_CHECKED) != _time_crc(segment_base, time):
            return False
    return True


cdef class Walker:
    """Walks over the batch headers of one segment, which are passed in consecutive buffers.

    Collects sparse index entries, the running maximum of timestamps, counts, and a CRC over the
    batch headers, because the batch's own CRC does not cover its base offset.
    A length that exceeds the buffer ends the walk.
    """
    def __init__(self, long long base, long long interval, *, long long position=0, long long next_offset=-1,
                 long long max_timestamp=-1, long long records=0, long long batches=0,
                 unsigned int headers_crc=0, long long last_indexed=-1):
        self.base = base
        self.interval = interval
        self.position = position
        self.next_offset = base if next_offset < 0 else next_offset
        self.max_timestamp = max_timestamp
        self.records = records
        self.batches = batches
        self.headers_crc = headers_crc
        self.last_indexed = last_indexed
        self.index = bytearray()
        self.time_index = bytearray()

    @property
    def last_indexed_position(self):
        return self.last_indexed

    def find_pending(self, long long relative_offset):
        """Position by the index entries not yet flushed to the file; -1 when the offset lies before them."""
        if len(self.index) < OFFSET_ENTRY:
            return -1
        cdef const uint8_t* entries = <const uint8_t*><char*>self.index
        if <int64_t>_u32(entries) > relative_offset:
            return -1
        return _find(entries, len(self.index) // OFFSET_ENTRY, relative_offset)

    def find_pending_entry(self, long long relative_offset):
        """(position, relative offset) by the entries not yet flushed; None when the offset lies before them."""
        if len(self.index) < OFFSET_ENTRY:
            return None
        cdef const uint8_t* entries = <const uint8_t*><char*>self.index
        if <int64_t>_u32(entries) > relative_offset:
            return None
        return _entry(entries, len(self.index) // OFFSET_ENTRY, relative_offset)

    def find_pending_end(self, long long position_max, long long relative_offset):
        """Like find_end, for the entries not yet flushed."""
        return _end(
            <const uint8_t*><char*>self.index, len(self.index) // OFFSET_ENTRY, position_max, relative_offset
        )

    def walk(self, data not None, Py_ssize_t start=0, Py_ssize_t end=-1):
        """Walk over the complete batches of data[start:end]; returns where the first incomplete one begins."""
        cdef Py_buffer view
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        try:
            if start < 0:
                return start
            return self.walked(<const uint8_t*>view.buf, start, view.len if end < 0 or end > view.len else end)
        finally:
            PyBuffer_Release(&view)

    cpdef object walk_whole(self, buffers):
        """Walk over buffers that hold only complete batches."""
        cdef Py_buffer view
        cdef Py_ssize_t end
        for data in buffers:
            PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
            try:
                end = self.walked(<const uint8_t*>view.buf, 0, view.len)
                assert end == view.len, "a part is made of whole batches"
            finally:
                PyBuffer_Release(&view)

    cdef Py_ssize_t walked(self, const uint8_t* p, Py_ssize_t at, Py_ssize_t stop) except -1:
        cdef int64_t size, base_offset, timestamp
        cdef uint8_t entry[TIME_ENTRY]
        while stop - at >= HEADER:
            size = PREFIX + <int64_t><int32_t>_u32(p + at + 8)
            if size < HEADER or size > stop - at:
                break
            base_offset = _i64(p + at)
            timestamp = _i64(p + at + 35)
            if self.last_indexed < 0 or self.position - self.last_indexed >= self.interval:
                _put_u32(entry, <uint32_t>(base_offset - self.base))
                _put_u32(entry + 4, <uint32_t>self.position)
                self.index += (<char*>entry)[:OFFSET_ENTRY]
                # The time entry holds the highest timestamp before this batch.
                _put_i64(entry, self.max_timestamp)
                _put_u32(entry + 8, <uint32_t>(base_offset - self.base))
                _put_u32(entry + TIME_CHECKED, _time_crc(self.base, entry))
                self.time_index += (<char*>entry)[:TIME_ENTRY]
                self.last_indexed = self.position
            self.headers_crc = crc32c_of(p + at, 17, self.headers_crc)
            if timestamp > self.max_timestamp:
                self.max_timestamp = timestamp
            self.records += <int32_t>_u32(p + at + 57)
            self.batches += 1
            self.next_offset = base_offset + <int32_t>_u32(p + at + 23) + 1
            self.position += size
            at += size
        return at


cpdef bytes pack_slot(
    long long log_id, long long epoch, long long start, long long visible_end, long long durable_end,
    long long stable_end,
):
    """Encode a slot; slots.SLOT describes the format."""
    cdef bytes packed = PyBytes_FromStringAndSize(NULL, SLOT)
    cdef uint8_t* p = <uint8_t*>PyBytes_AS_STRING(packed)
    memset(p, 0, SLOT)
    put_le(p, <uint64_t>log_id, 8)
    put_le(p + 8, <uint64_t>epoch, 8)
    put_le(p + 16, <uint64_t>start, 8)
    put_le(p + 24, <uint64_t>visible_end, 8)
    put_le(p + 32, <uint64_t>durable_end, 8)
    put_le(p + 40, <uint64_t>stable_end, 8)
    put_le(p + SLOT_CHECKED, crc32c_of(p, SLOT_CHECKED, 0), 4)
    return packed


cdef bytes ZEROS = bytes(SECTOR)


cpdef list journal_entry(
    unsigned long long number, unsigned long long sequence, unsigned long long synced, list body
):
    """The buffers of a journal entry, padded to whole sectors; journal.ENTRY_HEADER describes the format."""
    cdef bytes header = PyBytes_FromStringAndSize(NULL, ENTRY_HEADER)
    cdef uint8_t* p = <uint8_t*>PyBytes_AS_STRING(header)
    cdef Py_buffer view
    cdef Py_ssize_t size = 0
    cdef uint32_t crc
    cdef list buffers = [header]
    for data in body:
        size += len(data)
        buffers.append(data)
    if size > 0xFFFFFFFF:
        raise OverflowError(f"a journal entry of {size:,} bytes is too large")
    put_le(p + 4, ENTRY_MAGIC, 4)
    put_le(p + 8, number, 8)
    put_le(p + 16, sequence, 8)
    put_le(p + 24, synced, 8)
    put_le(p + 32, <uint64_t>size, 4)
    crc = crc32c_of(p + 4, ENTRY_HEADER - 4, 0)
    for data in body:
        PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
        crc = crc32c_of(<const uint8_t*>view.buf, view.len, crc)
        PyBuffer_Release(&view)
    put_le(p, crc, 4)
    size = (ENTRY_HEADER + size) % SECTOR
    buffers.append(ZEROS[:SECTOR - size] if size else b"")
    return buffers


cpdef Py_ssize_t total(buffers) except -1:
    """The number of bytes in all buffers."""
    cdef Py_ssize_t size = 0
    for data in buffers:
        size += len(data)
    return size
