"""Encodes basic.deliver frames directly from record batches, without an object per message.

A record written by the AMQP listener has exactly two headers, properties and exchange, in that order, and copies of
its trace headers. A record that differs (written by another listener, compressed, or with an expiration to check)
ends the encoding, and the caller delivers that one record in Python.
"""

cimport cython

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy

from headrace.record.batch_layout cimport (
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


# One scratch buffer for the process: all encoders run in the event loop's thread, and none keeps data in the buffer
# between calls.
cdef uint8_t* scratch = NULL
cdef Py_ssize_t scratch_size = 0


cdef uint8_t* reserve_scratch(Py_ssize_t used, Py_ssize_t more) except NULL:
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


cdef void release_scratch() noexcept:
    global scratch, scratch_size
    free(scratch)
    scratch = NULL
    scratch_size = 0


cdef inline uint8_t* put_frame_head(uint8_t* p, uint8_t kind, int channel, uint32_t size) noexcept:
    p[0] = kind
    put16(p + 1, channel)
    put32(p + 3, size)
    return p + 7


cdef bint holds_copies(const uint8_t* p, const RecordView* record, const HeaderView* properties) noexcept:
    """Whether the headers from p on are exactly the copies of the trace headers in the properties. A header that
    differs was set through another listener, and takes precedence."""
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


cdef inline uint8_t* put_body(
    uint8_t* p, int channel, const uint8_t* body, Py_ssize_t left, Py_ssize_t piece_max
) noexcept:
    """Body frames of at most piece_max bytes each. Returns the end."""
    cdef Py_ssize_t piece
    while left > 0:
        piece = min(left, piece_max)
        p = put_frame_head(p, FRAME_BODY, channel, <uint32_t>piece)
        memcpy(p, body, piece)
        p[piece] = FRAME_END
        p += piece + 1
        body += piece
        left -= piece
    return p


@cython.final
@cython.freelist(8)
cdef class Encoded:
    """The result of one call of DeliveryEncoder.encode."""

    cdef readonly bytes frames
    cdef readonly int64_t next_offset       # the first offset that is neither delivered nor in a gap
    cdef readonly Py_ssize_t count
    cdef readonly Py_ssize_t body_bytes
    cdef readonly Py_ssize_t redelivered    # of count
    cdef readonly bint needs_message        # the record at next_offset must be delivered as a message, by Python
    cdef readonly object gaps               # ranges below next_offset without a record: control batches, compaction
    cdef Py_ssize_t used                    # of the scratch buffer

    cdef int skip_to(self, int64_t offset) except -1:
        """Everything between next_offset and offset is a gap."""
        if offset > self.next_offset:
            if not self.gaps:
                self.gaps = []
            (<list>self.gaps).append((self.next_offset, offset))
            self.next_offset = offset
        return 0


@cython.final
cdef class DeliveryEncoder:
    """Encodes the deliveries of one consumer. Tags are taken from the channel's ring."""

    cdef TagRing ring
    cdef bytes consumer_tag
    cdef const char* tag_text       # of consumer_tag
    cdef Py_ssize_t tag_size
    cdef int channel
    cdef bint no_ack
    cdef uint32_t frame_max
    cdef Py_ssize_t bytes_max

    def __init__(
        self, TagRing ring not None, int channel, bytes consumer_tag not None, *, bint no_ack, uint32_t frame_max,
        Py_ssize_t bytes_max,
    ):
        self.ring = ring
        self.channel = channel
        self.consumer_tag = consumer_tag
        self.tag_text = consumer_tag
        self.tag_size = len(consumer_tag)
        self.no_ack = no_ack
        self.frame_max = frame_max
        self.bytes_max = bytes_max

    def encode(
        self, const uint8_t[::1] data not None, int64_t start, int64_t end, int32_t source, Py_ssize_t count_max,
        int64_t redelivered_below, int64_t expired_until,
    ):
        """Encodes the offsets [start, end) of data, which is whole batches, up to count_max messages.

        A gap that extends past `end` is cut there, so that the next call can ask for the offsets after it. A record
        with a timestamp up to expired_until sets needs_message: it has to be dead-lettered.
        """
        cdef const uint8_t* p
        cdef const uint8_t* data_end
        cdef Batch batch
        cdef Encoded out = Encoded.__new__(Encoded)
        out.frames = b""
        out.gaps = ()
        out.next_offset = start
        if data.shape[0] == 0:
            return out
        p = &data[0]
        data_end = p + data.shape[0]
        while p < data_end and out.next_offset < end and out.count < count_max and out.used < self.bytes_max:
            if read_batch(p, data_end, False, &batch) != FAULT_NONE:
                break
            if batch.last_offset < out.next_offset:
                pass
            elif batch.base_offset >= end:
                out.skip_to(end)
                break
            elif batch.attributes & CONTROL_BIT:
                out.skip_to(batch.last_offset + 1)
            elif batch.attributes & CODEC_MASK:
                out.needs_message = True
                break
            elif not self.encode_batch(
                p, &batch, end, source, count_max, redelivered_below, expired_until, out
            ):
                break
            p += batch.size
        if out.used:
            out.frames = PyBytes_FromStringAndSize(<char*>scratch, out.used)
        if scratch_size > SCRATCH_KEPT and out.used < SCRATCH_KEPT // 4:
            release_scratch()
        return out

    cdef bint encode_batch(
        self, const uint8_t* p, const Batch* batch, int64_t end, int32_t source, Py_ssize_t count_max,
        int64_t redelivered_below, int64_t expired_until, Encoded out,
    ) except -1:
        """True if the batch was encoded to its end."""
        cdef const uint8_t* stop = p + batch.size
        cdef RecordView record
        cdef HeaderView properties, exchange
        cdef int64_t offset
        cdef int i
        p += HEADER_SIZE
        for i in range(batch.count):
            p = read_record(p, stop, &record)
            if p == NULL:
                out.needs_message = True
                return False
            offset = batch.base_offset + record.offset_delta
            if offset < out.next_offset:
                continue
            if offset >= end:
                out.skip_to(end)
                return False
            if out.count >= count_max or out.used >= self.bytes_max:
                return False
            if offset > out.next_offset:
                out.skip_to(offset)
            if (
                not is_ours(&record, &properties, &exchange)
                or get16(properties.value) & FLAG_EXPIRATION
                or batch.base_timestamp + record.timestamp_delta <= expired_until
            ):
                out.needs_message = True
                return False
            self.put_message(source, offset, offset < redelivered_below, &record, &properties, &exchange, out)
            out.next_offset = offset + 1
        out.skip_to(min(batch.last_offset + 1, end))    # compaction may have removed the last records
        return True

    @cython.cdivision(True)
    cdef inline int put_message(
        self, int32_t source, int64_t offset, bint redelivered, const RecordView* record,
        const HeaderView* properties, const HeaderView* exchange, Encoded out,
    ) except -1:
        """Appends the method, header and body frames of one message to the scratch buffer."""
        # Sizes in locals: the compiler must assume that a write through p changes any field.
        cdef Py_ssize_t tag_size = self.tag_size, exchange_size = exchange.value_size, key_size = record.key_size
        cdef Py_ssize_t properties_size = properties.value_size, body_size = record.value_size
        cdef Py_ssize_t piece_max = <Py_ssize_t>self.frame_max - 8
        cdef int channel = self.channel
        cdef uint8_t* start = reserve_scratch(
            out.used,
            72 + tag_size + exchange_size + key_size + properties_size + body_size
            + (0 if body_size < piece_max else body_size // piece_max * 8),
        ) + out.used
        cdef uint64_t tag = self.ring.push(-1 if self.no_ack else source, offset)
        cdef uint8_t* p = put_frame_head(
            start, FRAME_METHOD, channel, <uint32_t>(16 + tag_size + exchange_size + key_size)
        )
        put16(p, CLASS_BASIC)
        put16(p + 2, METHOD_DELIVER)
        p[4] = <uint8_t>tag_size
        p += 5
        memcpy(p, self.tag_text, tag_size)
        p += tag_size
        put64(p, tag)
        p[8] = redelivered
        p[9] = <uint8_t>exchange_size
        p += 10
        memcpy(p, exchange.value, exchange_size)
        p += exchange_size
        p[0] = <uint8_t>key_size
        p += 1
        memcpy(p, record.key, key_size)
        p += key_size
        p[0] = FRAME_END
        p = put_frame_head(p + 1, FRAME_HEADER, channel, <uint32_t>(12 + properties_size))
        put16(p, CLASS_BASIC)
        put16(p + 2, 0)
        put64(p + 4, body_size)
        p += 12
        memcpy(p, properties.value, properties_size)
        p += properties_size
        p[0] = FRAME_END
        p = put_body(p + 1, channel, record.value, body_size, piece_max)
        out.used += p - start
        out.body_bytes += body_size
        out.redelivered += redelivered
        out.count += 1
        return 0
