# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Decodes batches into records, one Python object per record: for HTTP, the command line and cold paths."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, int64_t, uint8_t
from libc.string cimport memcpy

from headrace.record.batch_layout cimport (
    CONTROL_BIT, FAULT_DELTA, FAULT_INCOMPLETE, FAULT_NONE, FAULT_RECORD, FAULT_TIMESTAMP, LOG_APPEND_TIME_BIT, Batch,
    Fault, HeaderView, RecordView, fault_reason, read_batch, read_header, read_record,
)
from headrace.record.raw cimport add_overflows
from headrace.record.compression.payload cimport Payload

from headrace.errors import CorruptBatch, InvalidInput, RecordTooLarge
from headrace.record.layout import DECOMPRESSED_BYTES_MAX, MAX_OFFSET
from headrace.record.types import Record

cdef enum:
    RECORD_OVERHEAD = 64        # estimate of what a record takes beside its bytes
    APART_BYTES = 64 * 1024     # in a thread, larger parts are copied without the GIL
    APART_RECORDS = 256         # in a thread, the GIL is offered to other threads after so many records


cdef inline object _bytes(const uint8_t* data, int64_t size):
    return None if size < 0 else PyBytes_FromStringAndSize(<const char*>data, size)


cdef object _bytes_apart(const uint8_t* data, int64_t size):
    """Like _bytes, without the GIL while a large part is copied."""
    cdef object found
    cdef char* to
    if size < APART_BYTES:
        return _bytes(data, size)
    found = PyBytes_FromStringAndSize(NULL, size)
    to = PyBytes_AS_STRING(found)
    with nogil:
        memcpy(to, data, size)
    return found


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


def records_of(
    buf, Py_ssize_t position, *, int64_t from_offset=0, int64_t to_offset=MAX_OFFSET,
    Py_ssize_t limit=0x7FFFFFFFFFFFFFFF, Py_ssize_t bytes_max=0x7FFFFFFFFFFFFFFF,
    Py_ssize_t record_bytes_max=0x7FFFFFFFFFFFFFFF, Py_ssize_t decompressed_bytes_max=DECOMPRESSED_BYTES_MAX,
    bint values=True, bint in_thread=False,
):
    """(records, next offset, bytes) of the complete batch at position: the records of [from_offset, to_offset), at most
    `limit`, about `bytes_max` bytes of them but at least one, and the offset to continue at.

    A record of more than record_bytes_max raises RecordTooLarge if it is the first, and otherwise ends the list: its
    size is known before anything is copied. Without `values`, records have no value and no headers, and only the key
    counts. A control batch has no records. Each record counts with its key, value and headers, and an overhead.

    in_thread gives other threads the GIL regularly, and while large parts are copied."""
    cdef Py_buffer view
    cdef Payload payload = Payload()
    cdef Batch batch
    cdef Fault fault
    cdef RecordView record
    cdef const uint8_t* p
    cdef int64_t offset, timestamp = 0, size, total = 0
    cdef int32_t i
    cdef tuple headers
    cdef object key, value
    cdef list found = []
    PyObject_GetBuffer(buf, &view, PyBUF_SIMPLE)
    try:
        if not 0 <= position <= view.len:
            raise InvalidInput(f"byte {position} is not inside a buffer of {view.len}")
        fault = read_batch(<uint8_t*>view.buf + position, <uint8_t*>view.buf + view.len, False, &batch)
        if fault != FAULT_NONE:
            raise CorruptBatch(fault_reason(fault), position)
        if batch.attributes & CONTROL_BIT or batch.last_offset < from_offset or batch.base_offset >= to_offset:
            return found, min(batch.last_offset + 1, to_offset), 0
        payload.open(buf, <uint8_t*>view.buf, position, &batch, decompressed_bytes_max)
        p = payload.start
        for i in range(batch.count):
            if in_thread and i % APART_RECORDS == APART_RECORDS - 1:
                with nogil:
                    pass
            p = read_record(p, payload.end, &record)
            if p == NULL:
                raise CorruptBatch("a record does not fit its length", position)
            if record.offset_delta < 0 or record.offset_delta > batch.last_offset - batch.base_offset:
                raise CorruptBatch("a record lies outside the offsets of its batch", position)
            offset = batch.base_offset + record.offset_delta
            if offset < from_offset:
                continue
            if offset >= to_offset:
                break
            size = max(record.key_size, 0)
            if values:
                size += max(record.value_size, 0)
                if record.header_count:
                    size += record.end - record.headers
            if size > record_bytes_max and not found:
                raise RecordTooLarge(offset, size, record_bytes_max)
            if len(found) >= limit or size > record_bytes_max or (found and total + size + RECORD_OVERHEAD > bytes_max):
                return found, offset, total
            total += size + RECORD_OVERHEAD
            if batch.attributes & LOG_APPEND_TIME_BIT:
                timestamp = batch.max_timestamp
            elif add_overflows(batch.base_timestamp, record.timestamp_delta, &timestamp):
                raise CorruptBatch("the timestamps do not agree", position)
            headers = ()
            if values and record.header_count:
                headers = _headers(&record)
                if headers is None:
                    raise CorruptBatch("a record does not fit its length", position)
            if in_thread:
                key = _bytes_apart(record.key, record.key_size)
                value = _bytes_apart(record.value, record.value_size) if values else None
            else:
                key = _bytes(record.key, record.key_size)
                value = _bytes(record.value, record.value_size) if values else None
            found.append(Record(offset, timestamp, key, value, headers))
        return found, min(batch.last_offset + 1, to_offset), total
    finally:
        payload.close()
        PyBuffer_Release(&view)


def value_sizes(
    buf, Py_ssize_t position, *, int64_t from_offset=0, int64_t to_offset=MAX_OFFSET,
    Py_ssize_t limit=0x7FFFFFFFFFFFFFFF, Py_ssize_t decompressed_bytes_max=DECOMPRESSED_BYTES_MAX,
    bint in_thread=False,
):
    """([(offset, size of the value)], next offset) of the complete batch at position; for at most `limit` records."""
    cdef Py_buffer view
    cdef Payload payload = Payload()
    cdef Batch batch
    cdef Fault fault
    cdef RecordView record
    cdef const uint8_t* p
    cdef int64_t offset
    cdef int32_t i
    cdef list found = []
    PyObject_GetBuffer(buf, &view, PyBUF_SIMPLE)
    try:
        if not 0 <= position <= view.len:
            raise InvalidInput(f"byte {position} is not inside a buffer of {view.len}")
        fault = read_batch(<uint8_t*>view.buf + position, <uint8_t*>view.buf + view.len, False, &batch)
        if fault != FAULT_NONE:
            raise CorruptBatch(fault_reason(fault), position)
        if batch.attributes & CONTROL_BIT or batch.last_offset < from_offset or batch.base_offset >= to_offset:
            return found, min(batch.last_offset + 1, to_offset)
        payload.open(buf, <uint8_t*>view.buf, position, &batch, decompressed_bytes_max)
        p = payload.start
        for i in range(batch.count):
            if in_thread and i % APART_RECORDS == APART_RECORDS - 1:
                with nogil:
                    pass
            p = read_record(p, payload.end, &record)
            if p == NULL:
                raise CorruptBatch("a record does not fit its length", position)
            if record.offset_delta < 0 or record.offset_delta > batch.last_offset - batch.base_offset:
                raise CorruptBatch("a record lies outside the offsets of its batch", position)
            offset = batch.base_offset + record.offset_delta
            if offset < from_offset:
                continue
            if offset >= to_offset:
                break
            if len(found) >= limit:
                return found, offset
            found.append((offset, max(record.value_size, 0)))
        return found, min(batch.last_offset + 1, to_offset)
    finally:
        payload.close()
        PyBuffer_Release(&view)


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
