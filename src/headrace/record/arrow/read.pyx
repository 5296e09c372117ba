# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Decodes batches into columns in Arrow's memory layout, without a Python object per record."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport INT32_MAX, INT64_MAX, INT64_MIN, int32_t, int64_t, uint8_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcpy, memset

from headrace.record.batch_layout cimport (
    CODEC_MASK, CONTROL_BIT, FAULT_INCOMPLETE, FAULT_NONE, FAULT_OFFSETS, FAULT_RECORD, FAULT_TIMESTAMP, HEADER_SIZE,
    LOG_APPEND_TIME_BIT, TRANSACTIONAL_BIT, Batch, Fault, HeaderView, RecordView, fault_reason, read_batch, read_header,
    read_record,
)
from headrace.record.raw cimport add_overflows
from headrace.record.compression.payload cimport Payload

from headrace.errors import CorruptBatch, InvalidInput
from headrace.record.layout import DECOMPRESSED_BYTES_MAX, MAX_OFFSET, WANT_ALL
from headrace.record.types import BinaryColumn, Columns, HeadersColumn

cdef enum:                      # the WANT_ bits of layout.py
    WANT_OFFSET = 1
    WANT_TIMESTAMP = 2
    WANT_KEY = 4
    WANT_VALUE = 8
    WANT_HEADERS = 16
    WANT_TIMESTAMP_TYPE = 32


cdef class Block:
    """Memory that grows while a column is filled and is then exported through the buffer protocol."""
    cdef uint8_t* data
    cdef Py_ssize_t size
    cdef Py_ssize_t capacity

    def __dealloc__(self):
        free(self.data)

    def __getbuffer__(self, Py_buffer* view, int flags):
        # An empty column still needs an address.
        PyBuffer_FillInfo(view, self, self.data if self.data != NULL else <uint8_t*>b"", self.size, 1, flags)

    cdef bint reserve(self, Py_ssize_t more) noexcept nogil:
        """Reserve space for `more` additional bytes. Returns False if out of memory."""
        cdef Py_ssize_t capacity
        cdef uint8_t* larger
        if more <= self.capacity - self.size:
            return True
        capacity = max(self.size + more, 2 * self.capacity)
        larger = <uint8_t*>realloc(self.data, capacity)
        if larger == NULL:
            return False
        self.data = larger
        self.capacity = capacity
        return True


cdef class Binary:
    """Builder of an Arrow binary column: offsets, bytes and a validity bitmap."""
    cdef Block offsets
    cdef Block data
    cdef Block validity
    cdef Py_ssize_t rows
    cdef Py_ssize_t nulls

    def __cinit__(self):
        self.offsets, self.data, self.validity = Block(), Block(), Block()
        if not self.offsets.reserve(sizeof(int32_t)):
            raise MemoryError
        (<int32_t*>self.offsets.data)[0] = 0
        self.offsets.size = sizeof(int32_t)

    cdef bint reserve(self, Py_ssize_t rows, Py_ssize_t size) noexcept nogil:
        cdef Py_ssize_t bitmap = (self.rows + rows + 7) // 8
        if not self.offsets.reserve(rows * sizeof(int32_t)) or not self.data.reserve(size):
            return False
        if bitmap > self.validity.size:
            if not self.validity.reserve(bitmap - self.validity.size):
                return False
            # All valid until a null clears its bit.
            memset(self.validity.data + self.validity.size, 0xFF, bitmap - self.validity.size)
            self.validity.size = bitmap
        return True

    cdef inline void add(self, const uint8_t* data, int64_t size) noexcept nogil:
        """Append one value; size -1 is null. The caller has reserved the space."""
        cdef uint8_t* bits
        if size > 0:
            memcpy(self.data.data + self.data.size, data, size)
            self.data.size += size
        elif size < 0:
            bits = self.validity.data + (self.rows >> 3)
            bits[0] = bits[0] & ~<uint8_t>(1 << (self.rows & 7))
            self.nulls += 1
        self.rows += 1
        (<int32_t*>(self.offsets.data + self.offsets.size))[0] = <int32_t>self.data.size
        self.offsets.size += sizeof(int32_t)

    cdef object finish(self):
        # The bitmap was sized for the reserved rows; Arrow expects it to match the rows that were added.
        self.validity.size = (self.rows + 7) // 8
        return BinaryColumn(
            memoryview(self.offsets), memoryview(self.data),
            memoryview(self.validity) if self.nulls else None, self.nulls)


cdef class _Decoder:
    cdef int want
    cdef bint microseconds
    cdef int64_t from_offset
    cdef int64_t to_offset
    cdef bint transactional
    cdef Py_ssize_t rows
    cdef Block offsets
    cdef Block timestamps
    cdef Block timestamp_types
    cdef Block header_offsets
    cdef Binary keys
    cdef Binary values
    cdef Binary header_names
    cdef Binary header_values

    def __cinit__(self, int want, bint microseconds, int64_t from_offset, int64_t to_offset):
        self.want, self.microseconds = want, microseconds
        self.from_offset, self.to_offset = from_offset, to_offset
        self.offsets, self.timestamps, self.timestamp_types, self.header_offsets = Block(), Block(), Block(), Block()
        self.keys, self.values, self.header_names, self.header_values = Binary(), Binary(), Binary(), Binary()
        if not self.header_offsets.reserve(sizeof(int32_t)):
            raise MemoryError
        (<int32_t*>self.header_offsets.data)[0] = 0
        self.header_offsets.size = sizeof(int32_t)

    cdef bint reserve(self, Py_ssize_t rows, Py_ssize_t size) noexcept nogil:
        """Reserve space for `rows` records of `size` bytes in total: whatever the records hold, no column can need
        more. Header rows are reserved in add_headers. Returns False if out of memory."""
        if self.want & WANT_OFFSET and not self.offsets.reserve(rows * sizeof(int64_t)):
            return False
        if self.want & WANT_TIMESTAMP and not self.timestamps.reserve(rows * sizeof(int64_t)):
            return False
        if self.want & WANT_TIMESTAMP_TYPE and not self.timestamp_types.reserve(rows * sizeof(int32_t)):
            return False
        if self.want & WANT_KEY and not self.keys.reserve(rows, size):
            return False
        if self.want & WANT_VALUE and not self.values.reserve(rows, size):
            return False
        if self.want & WANT_HEADERS and not (
            self.header_offsets.reserve(rows * sizeof(int32_t))
            and self.header_names.reserve(0, size) and self.header_values.reserve(0, size)
        ):
            return False
        return True

    cdef bint full(self, Py_ssize_t more) noexcept nogil:
        """Whether `more` additional bytes could take a column past the range of its 32-bit offsets."""
        return (self.keys.data.size > INT32_MAX - more or self.values.data.size > INT32_MAX - more
                or self.header_names.data.size > INT32_MAX - more
                or self.header_values.data.size > INT32_MAX - more)

    cdef Py_ssize_t byte_count(self) noexcept nogil:
        """Bytes collected so far. Includes the offsets of headers: one record may have millions of empty headers."""
        return (self.keys.data.size + self.values.data.size
                + self.header_names.data.size + self.header_values.data.size
                + 2 * <Py_ssize_t>sizeof(int32_t) * self.header_names.rows)

    cdef Fault add_headers(self, const RecordView* record) noexcept nogil:
        cdef const uint8_t* p = record.headers
        cdef HeaderView header
        cdef int64_t i
        # `reserve` has reserved the bytes for the whole batch, but a batch does not declare its number of headers, so
        # their rows are reserved per record.
        if not (self.header_names.reserve(record.header_count, 0)
                and self.header_values.reserve(record.header_count, 0)):
            return FAULT_INCOMPLETE
        for i in range(record.header_count):
            p = read_header(p, record.end, &header)
            if p == NULL:
                return FAULT_RECORD
            self.header_names.add(header.key, header.key_size)
            self.header_values.add(header.value, header.value_size)
        return FAULT_NONE if p == record.end else FAULT_RECORD

    cdef Fault add_batch(self, const uint8_t* p, const uint8_t* end, const Batch* batch) noexcept nogil:
        """Add the records between p and end. FAULT_INCOMPLETE means out of memory."""
        cdef RecordView record
        cdef int64_t offset, timestamp = 0
        cdef int64_t last_delta = batch.last_offset - batch.base_offset
        cdef int32_t i
        cdef int want = self.want
        cdef int32_t timestamp_type = 1 if batch.attributes & LOG_APPEND_TIME_BIT else 0
        cdef Fault fault
        if not self.reserve(batch.count, end - p):
            return FAULT_INCOMPLETE
        for i in range(batch.count):
            p = read_record(p, end, &record)
            if p == NULL:
                return FAULT_RECORD
            if record.offset_delta < 0 or record.offset_delta > last_delta:
                return FAULT_OFFSETS
            offset = batch.base_offset + record.offset_delta
            if offset < self.from_offset or offset >= self.to_offset:
                continue
            if want & WANT_OFFSET:
                (<int64_t*>(self.offsets.data + self.offsets.size))[0] = offset
                self.offsets.size += sizeof(int64_t)
            if want & WANT_TIMESTAMP:
                if timestamp_type:
                    timestamp = batch.max_timestamp
                elif add_overflows(batch.base_timestamp, record.timestamp_delta, &timestamp):
                    return FAULT_TIMESTAMP
                if self.microseconds:
                    timestamp = max(min(timestamp, INT64_MAX // 1000), INT64_MIN // 1000) * 1000
                (<int64_t*>(self.timestamps.data + self.timestamps.size))[0] = timestamp
                self.timestamps.size += sizeof(int64_t)
            if want & WANT_TIMESTAMP_TYPE:
                (<int32_t*>(self.timestamp_types.data + self.timestamp_types.size))[0] = timestamp_type
                self.timestamp_types.size += sizeof(int32_t)
            if want & WANT_KEY:
                self.keys.add(record.key, record.key_size)
            if want & WANT_VALUE:
                self.values.add(record.value, record.value_size)
            if want & WANT_HEADERS:
                if record.header_count:
                    fault = self.add_headers(&record)
                    if fault != FAULT_NONE:
                        return fault
                (<int32_t*>(self.header_offsets.data + self.header_offsets.size))[0] = <int32_t>self.header_names.rows
                self.header_offsets.size += sizeof(int32_t)
            self.rows += 1
        return FAULT_NONE

    cdef object finish(self, int64_t next_offset, Py_ssize_t position):
        return Columns(
            self.rows,
            memoryview(self.offsets) if self.want & WANT_OFFSET else None,
            memoryview(self.timestamps) if self.want & WANT_TIMESTAMP else None,
            memoryview(self.timestamp_types) if self.want & WANT_TIMESTAMP_TYPE else None,
            self.keys.finish() if self.want & WANT_KEY else None,
            self.values.finish() if self.want & WANT_VALUE else None,
            HeadersColumn(
                memoryview(self.header_offsets), self.header_names.finish(), self.header_values.finish()
            ) if self.want & WANT_HEADERS else None,
            next_offset, position, self.transactional)


cdef bint _is_aborted(list aborted, const Batch* batch):
    for producer_id, first_offset, last_offset in aborted:
        if producer_id == batch.producer_id and first_offset <= batch.base_offset <= last_offset:
            return True
    return False


def columns(
    buf, Py_ssize_t start=0, end=None, *, int64_t from_offset=0, int64_t to_offset=MAX_OFFSET, int want=WANT_ALL,
    Py_ssize_t decompressed_bytes_max=DECOMPRESSED_BYTES_MAX, Py_ssize_t rows_max=INT32_MAX,
    Py_ssize_t bytes_max=INT32_MAX, bint microseconds=False, bint verify_crc=True, aborted=(),
    bint control=False,
):
    """The records of [from_offset, to_offset) as columns; see types.Columns. want is a sum of layout.WANT_ bits.

    Stops before a batch that the buffer truncates, at to_offset, and after the batch that reaches rows_max rows or
    bytes_max bytes of data; continue from Columns.position. Control batches are skipped unless control is set.
    Transactional batches in a range of `aborted`, given as (producer id, first offset, last offset), are always
    skipped. The first invalid batch raises CorruptBatch and the rows decoded before it are lost: to get them, call
    again with `end` set to its position.
    """
    cdef Py_buffer view
    cdef const uint8_t* base
    cdef const uint8_t* stop
    cdef Py_ssize_t at = start, limit = min(decompressed_bytes_max, INT32_MAX)
    cdef int64_t next_offset = from_offset
    cdef Batch batch
    cdef Fault fault = FAULT_NONE
    cdef _Decoder decoder = _Decoder(want, microseconds, from_offset, to_offset)
    cdef Payload payload = Payload()
    cdef list ranges = list(aborted)
    PyObject_GetBuffer(buf, &view, PyBUF_SIMPLE)
    try:
        if not 0 <= start <= (view.len if end is None else end) <= view.len:
            raise InvalidInput(f"bytes {start} to {end} are not inside a buffer of {view.len}")
        base = <const uint8_t*>view.buf
        stop = base + (view.len if end is None else <Py_ssize_t>end)
        # No byte past to_offset is read: a write may be in progress there.
        while (base + at < stop and next_offset < to_offset
               and decoder.rows < rows_max and decoder.byte_count() < bytes_max):
            with nogil:
                fault = read_batch(base + at, stop, verify_crc, &batch)
            if fault == FAULT_INCOMPLETE:
                break
            if fault != FAULT_NONE:
                raise CorruptBatch(fault_reason(fault), at)
            if batch.base_offset >= to_offset:
                break
            if batch.last_offset >= from_offset and (control or not batch.attributes & CONTROL_BIT) and not (
                ranges and batch.attributes & TRANSACTIONAL_BIT and _is_aborted(ranges, &batch)
            ):
                payload.open(buf, base, at, &batch, limit)
                if decoder.full(payload.end - payload.start):
                    break
                with nogil:
                    fault = decoder.add_batch(payload.start, payload.end, &batch)
                payload.close()
                if fault == FAULT_INCOMPLETE:
                    raise MemoryError
                if fault != FAULT_NONE:
                    raise CorruptBatch(fault_reason(fault), at)
                if batch.attributes & TRANSACTIONAL_BIT:
                    decoder.transactional = True
            at += batch.size
            next_offset = max(next_offset, min(batch.last_offset + 1, to_offset))
    finally:
        PyBuffer_Release(&view)
    return decoder.finish(next_offset, at)
