# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Finds the latest record of each key, for key compaction. Creates no object per record and runs without the GIL."""

from cpython.array cimport array, clone
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int32_t, int64_t, uint8_t, uint64_t
from libc.stdlib cimport calloc, free

from headrace.record.batch_layout cimport (
    FAULT_NONE, FAULT_OFFSETS, FAULT_RECORD, Batch, Fault, RecordView, fault_reason, read_batch, read_record,
)
from headrace.record.raw cimport get64
from headrace.record.siphash cimport siphash128
from headrace.record.compression.payload cimport Payload

import os

from headrace.errors import CorruptBatch, InvalidInput
from headrace.record.layout import DECOMPRESSED_BYTES_MAX

cdef array _LONGS = array("q")

cdef enum:
    SLOTS_MIN = 64

cdef struct Slot:
    uint64_t hash[2]
    int64_t next_offset     # last offset of this key plus one; 0 marks a free slot


cdef class LatestOffsets:
    """Maps each key that was seen to its last offset.

    A key is identified by a 128-bit keyed hash. An entry takes 24 bytes however long the key is, so the memory of a
    compaction is bounded by the number of keys. Kafka does the same, but with an unkeyed hash.
    """
    cdef Slot* slots
    cdef size_t mask
    cdef size_t used
    cdef uint64_t secret[2]

    def __cinit__(self):
        cdef bytes secret = os.urandom(16)
        self.secret[0] = get64(<const uint8_t*>secret)
        self.secret[1] = get64(<const uint8_t*>secret + 8)
        self.slots = <Slot*>calloc(SLOTS_MIN, sizeof(Slot))
        if self.slots == NULL:
            raise MemoryError
        self.mask = SLOTS_MIN - 1

    def __dealloc__(self):
        free(self.slots)

    def __len__(self):
        return self.used

    cdef Slot* find(self, const uint64_t* hash) noexcept nogil:
        """The slot of this key, or the free slot where it belongs."""
        cdef size_t at = hash[0] & self.mask
        cdef Slot* slot = &self.slots[at]
        while slot.next_offset and (slot.hash[0] != hash[0] or slot.hash[1] != hash[1]):
            at = (at + 1) & self.mask
            slot = &self.slots[at]
        return slot

    cdef bint put(self, const uint64_t* hash, int64_t next_offset) noexcept nogil:
        """Returns False if out of memory."""
        cdef Slot* slot = self.find(hash)
        if not slot.next_offset:
            if (self.used + 1) * 4 > (self.mask + 1) * 3:
                if not self.grow():
                    return False
                slot = self.find(hash)
            self.used += 1
            slot.hash[0] = hash[0]
            slot.hash[1] = hash[1]
        slot.next_offset = max(slot.next_offset, next_offset)
        return True

    cdef bint grow(self) noexcept nogil:
        cdef Slot* former = self.slots
        cdef size_t count = self.mask + 1, i
        cdef Slot* more = <Slot*>calloc(2 * count, sizeof(Slot))
        if more == NULL:
            return False
        self.slots = more
        self.mask = 2 * count - 1
        for i in range(count):
            if former[i].next_offset:
                self.find(former[i].hash)[0] = former[i]
        free(former)
        return True

    cdef int64_t next_offset_of(self, const RecordView* record) noexcept nogil:
        """The last offset of the record's key plus one; 0 if the key was not seen."""
        cdef uint64_t hash[2]
        siphash128(record.key, record.key_size, self.secret, hash)
        return self.find(hash).next_offset

    def learn(self, buf, info, *, Py_ssize_t decompressed_bytes_max=DECOMPRESSED_BYTES_MAX):
        """Record the keys and offsets of the batch at info.position. The caller has verified its checksum."""
        cdef _Reader reader = _Reader(buf, info.position, decompressed_bytes_max)
        cdef RecordView record
        cdef uint64_t hash[2]
        cdef int64_t offset = 0
        cdef bint has_room = True
        with nogil:
            while has_room and reader.next(&record, &offset):
                if record.key_size >= 0:
                    siphash128(record.key, record.key_size, self.secret, hash)
                    has_room = self.put(hash, offset + 1)
        if not has_room:
            raise MemoryError
        reader.finish()

    def take(self, LatestOffsets other):
        """Merge the entries of another map. It must share this map's hash secret, so it must come from `apart`."""
        cdef size_t i
        if other.secret[0] != self.secret[0] or other.secret[1] != self.secret[1]:
            raise InvalidInput("their hashes have nothing to do with each other")
        for i in range(other.mask + 1):
            if other.slots[i].next_offset and not self.put(other.slots[i].hash, other.slots[i].next_offset):
                raise MemoryError

    def apart(self):
        """A new, empty map with the same hash secret, whose contents this map can `take` later."""
        cdef LatestOffsets made = LatestOffsets()
        made.secret[0], made.secret[1] = self.secret[0], self.secret[1]
        return made


cdef class _Reader:
    """Iterates over the records of one batch. `next` runs without the GIL, so it only stores a fault; `finish` raises
    it and needs the GIL."""
    cdef Py_buffer view
    cdef bint is_open
    cdef Payload payload
    cdef Batch batch
    cdef Py_ssize_t at
    cdef const uint8_t* p
    cdef int32_t left
    cdef Fault fault

    def __cinit__(self, buf, Py_ssize_t at, Py_ssize_t decompressed_bytes_max):
        cdef const uint8_t* base
        PyObject_GetBuffer(buf, &self.view, PyBUF_SIMPLE)
        self.is_open = True
        if not 0 <= at <= self.view.len:
            raise InvalidInput(f"byte {at} is not inside a buffer of {self.view.len}")
        base = <const uint8_t*>self.view.buf
        self.at = at
        self.fault = read_batch(base + at, base + self.view.len, False, &self.batch)
        self.finish()
        self.payload = Payload()
        self.payload.open(buf, base, at, &self.batch, decompressed_bytes_max)
        self.p = self.payload.start
        self.left = self.batch.count

    def __dealloc__(self):
        if self.is_open:
            PyBuffer_Release(&self.view)

    cdef bint next(self, RecordView* record, int64_t* offset) noexcept nogil:
        if self.left == 0:
            return False
        self.left -= 1
        self.p = read_record(self.p, self.payload.end, record)
        if self.p == NULL:
            self.fault = FAULT_RECORD
            return False
        if record.offset_delta < 0 or record.offset_delta > self.batch.last_offset - self.batch.base_offset:
            self.fault = FAULT_OFFSETS
            return False
        offset[0] = self.batch.base_offset + record.offset_delta
        return True

    cdef int finish(self) except -1:
        if self.fault != FAULT_NONE:
            raise CorruptBatch(fault_reason(self.fault), self.at)
        return 0


def keep_latest(
    buf, info, LatestOffsets latest, *, int64_t start, int64_t until, bint tombstones,
    Py_ssize_t decompressed_bytes_max=DECOMPRESSED_BYTES_MAX,
):
    """(offsets, has tombstones): the offsets of the batch at info.position that compaction keeps, and whether they
    include tombstones before `until`.

    Kept are records without a key, the latest record of each key (a tombstone only if `tombstones` is set), and
    everything from `until` on. `latest` has learned the records from `start` on. Before `start` the log is already
    compacted: each key occurs once, and its record is dropped if the key was seen again. From `start` on, a key that
    was not learned belongs to an aborted transaction and is dropped."""
    cdef _Reader reader = _Reader(buf, info.position, decompressed_bytes_max)
    cdef array found = clone(_LONGS, reader.batch.count, zero=False)
    cdef int64_t* kept = <int64_t*>found.data.as_longlongs
    cdef Py_ssize_t count = 0
    cdef RecordView record
    cdef int64_t offset = 0, seen
    cdef bint has_tombstones = False
    with nogil:
        while reader.next(&record, &offset):
            if record.key_size >= 0 and offset < until:
                seen = latest.next_offset_of(&record)
                if seen > offset + 1 or (offset >= start and seen != offset + 1):
                    continue
                if record.value_size < 0:
                    if not tombstones:
                        continue
                    has_tombstones = True
            kept[count] = offset
            count += 1
    reader.finish()
    return found[:count], has_tombstones


def keep_listed(
    buf, info, const int64_t[::1] offsets, *, int64_t until, bint tombstones,
    Py_ssize_t decompressed_bytes_max=DECOMPRESSED_BYTES_MAX,
):
    """Like keep_latest, but the caller supplies the offsets of the latest records: `offsets`, in ascending order."""
    cdef _Reader reader = _Reader(buf, info.position, decompressed_bytes_max)
    cdef array found = clone(_LONGS, reader.batch.count, zero=False)
    cdef int64_t* kept = <int64_t*>found.data.as_longlongs
    cdef Py_ssize_t count = 0, low = 0, high = offsets.shape[0], middle
    cdef RecordView record
    cdef int64_t offset = 0
    cdef bint has_tombstones = False
    with nogil:
        while low < high:  # binary search for the first offset of this batch
            middle = (low + high) // 2
            if offsets[middle] < reader.batch.base_offset:
                low = middle + 1
            else:
                high = middle
        while reader.next(&record, &offset):
            if record.key_size >= 0 and offset < until:
                while low < offsets.shape[0] and offsets[low] < offset:
                    low += 1
                if low == offsets.shape[0] or offsets[low] != offset:
                    continue
                if record.value_size < 0:
                    if not tombstones:
                        continue
                    has_tombstones = True
            kept[count] = offset
            count += 1
    reader.finish()
    return found[:count], has_tombstones
