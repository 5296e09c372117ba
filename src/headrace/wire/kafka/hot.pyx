# cython: boundscheck=False, wraparound=False
"""Hand-written codecs of Produce and Fetch: records are referred to by position and never copied.

A Fetch response is a list of buffers for one gathering write: small encoded pieces, and between them the records as the
log returned them.
"""

cimport cython
from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint32_t

from headrace.wire.kafka.primitives cimport Reader, Writer, reader_of

from headrace.errors import MalformedRequest

cdef enum:
    INLINE_RECORDS_MAX = 2048   # copying smaller records is cheaper than sending them as a separate buffer
    PARTITIONS_MAX = 200_000    # topics and partitions in one request


cdef inline object topic_key(Reader reader, bint flexible, bint by_id):
    return reader.fixed(16) if by_id else reader.string(flexible, False)


def parse_produce(buffer, Py_ssize_t position, Py_ssize_t end, int version):
    """(transactional id, acks, timeout in ms, [(topic name or id, [(partition, start, end)])]).

    start and end are the position of the records in buffer; start is -1 if they are null.
    """
    cdef Reader reader = reader_of(buffer, position, end)
    cdef bint flexible = version >= 9
    cdef bint by_id = version >= 13
    cdef Py_ssize_t topics, partitions, size, t, p
    cdef int64_t total = 0
    cdef list found = [], parts
    transactional_id = reader.string(flexible, True) if version >= 3 else None
    cdef int64_t acks = reader.int16()
    cdef int64_t timeout_ms = reader.int32()
    topics = reader.count(flexible, False, 6)
    for t in range(topics):
        topic = topic_key(reader, flexible, by_id)
        partitions = reader.count(flexible, False, 5)
        total += 1 + partitions
        if total > PARTITIONS_MAX:
            raise MalformedRequest("too many partitions in one request")
        parts = []
        for p in range(partitions):
            index = reader.int32()
            size = reader.length(flexible, True, True)
            if size < 0:
                parts.append((index, -1, -1))
            else:
                parts.append((index, reader.position, reader.position + size))
                reader.position += size
            if flexible:
                reader.skip_tags()
        if flexible:
            reader.skip_tags()
        found.append((topic, parts))
    if flexible:
        reader.skip_tags()
    return transactional_id, acks, timeout_ms, found


def produce_response(int version, int64_t correlation_id, list topics not None, int64_t throttle_ms):
    """topics: [(name or id, [(partition, error, base offset, append time, log start, message or None, records)])].

    records are the indexes in the batch of the records that caused the error; the message applies to all of them.
    """
    cdef Writer writer = Writer()
    cdef bint flexible = version >= 9
    cdef bint by_id = version >= 13
    writer.int32(0)
    writer.int32(correlation_id)
    if flexible:
        writer.int8(0)
    writer.count(len(topics), flexible)
    for topic, parts in topics:
        if by_id:
            writer.fixed(topic)
        else:
            writer.string(topic, flexible)
        writer.count(len(parts), flexible)
        for index, error, base_offset, append_ms, log_start, message, records in parts:
            writer.int32(index)
            writer.int16(error)
            writer.int64(base_offset)
            if version >= 2:
                writer.int64(append_ms)
            if version >= 5:
                writer.int64(log_start)
            if version >= 8:
                writer.count(len(records), flexible)
                for place in records:
                    writer.int32(place)
                    writer.message(None, flexible)
                    if flexible:
                        writer.int8(0)
                writer.message(message, flexible)
            if flexible:
                writer.int8(0)
        if flexible:
            writer.int8(0)
    if version >= 1:
        writer.int32(throttle_ms)
    if flexible:
        writer.int8(0)
    writer.put_int32_at(0, writer.size - 4)
    return writer.finish()


@cython.final
cdef class FetchRequest:
    """A parsed Fetch request.

    topics: [(name or id, [(partition, leader epoch, offset, max bytes)])]; forgotten: [(name or id, [partition])].
    """
    cdef readonly int64_t replica_id, max_wait_ms, min_bytes, max_bytes, isolation, session_id, session_epoch
    cdef readonly list topics, forgotten


@cython.final
@cython.freelist(16)
cdef class FetchResult:
    """The answer for one partition. aborted: [(producer id, first offset)], None unless the client reads committed."""
    cdef readonly int64_t partition, error, high_watermark, last_stable, log_start
    cdef readonly object aborted, records

    def __init__(
        self, int64_t partition, int64_t error, int64_t high_watermark=-1, int64_t last_stable=-1,
        int64_t log_start=-1, aborted=None, records=None,
    ):
        self.partition, self.error, self.high_watermark = partition, error, high_watermark
        self.last_stable, self.log_start = last_stable, log_start
        self.aborted, self.records = aborted, records


cdef int64_t replica_in_tags(Reader reader, int version) except? -2:
    """The replica id of a version 15 request's tag 1; other tags are skipped."""
    cdef int64_t replica = -1
    cdef uint32_t left = reader.unsigned_varint()
    cdef uint32_t tag, size
    cdef Py_ssize_t after
    while left:
        left -= 1
        tag = reader.unsigned_varint()
        size = reader.unsigned_varint()
        reader.need(size)
        after = reader.position + size
        if tag == 1 and version >= 15:
            replica = reader.int32()
        reader.position = after
    return replica


def parse_fetch(buffer, Py_ssize_t position, Py_ssize_t end, int version):
    cdef Reader reader = reader_of(buffer, position, end)
    cdef bint flexible = version >= 12
    cdef bint by_id = version >= 13
    cdef FetchRequest request = FetchRequest.__new__(FetchRequest)
    cdef int64_t leader_epoch, offset
    cdef int64_t total = 0
    cdef Py_ssize_t topics, partitions, t, p
    cdef list wanted = [], forgotten = [], parts
    request.topics, request.forgotten = wanted, forgotten
    request.replica_id = reader.int32() if version < 15 else -1
    request.max_wait_ms = reader.int32()
    request.min_bytes = reader.int32()
    request.max_bytes = reader.int32()
    request.isolation = reader.int8()
    request.session_id = reader.int32() if version >= 7 else 0
    request.session_epoch = reader.int32() if version >= 7 else -1
    topics = reader.count(flexible, False, 6)
    for t in range(topics):
        topic = topic_key(reader, flexible, by_id)
        partitions = reader.count(flexible, False, 16)
        total += 1 + partitions
        if total > PARTITIONS_MAX:
            raise MalformedRequest("too many partitions in one request")
        parts = []
        for p in range(partitions):
            index = reader.int32()
            leader_epoch = reader.int32() if version >= 9 else -1
            offset = reader.int64()
            if version >= 12:
                reader.int32()
            if version >= 5:
                reader.int64()
            parts.append((index, leader_epoch, offset, reader.int32()))
            if flexible:
                reader.skip_tags()
        if flexible:
            reader.skip_tags()
        wanted.append((topic, parts))
    if version >= 7:
        topics = reader.count(flexible, False, 3)
        for t in range(topics):
            topic = topic_key(reader, flexible, by_id)
            partitions = reader.count(flexible, False, 4)
            total += 1 + partitions
            if total > PARTITIONS_MAX:
                raise MalformedRequest("too many partitions in one request")
            parts = []
            for p in range(partitions):
                parts.append(reader.int32())
            if flexible:
                reader.skip_tags()
            forgotten.append((topic, parts))
    if version >= 11:
        reader.string(flexible, False)
    if flexible:
        if version >= 15:
            request.replica_id = replica_in_tags(reader, version)
        else:
            reader.skip_tags()
    return request


def fetch_response(
    int version, int64_t correlation_id, int64_t throttle_ms, int error, int64_t session_id, list topics not None
):
    """The whole response as a list of buffers. topics: [(name or id, [FetchResult])]."""
    cdef Writer writer = Writer(512)
    cdef bint flexible = version >= 12
    cdef bint by_id = version >= 13
    cdef list pieces = []
    cdef Py_ssize_t cut = 0, size, total = 0
    cdef FetchResult result
    cdef const unsigned char[::1] view
    writer.int32(0)
    writer.int32(correlation_id)
    if flexible:
        writer.int8(0)
    writer.int32(throttle_ms)
    if version >= 7:
        writer.int16(error)
        writer.int32(session_id)
    writer.count(len(topics), flexible)
    for topic, parts in topics:
        if by_id:
            writer.fixed(topic)
        else:
            writer.string(topic, flexible)
        writer.count(len(parts), flexible)
        for result in parts:
            records = result.records
            writer.int32(result.partition)
            writer.int16(result.error)
            writer.int64(result.high_watermark)
            writer.int64(result.last_stable)
            if version >= 5:
                writer.int64(result.log_start)
            if result.aborted is None:
                writer.count(-1, flexible)
            else:
                writer.count(len(result.aborted), flexible)
                for producer_id, first_offset in result.aborted:
                    writer.int64(producer_id)
                    writer.int64(first_offset)
                    if flexible:
                        writer.int8(0)
            if version >= 11:
                writer.int32(-1)
            size = 0 if records is None else len(records)
            writer.length(size, flexible, True)
            if size > INLINE_RECORDS_MAX:
                pieces.append(PyBytes_FromStringAndSize(<const char*> writer.data + cut, writer.size - cut))
                pieces.append(records)
                cut = writer.size
                total += size
            elif size:
                view = records
                writer.raw(&view[0], size)
            if flexible:
                writer.int8(0)
        if flexible:
            writer.int8(0)
    if flexible:
        writer.int8(0)
    total += writer.size - 4
    if cut < writer.size:
        pieces.append(PyBytes_FromStringAndSize(<const char*> writer.data + cut, writer.size - cut))
    # The size is in the first piece, which was cut before the total was known.
    head = bytearray(pieces[0])
    head[0:4] = total.to_bytes(4, "big")
    pieces[0] = bytes(head)
    return pieces
