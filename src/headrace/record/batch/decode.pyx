# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Decodes batches into records, one Python object per record: for HTTP, the command line and cold paths."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, int64_t, uint8_t

from headrace.record.batch_layout cimport (
    CONTROL_BIT, FAULT_DELTA, FAULT_INCOMPLETE, FAULT_NONE, FAULT_RECORD, FAULT_TIMESTAMP, LOG_APPEND_TIME_BIT, Batch,
    Fault, HeaderView, RecordView, fault_reason, read_batch, read_header, read_record,
)
from headrace.record.raw cimport add_overflows
from headrace.record.compression.payload cimport Payload

from headrace.errors import CorruptBatch, InvalidInput
from headrace.record.layout import DECOMPRESSED_BYTES_MAX, MAX_OFFSET
from headrace.record.types import Record


cdef inline object _bytes(const uint8_t* data, int64_t size):
    return None if size < 0 else PyBytes_FromStringAndSize(<const char*>data, size)


cdef tuple _headers(const RecordView* record):
    """The headers, or None if they do not match the count and size that the record declares."""
    cdef const uint8_t* p = record.headers
    cdef HeaderView header
    cdef int64_t i
    cdef list found = []
    for i in range(record.header_count):
        p = read_header(p, record.end, &header)
        if p == NULL:
            return None
        # Invalid UTF-8 is replaced, as in Kafka's own client; the stored bytes are unchanged.
        found.append((
            PyUnicode_DecodeUTF8(<char*>header.key, header.key_size, "replace"),
            _bytes(header.value, header.value_size)))
    return tuple(found) if p == record.end else None


def records(
    buf, Py_ssize_t start=0, end=None, *, int64_t from_offset=0, int64_t to_offset=MAX_OFFSET,
    Py_ssize_t limit=0x7FFFFFFFFFFFFFFF, Py_ssize_t decompressed_bytes_max=DECOMPRESSED_BYTES_MAX,
    bint verify_crc=False, bint control=False,
):
    """The records of [from_offset, to_offset), at most limit. Stops before a batch that the buffer truncates.

    Control batches are skipped unless control is set. Checksums are not verified by default, because reading from the
    log has verified them. Records that do not fit their batch raise CorruptBatch.
    """
    cdef Py_buffer view
    cdef Py_ssize_t at = start, stop
    cdef Batch batch
    cdef Fault fault
    cdef list found = []
    PyObject_GetBuffer(buf, &view, PyBUF_SIMPLE)
    try:
        stop = view.len if end is None else end
        if not 0 <= start <= stop <= view.len:
            raise InvalidInput(f"bytes {start} to {stop} are not inside a buffer of {view.len}")
        while at < stop and len(found) < limit:
            fault = read_batch(<uint8_t*>view.buf + at, <uint8_t*>view.buf + stop, verify_crc, &batch)
            if fault == FAULT_INCOMPLETE:
                break
            if fault != FAULT_NONE:
                raise CorruptBatch(fault_reason(fault), at)
            if batch.base_offset >= to_offset:
                break
            if batch.last_offset >= from_offset and (control or not batch.attributes & CONTROL_BIT):
                _batch_records(
                    buf, <uint8_t*>view.buf, at, &batch, from_offset, to_offset, limit, decompressed_bytes_max, found)
            at += batch.size
        return found
    finally:
        PyBuffer_Release(&view)


cdef int _batch_records(
    buf, const uint8_t* base, Py_ssize_t at, const Batch* batch, int64_t from_offset, int64_t to_offset,
    Py_ssize_t limit, Py_ssize_t limit_bytes, list found,
) except -1:
    cdef Payload payload = Payload()
    payload.open(buf, base, at, batch, limit_bytes)
    _append_records(payload.start, payload.end, at, batch, from_offset, to_offset, limit, found)
    return 0


cdef int _append_records(
    const uint8_t* p, const uint8_t* end, Py_ssize_t at, const Batch* batch, int64_t from_offset, int64_t to_offset,
    Py_ssize_t limit, list found,
) except -1:
    cdef RecordView record
    cdef int64_t offset, timestamp = 0
    cdef int32_t i
    cdef tuple headers
    for i in range(batch.count):
        p = read_record(p, end, &record)
        if p == NULL:
            raise CorruptBatch("a record does not fit its length", at)
        if record.offset_delta < 0 or record.offset_delta > batch.last_offset - batch.base_offset:
            raise CorruptBatch("a record lies outside the offsets of its batch", at)
        offset = batch.base_offset + record.offset_delta
        if offset < from_offset or offset >= to_offset:
            continue
        if len(found) >= limit:
            return 0
        if batch.attributes & LOG_APPEND_TIME_BIT:
            timestamp = batch.max_timestamp
        elif add_overflows(batch.base_timestamp, record.timestamp_delta, &timestamp):
            raise CorruptBatch("the timestamps do not agree", at)
        headers = ()
        if record.header_count:
            headers = _headers(&record)
            if headers is None:
                raise CorruptBatch("a record does not fit its length", at)
        found.append(Record(
            offset, timestamp, _bytes(record.key, record.key_size), _bytes(record.value, record.value_size), headers))
    return 0


cdef Fault _find_at(
    const uint8_t* p, const uint8_t* end, const Batch* batch, int64_t timestamp_ms, int64_t from_offset,
    int64_t to_offset, int64_t* offset, int64_t* timestamp,
) noexcept nogil:
    """Set offset and timestamp to those of the first matching record; offset is -1 if there is none."""
    cdef RecordView record
    cdef int32_t i
    for i in range(batch.count):
        p = read_record(p, end, &record)
        if p == NULL:
            return FAULT_RECORD
        if record.offset_delta < 0 or record.offset_delta > batch.last_offset - batch.base_offset:
            return FAULT_DELTA
        offset[0] = batch.base_offset + record.offset_delta
        if offset[0] < from_offset or offset[0] >= to_offset:
            continue
        if batch.attributes & LOG_APPEND_TIME_BIT:
            timestamp[0] = batch.max_timestamp
        elif add_overflows(batch.base_timestamp, record.timestamp_delta, timestamp):
            return FAULT_TIMESTAMP
        if timestamp[0] >= timestamp_ms:
            return FAULT_NONE
    offset[0] = -1
    return FAULT_NONE


def first_at(
    buf, Py_ssize_t position, int64_t timestamp_ms, *, int64_t from_offset=0, int64_t to_offset=MAX_OFFSET,
    Py_ssize_t decompressed_bytes_max=DECOMPRESSED_BYTES_MAX, bint in_thread=False,
):
    """(offset, timestamp) of the first record of [from_offset, to_offset) at or after timestamp_ms, or None.

    Searches the complete batch at position. Creates no object per record, as millions may precede the match.

    in_thread releases the GIL during the search."""
    cdef Py_buffer view
    cdef Payload payload = Payload()
    cdef Batch batch
    cdef int64_t offset = -1, timestamp = 0
    cdef Fault fault
    PyObject_GetBuffer(buf, &view, PyBUF_SIMPLE)
    try:
        if not 0 <= position <= view.len:
            raise InvalidInput(f"byte {position} is not inside a buffer of {view.len}")
        fault = read_batch(<uint8_t*>view.buf + position, <uint8_t*>view.buf + view.len, False, &batch)
        if fault != FAULT_NONE:
            raise CorruptBatch(fault_reason(fault), position)
        payload.open(buf, <uint8_t*>view.buf, position, &batch, decompressed_bytes_max)
        if in_thread:
            with nogil:
                fault = _find_at(
                    payload.start, payload.end, &batch, timestamp_ms, from_offset, to_offset, &offset, &timestamp)
        else:
            fault = _find_at(
                payload.start, payload.end, &batch, timestamp_ms, from_offset, to_offset, &offset, &timestamp)
        if fault != FAULT_NONE:
            raise CorruptBatch(fault_reason(fault), position)
        return None if offset < 0 else (offset, timestamp)
    finally:
        payload.close()
        PyBuffer_Release(&view)
