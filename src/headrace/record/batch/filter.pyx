# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Rebuilds a batch with only some of its records, or with a delete horizon, for compaction. The remaining records
keep their offsets and timestamps."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from libc.stdint cimport INT64_MIN, int16_t, int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcpy

from headrace.record.batch_layout cimport (
    ATTRIBUTES_AT, BASE_TIMESTAMP_AT, CODEC_MASK, COUNT_AT, CRC_AT, DELETE_HORIZON_BIT, FAULT_NONE, HEADER_SIZE,
    LENGTH_AT, LOG_APPEND_TIME_BIT, MAX_TIMESTAMP_AT, PREFIX_SIZE, Batch, Fault, RecordView, check_headers,
    fault_reason, read_batch, read_record,
)
from headrace.record.batch.crc32c cimport crc32c_of
from headrace.record.raw cimport (
    add_overflows, get_varint, put16, put32, put64, put_varint, sub_overflows, varint_size,
)
from headrace.record.compression.payload cimport Payload

from array import array

from headrace.errors import CorruptBatch, InvalidInput
from headrace.record.compression.codecs import compress
from headrace.record.layout import DECOMPRESSED_BYTES_MAX

cdef enum:
    VARINT_SIZE_MAX = 10
    PAYLOAD_SIZE_MAX = 0x7FFFFFFF - HEADER_SIZE     # limit for an uncompressed payload: a batch's length is an int32


cdef class _Keep:
    """Decides whether the record at an offset is kept. Must be queried in ascending order of offsets."""
    cdef object call
    cdef const int64_t[::1] offsets
    cdef Py_ssize_t next

    def __cinit__(self, keep):
        if callable(keep):
            self.call = keep
        else:
            self.offsets = keep if isinstance(keep, array) and keep.typecode == "q" else array("q", keep)

    cdef int asks(self, int64_t offset) except -1:
        if self.call is not None:
            return 1 if self.call(offset) else 0
        while self.next < self.offsets.shape[0] and self.offsets[self.next] < offset:
            self.next += 1
        return 1 if self.next < self.offsets.shape[0] and self.offsets[self.next] == offset else 0

    cdef void begin(self) noexcept:
        self.next = 0


def filter_batch(
    buf, info, keep, *, delete_horizon_ms=None, Py_ssize_t decompressed_bytes_max=DECOMPRESSED_BYTES_MAX
):
    """The batch at info.position reduced to the records whose offsets are kept, or None if no record is kept.

    keep is a predicate on the offset, or the kept offsets in ascending order. The base and last offsets stay the same,
    so that the batch covers the same range of the log. The count, max timestamp and checksum are recomputed. The codec
    stays the same, unless compression would not make the batch smaller.

    A delete horizon is stored as the base timestamp and marked by bit 6 of the attributes, as in Kafka. A batch that
    already has a horizon keeps it. A batch gets none if a record's timestamp is too far from the horizon for a 64-bit
    delta, or if the batch would become larger than the limit.
    """
    cdef Py_buffer view
    cdef Batch batch
    cdef Fault fault
    cdef Py_ssize_t at = info.position
    cdef Payload payload = Payload()
    cdef _Keep kept = _Keep(keep)
    cdef const uint8_t* header
    PyObject_GetBuffer(buf, &view, PyBUF_SIMPLE)
    try:
        if not 0 <= at <= view.len:
            raise InvalidInput(f"byte {at} is not inside a buffer of {view.len}")
        header = <uint8_t*>view.buf + at
        fault = read_batch(header, <uint8_t*>view.buf + view.len, True, &batch)
        if fault != FAULT_NONE:
            raise CorruptBatch(fault_reason(fault), at)
        payload.open(buf, <uint8_t*>view.buf, at, &batch, decompressed_bytes_max)
        if delete_horizon_ms is not None and not batch.attributes & DELETE_HORIZON_BIT:
            made = _filtered(header, at, &batch, payload, kept, True, delete_horizon_ms, decompressed_bytes_max)
            if made is not NotImplemented:
                return made
            kept.begin()
        return _filtered(header, at, &batch, payload, kept, False, 0, decompressed_bytes_max)
    finally:
        payload.close()
        PyBuffer_Release(&view)


cdef object _filtered(
    const uint8_t* header, Py_ssize_t at, const Batch* batch, Payload payload, _Keep keep, bint has_horizon,
    int64_t horizon, Py_ssize_t payload_max,
):
    """Returns NotImplemented if the batch cannot take the horizon; see filter_batch."""
    # A horizon can lengthen two varints of each record: its size and its timestamp delta.
    cdef Py_ssize_t longer = <Py_ssize_t>batch.count * 2 * VARINT_SIZE_MAX if has_horizon else 0
    cdef bytearray out = PyByteArray_FromStringAndSize(NULL, HEADER_SIZE + (payload.end - payload.start) + longer)
    cdef uint8_t* written = <uint8_t*>PyByteArray_AS_STRING(out) + HEADER_SIZE
    cdef const uint8_t* p = payload.start
    cdef const uint8_t* record_start
    cdef RecordView record
    cdef int64_t max_timestamp = INT64_MIN, timestamp = 0, delta = 0
    cdef int32_t i, count = 0
    cdef int16_t attributes = batch.attributes
    for i in range(batch.count):
        record_start = p
        p = read_record(p, payload.end, &record)
        if p == NULL or not check_headers(&record):
            raise CorruptBatch("a record does not fit its length", at)
        if record.offset_delta < 0 or record.offset_delta > batch.last_offset - batch.base_offset:
            raise CorruptBatch("a record lies outside the offsets of its batch", at)
        if add_overflows(batch.base_timestamp, record.timestamp_delta, &timestamp):
            raise CorruptBatch("the timestamps do not agree", at)
        if not keep.asks(batch.base_offset + record.offset_delta):
            continue
        if has_horizon:
            if sub_overflows(timestamp, horizon, &delta):
                return NotImplemented
            written = _put_moved(written, record_start, p, delta)
        else:
            memcpy(written, record_start, p - record_start)
            written += p - record_start
        count += 1
        max_timestamp = max(max_timestamp, timestamp)
    if count == 0:
        return None
    if count == batch.count and not has_horizon:
        return bytearray(header[:batch.size])
    del out[written - <uint8_t*>PyByteArray_AS_STRING(out):]
    if has_horizon and len(out) - HEADER_SIZE > (payload_max if attributes & CODEC_MASK else PAYLOAD_SIZE_MAX):
        return NotImplemented
    if attributes & CODEC_MASK:
        packed = compress(attributes & CODEC_MASK, memoryview(out)[HEADER_SIZE:])
        if len(packed) < len(out) - HEADER_SIZE:
            out[HEADER_SIZE:] = packed
        else:
            attributes &= ~CODEC_MASK
    written = <uint8_t*>PyByteArray_AS_STRING(out)
    memcpy(written, header, HEADER_SIZE)
    if has_horizon:
        attributes |= DELETE_HORIZON_BIT
        put64(written + BASE_TIMESTAMP_AT, horizon)
    put32(written + LENGTH_AT, <uint32_t>(len(out) - PREFIX_SIZE))
    put16(written + ATTRIBUTES_AT, attributes)
    if not attributes & LOG_APPEND_TIME_BIT:
        put64(written + MAX_TIMESTAMP_AT, max_timestamp)
    put32(written + COUNT_AT, count)
    put32(written + CRC_AT, crc32c_of(written + ATTRIBUTES_AT, len(out) - ATTRIBUTES_AT, 0))
    return out


cdef uint8_t* _put_moved(uint8_t* out, const uint8_t* start, const uint8_t* end, int64_t delta) noexcept nogil:
    """Copy the record from start to end, which read_record has checked, with another timestamp delta."""
    cdef int64_t number = 0
    cdef const uint8_t* attributes = get_varint(start, end, &number)
    cdef const uint8_t* rest = get_varint(attributes + 1, end, &number)
    out = put_varint(out, 1 + varint_size(delta) + (end - rest))
    out[0] = attributes[0]
    out = put_varint(out + 1, delta)
    memcpy(out, rest, end - rest)
    return out + (end - rest)
