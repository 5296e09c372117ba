# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Restores batches from columns: offsets, timestamps, gaps and batch headers come from the columns and are not
assigned. The reverse of read.pyx for rows that were batches before, used to read the tier's Parquet files.

All columns are checked before a byte is written, so that the second pass needs neither checks nor the GIL.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport INT16_MAX, INT16_MIN, INT32_MAX, INT32_MIN, int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from headrace.record.batch_layout cimport (
    ATTRIBUTES_AT, BASE_SEQUENCE_AT, BASE_TIMESTAMP_AT, CODEC_MASK, COUNT_AT, CRC_AT, HEADER_SIZE,
    LAST_OFFSET_DELTA_AT, LEADER_EPOCH_AT, LENGTH_AT, MAGIC_AT, MAX_TIMESTAMP_AT, PREFIX_SIZE, PRODUCER_EPOCH_AT,
    PRODUCER_ID_AT,
)
from headrace.record.batch.crc32c cimport crc32c_of
from headrace.record.raw cimport put16, put32, put64, put_varint, sub_overflows, varint_size

from headrace.errors import InvalidInput


cdef class Cells:
    """An Arrow binary or text column: int32 offsets, bytes and a validity bitmap. Skips the first `first` rows."""
    cdef const int32_t[::1] offsets
    cdef const uint8_t[::1] data
    cdef const uint8_t[::1] validity
    cdef const int32_t* at
    cdef const uint8_t* bytes
    cdef const uint8_t* bits
    cdef Py_ssize_t first
    cdef Py_ssize_t count

    def __init__(self, offsets, data, validity, Py_ssize_t first, Py_ssize_t count):
        cdef Py_ssize_t row
        self.first, self.count = first, count
        self.offsets = memoryview(offsets).cast("B").cast("i") if count else memoryview(bytes(4)).cast("i")
        self.data = memoryview(data).cast("B") if data is not None and len(memoryview(data)) else b"\0"
        self.bits = NULL
        if first < 0 or count < 0 or (count and self.offsets.shape[0] < first + count + 1):
            raise InvalidInput("a column's offsets are fewer than its rows")
        if validity is not None and count:
            self.validity = memoryview(validity).cast("B")
            if self.validity.shape[0] * 8 < first + count:
                raise InvalidInput("a column's bitmap is shorter than its rows")
            self.bits = &self.validity[0]
        self.at = &self.offsets[0]
        self.bytes = &self.data[0]
        for row in range(first, first + count):
            if self.at[row] < 0 or self.at[row + 1] < self.at[row] or self.at[row + 1] > self.data.shape[0]:
                raise InvalidInput(f"row {row} of a column lies outside its data")

    cdef inline int64_t size(self, Py_ssize_t row) noexcept nogil:
        """Size of a row's value; -1 for null."""
        cdef Py_ssize_t i = self.first + row
        if self.bits != NULL and not (self.bits[i >> 3] >> (i & 7)) & 1:
            return -1
        return self.at[i + 1] - self.at[i]

    cdef inline uint8_t* put(self, uint8_t* p, Py_ssize_t row) noexcept nogil:
        cdef int64_t size = self.size(row)
        p = put_varint(p, size)
        if size > 0:
            memcpy(p, self.bytes + self.at[self.first + row], size)
            p += size
        return p

    cdef inline int64_t taken(self, Py_ssize_t row) noexcept nogil:
        """Number of bytes that put writes."""
        cdef int64_t size = self.size(row)
        return varint_size(size) + (size if size > 0 else 0)


cdef class Numbers:
    """An int64 column without nulls."""
    cdef const int64_t[::1] values
    cdef const int64_t* at

    def __init__(self, buffer, Py_ssize_t first, Py_ssize_t count):
        cdef Py_ssize_t have
        self.values = memoryview(buffer).cast("B").cast("q")
        have = self.values.shape[0]
        if first < 0 or count < 1 or have < first + count:
            raise InvalidInput("a column is shorter than its rows")
        self.at = &self.values[first]


cdef class Rows:
    cdef Numbers offsets, timestamps
    cdef Numbers base, last, base_timestamp, max_timestamp, attributes, producer, producer_epoch, sequence, epoch
    cdef Cells keys, values, names, header_values
    cdef const int32_t[::1] header_offsets
    cdef const int32_t* headers
    cdef readonly Py_ssize_t count

    def __init__(self, Py_ssize_t count, dict numbers, Cells keys not None, Cells values not None, header_offsets,
                 Py_ssize_t headers_first, Cells names not None, Cells header_values not None):
        self.count = count
        self.offsets, self.timestamps = numbers["offset"], numbers["timestamp"]
        self.base, self.last = numbers["batch_offset"], numbers["batch_last_offset"]
        self.base_timestamp, self.max_timestamp = numbers["batch_timestamp"], numbers["batch_max_timestamp"]
        self.attributes, self.epoch = numbers["attributes"], numbers["leader_epoch"]
        self.producer, self.producer_epoch = numbers["producer_id"], numbers["producer_epoch"]
        self.sequence = numbers["sequence"]
        self.keys, self.values, self.names, self.header_values = keys, values, names, header_values
        self.header_offsets = memoryview(header_offsets).cast("B").cast("i")
        if keys.count < count or values.count < count or self.header_offsets.shape[0] < headers_first + count + 1:
            raise InvalidInput("a column is shorter than its rows")
        self.headers = &self.header_offsets[headers_first]
        if names.count != header_values.count:
            raise InvalidInput("headers have a name and a value each")
        self._check()

    cdef _check(self):
        cdef Py_ssize_t row
        cdef int64_t delta = 0
        for row in range(self.count):
            if self.headers[row] < 0 or self.headers[row + 1] < self.headers[row] or self.headers[row + 1] > self.names.count:
                raise InvalidInput(f"the headers of row {row} lie outside their column")
            if not 0 <= self.base.at[row] <= self.offsets.at[row] <= self.last.at[row] or \
                    self.last.at[row] - self.base.at[row] > INT32_MAX:
                raise InvalidInput(f"offset {self.offsets.at[row]} does not fit its batch")
            if sub_overflows(self.timestamps.at[row], self.base_timestamp.at[row], &delta):
                raise InvalidInput(f"timestamp {self.timestamps.at[row]} is too far from that of its batch")
            if (not INT16_MIN <= self.attributes.at[row] <= INT16_MAX
                    or not INT16_MIN <= self.producer_epoch.at[row] <= INT16_MAX
                    or not INT32_MIN <= self.sequence.at[row] <= INT32_MAX
                    or not INT32_MIN <= self.epoch.at[row] <= INT32_MAX):
                raise InvalidInput(f"a batch header at offset {self.offsets.at[row]} has a number out of range")

    cdef inline int64_t body(self, Py_ssize_t row) noexcept nogil:
        cdef int64_t size
        cdef Py_ssize_t i
        size = (1 + varint_size(self.timestamps.at[row] - self.base_timestamp.at[row])
                + varint_size(self.offsets.at[row] - self.base.at[row])
                + self.keys.taken(row) + self.values.taken(row)
                + varint_size(self.headers[row + 1] - self.headers[row]))
        for i in range(self.headers[row], self.headers[row + 1]):
            size += self.names.taken(i) + self.header_values.taken(i)
        return size

    cdef inline Py_ssize_t batch_end(self, Py_ssize_t row) noexcept nogil:
        cdef Py_ssize_t end = row + 1
        while end < self.count and self.base.at[end] == self.base.at[row]:
            end += 1
        return end

    cdef int64_t total(self) noexcept nogil:
        """Total size of all batches; -1 if one of them exceeds the maximum size of a batch."""
        cdef int64_t total = 0, size, body
        cdef Py_ssize_t row = 0, end
        while row < self.count:
            end = self.batch_end(row)
            size = HEADER_SIZE
            while row < end:
                body = self.body(row)
                size += varint_size(body) + body
                row += 1
            if size > INT32_MAX:
                return -1
            total += size
        return total

    cdef uint8_t* put_batch(self, uint8_t* start, Py_ssize_t row, Py_ssize_t end) noexcept nogil:
        cdef uint8_t* p = start + HEADER_SIZE
        cdef Py_ssize_t first = row, i
        while row < end:
            p = put_varint(p, self.body(row))
            p[0] = 0
            p = put_varint(p + 1, self.timestamps.at[row] - self.base_timestamp.at[row])
            p = put_varint(p, self.offsets.at[row] - self.base.at[row])
            p = self.keys.put(p, row)
            p = self.values.put(p, row)
            p = put_varint(p, self.headers[row + 1] - self.headers[row])
            for i in range(self.headers[row], self.headers[row + 1]):
                p = self.names.put(p, i)
                p = self.header_values.put(p, i)
            row += 1
        put64(start, <uint64_t>self.base.at[first])
        put32(start + LENGTH_AT, <uint32_t>(p - start - PREFIX_SIZE))
        put32(start + LEADER_EPOCH_AT, <uint32_t>self.epoch.at[first])
        start[MAGIC_AT] = 2
        put16(start + ATTRIBUTES_AT, <uint16_t>(self.attributes.at[first] & ~CODEC_MASK))
        put32(start + LAST_OFFSET_DELTA_AT, <uint32_t>(self.last.at[first] - self.base.at[first]))
        put64(start + BASE_TIMESTAMP_AT, <uint64_t>self.base_timestamp.at[first])
        put64(start + MAX_TIMESTAMP_AT, <uint64_t>self.max_timestamp.at[first])
        put64(start + PRODUCER_ID_AT, <uint64_t>self.producer.at[first])
        put16(start + PRODUCER_EPOCH_AT, <uint16_t>self.producer_epoch.at[first])
        put32(start + BASE_SEQUENCE_AT, <uint32_t>self.sequence.at[first])
        put32(start + COUNT_AT, <uint32_t>(end - first))
        put32(start + CRC_AT, crc32c_of(start + ATTRIBUTES_AT, p - start - ATTRIBUTES_AT, 0))
        return p

    def render(self, int64_t bytes_max):
        """All batches, concatenated and uncompressed. Above bytes_max, raises InvalidInput before allocating memory."""
        cdef int64_t size
        cdef Py_ssize_t row = 0, end
        cdef bytes out
        cdef uint8_t* p
        with nogil:
            size = self.total()
        if size < 0 or size > bytes_max:
            raise InvalidInput(f"the rows make {size:,} bytes of batches, {bytes_max:,} are allowed")
        out = PyBytes_FromStringAndSize(NULL, size)
        p = <uint8_t*>PyBytes_AS_STRING(out)
        with nogil:
            while row < self.count:
                end = self.batch_end(row)
                p = self.put_batch(p, row, end)
                row = end
        return out
