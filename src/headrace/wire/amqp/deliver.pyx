"""basic.deliver frames straight from record batches: no object per message.

A record written by the AMQP listener has exactly two headers, properties and exchange, in that order.
Whatever looks different (written by another listener, compressed, carrying an expiration that somebody
has to judge) stops the loop, and the caller handles that one record in Python.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy

from headrace.record.batch cimport (
    CODEC_MASK, CONTROL_BIT, FAULT_NONE, HEADER_SIZE, Batch, HeaderView, RecordView,
    read_batch, read_header, read_record,
)
from headrace.record.amqp.validate cimport EXCHANGE_NAME, EXCHANGE_NAME_SIZE, PROPERTIES_NAME, PROPERTIES_NAME_SIZE
from headrace.record.raw cimport get16, put16, put32, put64
from headrace.record.amqp.trace_headers cimport TRACES_MAX, Trace, find_traces
from headrace.wire.amqp.tags cimport TagRing

cdef enum:
    FRAME_METHOD = 1
    FRAME_HEADER = 2
    FRAME_BODY = 3
    FRAME_END = 0xCE
    CLASS_BASIC = 60
    METHOD_DELIVER = 60
    FLAG_EXPIRATION = 0x0100
    SCRATCH_KEPT = 1 << 20


WHOLE = 0       # all that was asked for, or all that the data holds
FOREIGN = 1     # the record at next_offset needs Python

# One scratch buffer for the process: the loop is one thread, and nothing is kept in it between calls.
cdef uint8_t* scratch = NULL
cdef Py_ssize_t scratch_size = 0


cdef uint8_t* reserve(Py_ssize_t used, Py_ssize_t more) except NULL:
    global scratch, scratch_size
    cdef Py_ssize_t wanted = scratch_size
    cdef void* grown
    if used + more <= scratch_size:
        return scratch
    wanted = max(used + more, scratch_size * 2, 65536)
    grown = realloc(scratch, wanted)
    if grown == NULL:
        raise MemoryError
    scratch = <uint8_t*>grown
    scratch_size = wanted
    return scratch


cdef inline uint8_t* put_frame_head(uint8_t* p, uint8_t kind, int channel, uint32_t size) noexcept:
    p[0] = kind
    put16(p + 1, channel)
    put32(p + 3, size)
    return p + 7


cdef bint holds_copies(const uint8_t* p, const RecordView* record, const HeaderView* properties) noexcept:
    """Whether the headers from p on are what the properties say about the message's trace, and nothing else. One that
    says something else came in by another listener, and counts."""
    cdef Trace traces[TRACES_MAX]
    cdef HeaderView header
    cdef int i, found = find_traces(properties.value, properties.value + properties.value_size, traces)
    if record.header_count != 2 + found:
        return False
    for i in range(found):
        p = read_header(p, record.end, &header)
        if (
            p == NULL
            or header.key_size != traces[i].name_size
            or header.value_size != traces[i].value_size
            or memcmp(header.key, traces[i].name, header.key_size) != 0
            or memcmp(header.value, traces[i].value, header.value_size) != 0
        ):
            return False
    return True


cdef inline bint is_ours(const RecordView* record, HeaderView* properties, HeaderView* exchange) noexcept:
    cdef const uint8_t* p
    if record.header_count < 2 or record.key_size < 0 or record.key_size > 255 or record.value_size < 0:
        return False
    p = read_header(record.headers, record.end, properties)
    if p == NULL or properties.key_size != PROPERTIES_NAME_SIZE or properties.value_size < 2:
        return False
    p = read_header(p, record.end, exchange)
    if p == NULL or exchange.key_size != EXCHANGE_NAME_SIZE or exchange.value_size < 0 or exchange.value_size > 255:
        return False
    return (
        memcmp(properties.key, PROPERTIES_NAME, PROPERTIES_NAME_SIZE) == 0
        and memcmp(exchange.key, EXCHANGE_NAME, EXCHANGE_NAME_SIZE) == 0
        and (record.header_count == 2 or holds_copies(p, record, properties))
    )


def encode_deliveries(
    const uint8_t[::1] data not None,
    int64_t from_offset,
    int64_t to_offset,
    TagRing ring not None,
    int32_t source,
    bint no_ack,
    int channel,
    bytes consumer_tag not None,
    Py_ssize_t count_max,
    Py_ssize_t bytes_max,
    uint32_t frame_max,
    int64_t redelivered_below,
    int64_t expired_until,
):
    """(frames, next offset, delivered, why it ended, gaps, body bytes): deliver [from_offset, to_offset).

    data is whole batches. Tags are taken from the ring. Gaps are ranges below next offset that hold
    no record (control batches, what compaction left out); one that goes on ends at to_offset, so that the next call
    is for something else. Records with a timestamp up to expired_until count as foreign: somebody must dead-letter them.
    """
    cdef const uint8_t* p
    cdef const uint8_t* end
    cdef const uint8_t* stop
    cdef const uint8_t* after
    cdef const uint8_t* body
    cdef uint8_t* out
    cdef Batch batch
    cdef RecordView record
    cdef HeaderView properties, exchange
    cdef Py_ssize_t used = 0, delivered = 0, body_bytes = 0, tag_size = len(consumer_tag), need, left, piece
    cdef Py_ssize_t piece_max = <Py_ssize_t>frame_max - 8
    cdef const char* tag_text = consumer_tag
    cdef int64_t next_offset = from_offset, offset
    cdef uint64_t tag
    cdef int i, why = 0
    cdef list gaps = None
    if data.shape[0] == 0:
        return b"", next_offset, 0, WHOLE, (), 0
    p = &data[0]
    end = p + data.shape[0]
    while p < end and next_offset < to_offset and delivered < count_max and used < bytes_max:
        if read_batch(p, end, False, &batch) != FAULT_NONE:
            break
        stop = p + batch.size
        if batch.last_offset < next_offset:
            p = stop
            continue
        if batch.base_offset >= to_offset:
            gaps = gaps or []
            gaps.append((next_offset, to_offset))
            next_offset = to_offset
            break
        if batch.attributes & CONTROL_BIT:
            gaps = gaps or []
            gaps.append((next_offset, batch.last_offset + 1))
            next_offset = batch.last_offset + 1
            p = stop
            continue
        if batch.attributes & CODEC_MASK:
            why = 1
            break
        p += HEADER_SIZE
        for i in range(batch.count):
            after = read_record(p, stop, &record)
            if after == NULL:
                why = 1
                break
            offset = batch.base_offset + record.offset_delta
            if offset < next_offset:
                p = after
                continue
            if offset >= to_offset:
                if next_offset < to_offset:
                    gaps = gaps or []
                    gaps.append((next_offset, to_offset))
                    next_offset = to_offset
                break
            if delivered >= count_max or used >= bytes_max:
                break
            if (
                not is_ours(&record, &properties, &exchange)
                or get16(properties.value) & FLAG_EXPIRATION
                or batch.base_timestamp + record.timestamp_delta <= expired_until
            ):
                if offset > next_offset:
                    gaps = gaps or []
                    gaps.append((next_offset, offset))
                    next_offset = offset
                why = 1
                break
            if offset > next_offset:
                gaps = gaps or []
                gaps.append((next_offset, offset))
            need = (
                64 + tag_size + exchange.value_size + record.key_size + properties.value_size + record.value_size
                + (record.value_size // piece_max + 1) * 8
            )
            reserve(used, need)
            out = scratch + used
            tag = ring.push(-1 if no_ack else source, offset)
            out = put_frame_head(
                out, FRAME_METHOD, channel, <uint32_t>(16 + tag_size + exchange.value_size + record.key_size)
            )
            put16(out, CLASS_BASIC)
            put16(out + 2, METHOD_DELIVER)
            out[4] = <uint8_t>tag_size
            out += 5
            memcpy(out, tag_text, tag_size)
            out += tag_size
            put64(out, tag)
            out[8] = 1 if offset < redelivered_below else 0
            out[9] = <uint8_t>exchange.value_size
            out += 10
            memcpy(out, exchange.value, exchange.value_size)
            out += exchange.value_size
            out[0] = <uint8_t>record.key_size
            out += 1
            memcpy(out, record.key, record.key_size)
            out += record.key_size
            out[0] = FRAME_END
            out = put_frame_head(out + 1, FRAME_HEADER, channel, <uint32_t>(12 + properties.value_size))
            put16(out, CLASS_BASIC)
            put16(out + 2, 0)
            put64(out + 4, record.value_size)
            out += 12
            memcpy(out, properties.value, properties.value_size)
            out += properties.value_size
            out[0] = FRAME_END
            out += 1
            body = record.value
            left = record.value_size
            while left > 0:
                piece = min(left, piece_max)
                out = put_frame_head(out, FRAME_BODY, channel, <uint32_t>piece)
                memcpy(out, body, piece)
                out[piece] = FRAME_END
                out += piece + 1
                body += piece
                left -= piece
            used = out - scratch
            body_bytes += record.value_size
            delivered += 1
            next_offset = offset + 1
            p = after
        else:
            # The batch is done: offsets after its last record, if any, were compacted away.
            offset = min(batch.last_offset + 1, to_offset)
            if next_offset < offset:
                gaps = gaps or []
                gaps.append((next_offset, offset))
                next_offset = offset
            p = stop
            continue
        break
    result = PyBytes_FromStringAndSize(<char*>scratch, used) if used else b""
    if scratch_size > SCRATCH_KEPT and used < SCRATCH_KEPT // 4:
        release_scratch()
    return result, next_offset, delivered, why, gaps or (), body_bytes


cdef void release_scratch() noexcept:
    global scratch, scratch_size
    free(scratch)
    scratch = NULL
    scratch_size = 0
