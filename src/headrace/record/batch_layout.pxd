"""The header of a batch and the fields of a record, read from bytes that are not checked yet.

Inlined into each kernel. Every function takes an end pointer and answers with a fault, never an exception,
so that it runs without the GIL; the one place that knows the position turns the fault into a message.
"""

from libc.stdint cimport INT64_MAX, int16_t, int32_t, int64_t, uint8_t, uint32_t

from headrace.record.batch.crc32c cimport crc32c_of
from headrace.record.raw cimport add_overflows, get16, get32, get64, get_varint

cdef enum Fault:
    FAULT_NONE = 0
    FAULT_INCOMPLETE        # the buffer ends inside the batch: more bytes may heal it
    FAULT_LENGTH
    FAULT_MAGIC
    FAULT_CRC
    FAULT_OFFSETS
    FAULT_COUNT
    FAULT_ORDER
    FAULT_RECORD
    FAULT_TRAILING
    FAULT_DELTA
    FAULT_TIMESTAMP
    FAULT_CODEC
    FAULT_TOO_MANY
    FAULT_NO_KEY
    FAULT_PROPERTIES

cdef enum:                  # layout.py's chain, as C constants
    BASE_OFFSET_AT = 0
    LENGTH_AT = BASE_OFFSET_AT + 8
    LEADER_EPOCH_AT = LENGTH_AT + 4
    MAGIC_AT = LEADER_EPOCH_AT + 4
    CRC_AT = MAGIC_AT + 1
    ATTRIBUTES_AT = CRC_AT + 4
    LAST_OFFSET_DELTA_AT = ATTRIBUTES_AT + 2
    BASE_TIMESTAMP_AT = LAST_OFFSET_DELTA_AT + 4
    MAX_TIMESTAMP_AT = BASE_TIMESTAMP_AT + 8
    PRODUCER_ID_AT = MAX_TIMESTAMP_AT + 8
    PRODUCER_EPOCH_AT = PRODUCER_ID_AT + 8
    BASE_SEQUENCE_AT = PRODUCER_EPOCH_AT + 2
    COUNT_AT = BASE_SEQUENCE_AT + 4
    RECORDS_AT = COUNT_AT + 4

    HEADER_SIZE = RECORDS_AT
    PREFIX_SIZE = LEADER_EPOCH_AT
    CODEC_MASK = 0x07
    CODEC_LAST = 4
    LOG_APPEND_TIME_BIT = 0x08
    TRANSACTIONAL_BIT = 0x10
    CONTROL_BIT = 0x20
    DELETE_HORIZON_BIT = 0x40
    RECORD_SIZE_MIN = 7     # length, attributes, two deltas, key and value length, header count: a byte each
    NULL_SIZE = -1

cdef struct Batch:
    Py_ssize_t size         # of the whole batch
    int64_t base_offset
    int64_t last_offset
    int64_t base_timestamp
    int64_t max_timestamp
    int64_t producer_id
    int32_t leader_epoch
    int32_t base_sequence
    int32_t count
    int16_t producer_epoch
    int16_t attributes

cdef struct RecordView:
    const uint8_t* key
    const uint8_t* value
    const uint8_t* headers  # the first header, after their count
    const uint8_t* end      # of the record, and so of its headers
    int64_t key_size        # -1 is null, as on the wire
    int64_t value_size
    int64_t header_count
    int64_t timestamp_delta
    int64_t offset_delta

cdef struct HeaderView:
    const uint8_t* key
    const uint8_t* value
    int64_t key_size
    int64_t value_size


cdef inline Fault read_batch(const uint8_t* p, const uint8_t* end, bint verify_crc, Batch* out) noexcept nogil:
    """Fill out from the batch at p. Only after FAULT_NONE do all of its out.size bytes lie before end."""
    cdef int32_t length
    if end - p < PREFIX_SIZE:
        return FAULT_INCOMPLETE
    length = <int32_t>get32(p + LENGTH_AT)
    if length < HEADER_SIZE - PREFIX_SIZE:
        return FAULT_LENGTH
    # The magic is judged before the rest has arrived: what is not a batch will never become one.
    if end - p > MAGIC_AT and p[MAGIC_AT] != 2:
        return FAULT_MAGIC
    out.size = <Py_ssize_t>length + PREFIX_SIZE
    if end - p < out.size:
        return FAULT_INCOMPLETE
    if verify_crc and crc32c_of(p + ATTRIBUTES_AT, out.size - ATTRIBUTES_AT, 0) != get32(p + CRC_AT):
        return FAULT_CRC
    out.base_offset = <int64_t>get64(p)
    out.leader_epoch = <int32_t>get32(p + LEADER_EPOCH_AT)
    out.attributes = <int16_t>get16(p + ATTRIBUTES_AT)
    out.last_offset = <int32_t>get32(p + LAST_OFFSET_DELTA_AT)
    out.base_timestamp = <int64_t>get64(p + BASE_TIMESTAMP_AT)
    out.max_timestamp = <int64_t>get64(p + MAX_TIMESTAMP_AT)
    out.producer_id = <int64_t>get64(p + PRODUCER_ID_AT)
    out.producer_epoch = <int16_t>get16(p + PRODUCER_EPOCH_AT)
    out.base_sequence = <int32_t>get32(p + BASE_SEQUENCE_AT)
    out.count = <int32_t>get32(p + COUNT_AT)
    # A compacted batch holds fewer records than offsets, never more.
    if out.count < 0 or out.count > out.last_offset + 1:
        return FAULT_COUNT
    if out.last_offset < 0 or out.base_offset < 0 or add_overflows(out.base_offset, out.last_offset, &out.last_offset):
        return FAULT_OFFSETS
    if out.last_offset == INT64_MAX:       # the next offset must still be a number
        return FAULT_OFFSETS
    if (out.attributes & CODEC_MASK) > CODEC_LAST:
        return FAULT_CODEC
    if not out.attributes & CODEC_MASK and <int64_t>out.count * RECORD_SIZE_MIN > out.size - HEADER_SIZE:
        return FAULT_COUNT
    return FAULT_NONE


cdef inline const uint8_t* read_bytes(
    const uint8_t* p, const uint8_t* end, const uint8_t** data, int64_t* size
) noexcept nogil:
    """A length and that many bytes; -1 is null. NULL when they would pass end."""
    p = get_varint(p, end, size)
    if p == NULL or size[0] > end - p or size[0] < NULL_SIZE:
        return NULL
    data[0] = p
    return p if size[0] < 0 else p + size[0]


cdef inline const uint8_t* read_record(const uint8_t* p, const uint8_t* end, RecordView* out) noexcept nogil:
    """The position after the record at p, or NULL. The headers are not looked at: see check_headers."""
    cdef int64_t size = 0
    p = get_varint(p, end, &size)
    if p == NULL or size < 1 or size > end - p:
        return NULL
    end = p + size
    out.end = end
    p = get_varint(p + 1, end, &out.timestamp_delta)        # past the attributes, which mean nothing yet
    if p == NULL:
        return NULL
    p = get_varint(p, end, &out.offset_delta)
    if p == NULL:
        return NULL
    p = read_bytes(p, end, &out.key, &out.key_size)
    if p == NULL:
        return NULL
    p = read_bytes(p, end, &out.value, &out.value_size)
    if p == NULL:
        return NULL
    p = get_varint(p, end, &out.header_count)
    # A header takes two bytes at least, so the count is bounded by what is left.
    if p == NULL or out.header_count < 0 or out.header_count > (end - p) // 2:
        return NULL
    out.headers = p
    if out.header_count == 0 and p != end:
        return NULL
    return end


cdef inline const uint8_t* read_header(const uint8_t* p, const uint8_t* end, HeaderView* out) noexcept nogil:
    """The position after the header at p, or NULL. Unlike a value, a name is never null."""
    p = read_bytes(p, end, &out.key, &out.key_size)
    if p == NULL or out.key_size < 0:
        return NULL
    return read_bytes(p, end, &out.value, &out.value_size)


cdef inline bint check_headers(const RecordView* record) noexcept nogil:
    """Whether the headers are as many as the record says and end where it ends."""
    cdef const uint8_t* p = record.headers
    cdef HeaderView header
    cdef int64_t left = record.header_count
    while left > 0:
        p = read_header(p, record.end, &header)
        if p == NULL:
            return False
        left -= 1
    return p == record.end


cdef inline str fault_reason(Fault fault):
    if fault == FAULT_INCOMPLETE:
        return "the buffer ends inside this batch"
    if fault == FAULT_LENGTH:
        return "the length is less than a batch header"
    if fault == FAULT_MAGIC:
        return "the magic is not 2"
    if fault == FAULT_CRC:
        return "the CRC32C does not match"
    if fault == FAULT_OFFSETS:
        return "the offsets are negative or too large"
    if fault == FAULT_COUNT:
        return "the record count cannot be true"
    if fault == FAULT_ORDER:
        return "the base offset is not after the batch before"
    if fault == FAULT_RECORD:
        return "a record does not fit its length"
    if fault == FAULT_TRAILING:
        return "bytes follow the last record"
    if fault == FAULT_DELTA:
        return "the offset deltas do not count up from 0"
    if fault == FAULT_TIMESTAMP:
        return "the timestamps do not agree"
    if fault == FAULT_CODEC:
        return "the codec is unknown"
    if fault == FAULT_TOO_MANY:
        return "it holds more records or headers than a batch may"
    if fault == FAULT_NO_KEY:
        return "a compacted topic takes no record without a key"
    if fault == FAULT_PROPERTIES:
        return "a header amqp.properties does not hold properties of AMQP"
    return "nothing is wrong"
