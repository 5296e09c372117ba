# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Finds the batches in a buffer and checks them: client input, the contents of a file, the result of a read.

Also assigns offsets to batches in place. Used by the log, the broker and the Kafka produce path.
"""

cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport INT64_MAX, INT64_MIN, int32_t, int64_t, uint8_t, uint32_t
from libc.string cimport memcmp

from headrace.record.batch_layout cimport (
    ATTRIBUTES_AT, BASE_OFFSET_AT, CODEC_MASK, CRC_AT, DELETE_HORIZON_BIT, FAULT_COUNT, FAULT_CRC, FAULT_DELTA, FAULT_INCOMPLETE,
    FAULT_NONE, FAULT_NO_KEY, FAULT_ORDER, FAULT_PROPERTIES, FAULT_RECORD, FAULT_TIMESTAMP, FAULT_TOO_MANY, FAULT_TRAILING,
    HEADER_SIZE, LEADER_EPOCH_AT, LENGTH_AT, LOG_APPEND_TIME_BIT, MAX_TIMESTAMP_AT, PREFIX_SIZE, Batch, Fault, HeaderView,
    RecordView, check_headers, fault_reason, read_batch, read_header, read_record,
)
from headrace.record.batch.crc32c cimport crc32c_of
from headrace.record.amqp.validate cimport BAD, PROPERTIES_NAME, PROPERTIES_NAME_SIZE, check_properties
from headrace.record.raw cimport add_overflows, get32, put16, put32, put64
from headrace.record.compression.lz4_frame cimport is_readable_lz4
from headrace.record.compression.payload cimport Payload

from headrace.errors import (
    BatchTooLarge, ChecksumMismatch, CorruptBatch, DecompressedTooLarge, InvalidInput, KeyRequired, Overloaded,
    TimestampOutOfRange,
)
from headrace.record.layout import DECOMPRESSED_BYTES_MAX, HEADERS_MAX, RECORDS_MAX
from headrace.record.types import BatchInfo


cdef enum:
    LZ4 = 3                 # the codec in a batch's attributes
    NO_TIMESTAMP = -1       # as in Kafka


cdef Py_ssize_t _range(Py_buffer* view, Py_ssize_t start, end) except -1:
    """The end of the requested range. Raises InvalidInput unless start and end lie inside the buffer."""
    cdef Py_ssize_t stop = view.len if end is None else end
    if not 0 <= start <= stop <= view.len:
        raise InvalidInput(f"bytes {start} to {stop} are not inside a buffer of {view.len}")
    return stop


cdef object fault_error(Fault fault, Py_ssize_t at):
    """The typed error of a fault: listeners choose their codes by its class."""
    if fault == FAULT_CRC:
        return ChecksumMismatch(fault_reason(fault), at)
    if fault == FAULT_NO_KEY:
        return KeyRequired(fault_reason(fault), at)
    return CorruptBatch(fault_reason(fault), at)


cdef object _info(Py_ssize_t position, const Batch* batch):
    return BatchInfo(
        position, batch.size, batch.base_offset, batch.last_offset, batch.count, batch.base_timestamp,
        batch.max_timestamp, batch.attributes, batch.producer_id, batch.producer_epoch, batch.base_sequence,
        batch.leader_epoch)


def scan(buf, Py_ssize_t start=0, end=None, *, bint verify_crc=True):
    """The complete batches from start, in order. Stops before a batch that the buffer truncates; an invalid batch
    raises CorruptBatch with its position. Records are not checked."""
    cdef Py_buffer view
    cdef const uint8_t* base
    cdef Py_ssize_t at = start, stop
    cdef Batch batch
    cdef Fault fault
    cdef list found = []
    PyObject_GetBuffer(buf, &view, PyBUF_SIMPLE)
    try:
        stop = _range(&view, start, end)
        base = <const uint8_t*>view.buf
        while at < stop:
            fault = read_batch(base + at, base + stop, verify_crc, &batch)
            if fault == FAULT_INCOMPLETE:
                break
            if fault != FAULT_NONE:
                raise fault_error(fault, at)
            found.append(_info(at, &batch))
            at += batch.size
        return found
    finally:
        PyBuffer_Release(&view)


def valid_until(buf, Py_ssize_t start=0, end=None, int64_t expected_offset=-1, *, bint dense=False):
    """(position, next offset, records, max timestamp, reason) of the valid batches from start, for recovery.

    Never raises because of the buffer's contents. The reason is None if valid batches fill the buffer to its end,
    layout.INCOMPLETE if the buffer ends inside a batch, and otherwise the fault of the batch at position.
    A base offset must not be below the expected offset (-1: any start); with dense it must equal it.
    Without a valid batch the next offset is expected_offset and the max timestamp is -1.
    """
    cdef Py_buffer view
    cdef const uint8_t* base
    cdef Py_ssize_t at = start, stop
    cdef int64_t expected = expected_offset, max_timestamp = -1, count = 0
    cdef Batch batch
    cdef Fault fault = FAULT_NONE
    PyObject_GetBuffer(buf, &view, PyBUF_SIMPLE)
    try:
        stop = _range(&view, start, end)
        base = <const uint8_t*>view.buf
        with nogil:
            while at < stop:
                fault = read_batch(base + at, base + stop, True, &batch)
                if fault == FAULT_NONE and expected >= 0 and (
                    batch.base_offset < expected or (dense and batch.base_offset != expected)
                ):
                    fault = FAULT_ORDER
                if fault != FAULT_NONE:
                    break
                expected = batch.last_offset + 1
                count += batch.count
                max_timestamp = max(max_timestamp, batch.max_timestamp)
                at += batch.size
    finally:
        PyBuffer_Release(&view)
    return at, expected, count, max_timestamp, None if fault == FAULT_NONE else fault_reason(fault)


def epochs_until(buf, Py_ssize_t end, int64_t lowest, int64_t highest):
    """(position, next offset, epoch) after the leading batches of buf[:end] whose leader epochs are plausible: not
    below the epoch of the previous batch (`lowest` for the first one) and not above `highest`.

    The next offset is -1 if there is no such batch. The caller has checked the batches with valid_until, but a batch's
    checksum does not cover its leader epoch. Within a log, epochs never decrease."""
    cdef Py_buffer view
    cdef const uint8_t* base
    cdef Py_ssize_t at = 0, stop
    cdef int64_t next_offset = -1
    cdef Batch batch
    PyObject_GetBuffer(buf, &view, PyBUF_SIMPLE)
    try:
        stop = _range(&view, 0, end)
        base = <const uint8_t*>view.buf
        with nogil:
            while at < stop:
                if read_batch(base + at, base + stop, False, &batch) != FAULT_NONE:
                    break
                if batch.leader_epoch < lowest or batch.leader_epoch > highest:
                    break
                lowest = batch.leader_epoch
                next_offset = batch.last_offset + 1
                at += batch.size
    finally:
        PyBuffer_Release(&view)
    return at, next_offset, lowest


def first_compressed(buf):
    """The position of the first compressed batch, or -1. Batches were checked before; a truncated one ends the walk."""
    cdef Py_buffer view
    cdef const uint8_t* base
    cdef Py_ssize_t at = 0, found = -1
    cdef Batch batch
    PyObject_GetBuffer(buf, &view, PyBUF_SIMPLE)
    try:
        base = <const uint8_t*>view.buf
        while at < view.len and read_batch(base + at, base + view.len, False, &batch) == FAULT_NONE:
            if batch.attributes & CODEC_MASK:
                found = at
                break
            at += batch.size
        return found
    finally:
        PyBuffer_Release(&view)


cdef bint properties_are_sound(const RecordView* record) noexcept nogil:
    """Whether the record's AMQP properties, if it has any, are well-formed. AMQP consumers receive them verbatim,
    whichever client wrote them. The caller has checked the headers with check_headers."""
    cdef const uint8_t* p = record.headers
    cdef HeaderView header
    cdef int64_t left
    for left in range(record.header_count):
        p = read_header(p, record.end, &header)
        if header.key_size == PROPERTIES_NAME_SIZE and memcmp(header.key, PROPERTIES_NAME, PROPERTIES_NAME_SIZE) == 0:
            if header.value_size >= 0 and check_properties(header.value, header.value + header.value_size) == BAD:
                return False
    return True


cdef Fault _walk(
    const uint8_t* p, const uint8_t* end, const Batch* batch, int64_t headers_max, bint keyed, int64_t* min_timestamp,
    int64_t* max_timestamp,
) noexcept nogil:
    """Check every record between p and end: as many records as the batch header says, offset deltas 0 to n-1, no
    trailing bytes and, with keyed, no record without a key. The minimum leaves out records without a timestamp."""
    cdef RecordView record
    cdef int64_t timestamp = 0, headers = 0
    cdef int32_t i
    min_timestamp[0], max_timestamp[0] = INT64_MAX, INT64_MIN
    for i in range(batch.count):
        p = read_record(p, end, &record)
        if p == NULL:
            return FAULT_RECORD
        if record.header_count:
            headers += record.header_count
            if headers > headers_max:
                return FAULT_TOO_MANY
            if not check_headers(&record):
                return FAULT_RECORD
            if not properties_are_sound(&record):
                return FAULT_PROPERTIES
        if record.offset_delta != i:
            return FAULT_DELTA
        if keyed and record.key_size < 0:
            return FAULT_NO_KEY
        if add_overflows(batch.base_timestamp, record.timestamp_delta, &timestamp):
            return FAULT_TIMESTAMP
        if timestamp > max_timestamp[0]:
            max_timestamp[0] = timestamp
        if timestamp < min_timestamp[0] and timestamp != NO_TIMESTAMP:
            min_timestamp[0] = timestamp
    return FAULT_NONE if p == end else FAULT_TRAILING


cdef int open_within(
    Payload payload, object buf, const uint8_t* base, Py_ssize_t at, const Batch* batch, Py_ssize_t limit,
    Py_ssize_t* left_bytes,
) except -1:
    cdef Py_ssize_t spent
    if left_bytes == NULL:
        return payload.open(buf, base, at, batch, limit)
    spent = min(limit, left_bytes[0])       # also charged if the batch is too large: finding that out costs as much
    try:
        payload.open(buf, base, at, batch, spent)
        spent = payload.end - payload.start
    except DecompressedTooLarge:
        if spent < limit:
            raise Overloaded("the batches of one request decompress to more than is accepted at once") from None
        raise
    finally:
        left_bytes[0] -= spent
    return 0


def validate(
    buf, *, Py_ssize_t batch_bytes_max=0x7FFFFFFF, Py_ssize_t decompressed_bytes_max=DECOMPRESSED_BYTES_MAX,
    int64_t records_max=RECORDS_MAX, int64_t headers_max=HEADERS_MAX, bint deep=True, bint repair=False,
    bint keyed=False, int64_t lowest_timestamp=INT64_MIN, int64_t highest_timestamp=INT64_MAX,
):
    """The batches that a client sent, fully checked: buf must hold no trailing bytes and no truncated or empty batch.

    deep=False does not decompress compressed batches. With repair, a max timestamp that is not the largest of the
    records is corrected in buf, including the checksum, as Kafka does; without repair it raises CorruptBatch.
    Repair also clears the delete-horizon bit, which another broker's compaction set: the horizon becomes an ordinary
    base timestamp, because our compaction has not processed the batch. With keyed, a record without a key raises
    CorruptBatch. The limits on decompressed bytes, records and headers apply to each batch separately. A record with a
    timestamp other than -1 (none) that is outside of the lowest and the highest raises TimestampOutOfRange.
    Raises CorruptBatch, BatchTooLarge, DecompressedTooLarge.
    """
    return validated(
        buf, batch_bytes_max, decompressed_bytes_max, records_max, headers_max, deep, repair, keyed, NULL, False,
        lowest_timestamp, highest_timestamp,
    )


cdef list validated(
    object buf, Py_ssize_t batch_bytes_max, Py_ssize_t decompressed_bytes_max, int64_t records_max,
    int64_t headers_max, bint deep, bint repair, bint keyed, Py_ssize_t* left_bytes, bint in_thread,
    int64_t lowest_timestamp, int64_t highest_timestamp,
):
    """Implements validate. left_bytes, unless NULL, limits the decompressed size of all batches together and is
    counted down. A batch that exceeds the remaining bytes but not its own limit raises Overloaded.

    in_thread releases the GIL during the checks. On the event-loop thread that would only let other threads take
    the GIL away."""
    cdef Py_buffer view
    cdef Payload payload = Payload()
    cdef uint8_t* base
    cdef uint8_t* p
    cdef const uint8_t* records
    cdef const uint8_t* end = NULL
    cdef Py_ssize_t at = 0
    cdef int64_t min_timestamp = 0, max_timestamp = 0
    cdef bint is_limited = lowest_timestamp != INT64_MIN or highest_timestamp != INT64_MAX
    cdef Batch batch
    cdef Fault fault
    cdef list found = []
    PyObject_GetBuffer(buf, &view, PyBUF_WRITABLE if repair else PyBUF_SIMPLE)
    try:
        base = <uint8_t*>view.buf
        while at < view.len:
            p = base + at
            # Checked before the checksum, so that a batch over the size limit is rejected without reading it.
            if view.len - at >= PREFIX_SIZE and <int64_t><int32_t>get32(p + LENGTH_AT) + PREFIX_SIZE > batch_bytes_max:
                raise BatchTooLarge(<int64_t><int32_t>get32(p + LENGTH_AT) + PREFIX_SIZE, batch_bytes_max)
            if in_thread:
                with nogil:
                    fault = read_batch(p, base + view.len, True, &batch)
            else:
                fault = read_batch(p, base + view.len, True, &batch)
            if fault == FAULT_NONE and (
                batch.count == 0 or batch.last_offset - batch.base_offset != <int64_t>batch.count - 1
            ):
                fault = FAULT_COUNT
            if fault == FAULT_NONE and batch.count > records_max:
                fault = FAULT_TOO_MANY
            if fault != FAULT_NONE:
                raise fault_error(fault, at)
            if not batch.attributes & CODEC_MASK:
                records, end = p + HEADER_SIZE, p + batch.size
            elif deep:
                open_within(payload, buf, base, at, &batch, decompressed_bytes_max, left_bytes)
                # After the decompression, whose errors say more. Only for new batches: stored ones stay readable.
                if batch.attributes & CODEC_MASK == LZ4 and not is_readable_lz4(p + HEADER_SIZE, p + batch.size):
                    raise CorruptBatch("lz4 data must be one frame of independent blocks", at)
                records, end = payload.start, payload.end
            else:
                records, max_timestamp = NULL, batch.max_timestamp
            if records != NULL and in_thread:
                with nogil:
                    fault = _walk(records, end, &batch, headers_max, keyed, &min_timestamp, &max_timestamp)
            elif records != NULL:
                fault = _walk(records, end, &batch, headers_max, keyed, &min_timestamp, &max_timestamp)
            payload.close()
            # FAULT_TIMESTAMP: the sum of the base timestamp and a delta overflows.
            if is_limited and records != NULL and (fault == FAULT_TIMESTAMP or fault == FAULT_NONE and (
                min_timestamp < lowest_timestamp or max_timestamp > highest_timestamp
            )):
                raise TimestampOutOfRange(at, lowest_timestamp, highest_timestamp)
            if fault == FAULT_NONE and max_timestamp != batch.max_timestamp and not (
                batch.attributes & LOG_APPEND_TIME_BIT
            ):
                if repair:
                    batch.max_timestamp = max_timestamp
                    put64(p + MAX_TIMESTAMP_AT, max_timestamp)
                    put32(p + CRC_AT, crc32c_of(p + ATTRIBUTES_AT, batch.size - ATTRIBUTES_AT, 0))
                else:
                    fault = FAULT_TIMESTAMP
            if fault != FAULT_NONE:
                raise fault_error(fault, at)
            if repair and batch.attributes & DELETE_HORIZON_BIT:
                batch.attributes &= ~DELETE_HORIZON_BIT
                put16(p + ATTRIBUTES_AT, batch.attributes)
                put32(p + CRC_AT, crc32c_of(p + ATTRIBUTES_AT, batch.size - ATTRIBUTES_AT, 0))
            found.append(_info(at, &batch))
            at += batch.size
        return found
    finally:
        PyBuffer_Release(&view)


def patch(buf, Py_ssize_t position, int64_t base_offset, int32_t leader_epoch):
    """Set the base offset and leader epoch of the batch at position, in place. The checksum covers neither."""
    cdef Py_buffer view
    PyObject_GetBuffer(buf, &view, PyBUF_WRITABLE)
    try:
        if position < 0 or view.len - position < HEADER_SIZE:
            raise InvalidInput(f"no batch header fits at byte {position} of {view.len}")
        put64(<uint8_t*>view.buf + position + BASE_OFFSET_AT, base_offset)
        put32(<uint8_t*>view.buf + position + LEADER_EPOCH_AT, <uint32_t>leader_epoch)
    finally:
        PyBuffer_Release(&view)


def patch_run(buf, Py_ssize_t start, Py_ssize_t end, int64_t base_offset, int32_t leader_epoch):
    """Assign consecutive offsets from base_offset to the batches between start and end; returns the offset after the
    last one.

    The batches have been validated before, so their checksums are not verified again; their headers are, to keep the
    walk inside the buffer.
    """
    return number_run(buf, start, end, base_offset, leader_epoch)


cdef int64_t number_run(
    object buf, Py_ssize_t start, Py_ssize_t end, int64_t base_offset, int32_t leader_epoch
) except -1:
    cdef Py_buffer view
    cdef uint8_t* p
    cdef Py_ssize_t at = start
    cdef int64_t next_offset = base_offset
    cdef Batch batch
    PyObject_GetBuffer(buf, &view, PyBUF_WRITABLE)
    try:
        _range(&view, start, end)
        while at < end:
            p = <uint8_t*>view.buf + at
            fault = read_batch(p, <uint8_t*>view.buf + end, False, &batch)
            if fault != FAULT_NONE:
                raise fault_error(fault, at)
            put64(p + BASE_OFFSET_AT, next_offset)
            put32(p + LEADER_EPOCH_AT, <uint32_t>leader_epoch)
            next_offset += batch.last_offset - batch.base_offset + 1
            at += batch.size
        return next_offset
    finally:
        PyBuffer_Release(&view)


def trim(
    buf, Py_ssize_t start, end, int64_t from_offset, int64_t to_offset, Py_ssize_t bytes_max=PY_SSIZE_T_MAX,
    int64_t expected=-1, bint dense=False, bint verify_crc=True,
):
    """(first position, end position, next offset) of the run of complete batches that hold [from_offset, to_offset).

    start is a batch boundary. The first batch may begin before from_offset and the last may end after to_offset.
    The checksum of every returned batch is verified, unless the caller knows it to be right (verify_crc=False). Only
    the first batch may exceed bytes_max. An invalid batch ends the run; if it would be the first, it raises
    CorruptBatch. If the run is empty, both positions are equal and the third number is from_offset, except when the
    buffer truncates the first wanted batch: then it is minus the number of bytes needed from first position (the size
    of a header if not even the header is complete).

    A batch's base offset is not covered by its checksum, so it is checked against its neighbours: each batch must
    begin where the previous one ended (dense) or later. expected is the lowest base offset of the batch at start (with
    dense: the exact one). A batch that violates this is invalid.
    """
    cdef Py_buffer view
    cdef const uint8_t* base
    cdef Py_ssize_t at = start, first = -1, stop
    cdef int64_t next_offset = from_offset
    cdef Batch batch
    cdef Fault fault = FAULT_NONE
    PyObject_GetBuffer(buf, &view, PyBUF_SIMPLE)
    try:
        stop = _range(&view, start, end)
        base = <const uint8_t*>view.buf
        with nogil:
            while at < stop:
                fault = read_batch(base + at, base + stop, False, &batch)
                if fault != FAULT_NONE:
                    break
                if expected >= 0 and (batch.base_offset < expected or (dense and batch.base_offset != expected)):
                    fault = FAULT_ORDER
                    break
                expected = batch.last_offset + 1
                if batch.base_offset >= to_offset or (first >= 0 and at - first + batch.size > bytes_max):
                    break
                if batch.last_offset >= from_offset:
                    # Only returned batches have their checksum verified, so that skipping to from_offset is cheap.
                    if verify_crc:
                        fault = read_batch(base + at, base + stop, True, &batch)
                    if fault != FAULT_NONE:
                        break
                    if first < 0:
                        first = at
                    next_offset = batch.last_offset + 1
                at += batch.size
        if fault == FAULT_INCOMPLETE:
            if first >= 0:
                return first, at, next_offset
            if stop - at < HEADER_SIZE:
                return at, at, -<int64_t>HEADER_SIZE
            return at, at, -<int64_t>(get32(base + at + LENGTH_AT) + PREFIX_SIZE)
        if fault != FAULT_NONE and first < 0:
            raise fault_error(fault, at)
        # The batches before a damaged one are valid. The read that continues from there raises CorruptBatch.
        return (first if first >= 0 else at), at, next_offset
    finally:
        PyBuffer_Release(&view)
