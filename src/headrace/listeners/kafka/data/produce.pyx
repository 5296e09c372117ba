# cython: boundscheck=False, wraparound=False
"""Produce: batches are validated, handed to the broker as they came, and answered when they are durable.

Validation has to decompress batches. A request that decompresses to more than a millisecond's work is validated in a
thread; later requests of the same connection wait for it, so that the log keeps the order of the requests.

Which batches a stream accepts is decided in broker/streams/append.py. This module appends ordinary batches itself and
maps rejections to Kafka's error codes.
"""

from libc.stdint cimport INT64_MAX, INT64_MIN, int64_t

from headrace.listeners.kafka.request_pipeline cimport RequestPipeline, Request
from headrace.record.batch.scan cimport validated
from headrace.wire.kafka.frames cimport BufferPool

from headrace.broker.streams.append import Sender, recompressed
from headrace.listeners.kafka.errors import Code, code_of
from headrace.errors import (
    CorruptBatch, HeadraceError, InvalidInput, KeyRequired, NotInTransaction, Overloaded, StreamNotFound,
    TimestampOutOfRange,
)
from headrace.record import codec
from headrace.record.layout import (
    CONTROL_BIT, HEADERS_MAX, LENGTH_AT, LOG_APPEND_TIME_BIT, MAGIC, MAGIC_AT, NO_TIMESTAMP, PREFIX_BYTES, RECORDS_MAX,
    TIMESTAMP_MAX, TIMESTAMP_MIN, TRANSACTIONAL_BIT,
)
from headrace.wire.kafka import hot

cdef object NO_BUFFER = bytearray()
cdef int64_t LAST_OFFSET = 0x7FFFFFFFFFFFFFFF
cdef int64_t UNUSUAL = CONTROL_BIT | TRANSACTIONAL_BIT | LOG_APPEND_TIME_BIT
cdef int64_t MOST_RECORDS = RECORDS_MAX, MOST_HEADERS = HEADERS_MAX
cdef int64_t LOWEST_TIMESTAMP = TIMESTAMP_MIN, HIGHEST_TIMESTAMP = TIMESTAMP_MAX


cdef enum:
    # A request may decompress to this many times its size, or to one batch of the largest size allowed. Without a
    # limit, a megabyte of batches of zeros would keep the one thread, and all who wait for it, busy for minutes.
    DECOMPRESSION_RATIO_MAX = 64
    LARGE_BYTES = 64 << 10  # a request of this size may name more partitions than exist
    # Decompressed on the event loop, per request: a millisecond or two. A round trip to the thread takes a tenth.
    LOOP_DECOMPRESSED_BYTES = 1 << 20
    LOOP_PLAIN_BYTES = 8 << 20      # uncompressed batches are validated ten times as fast
    COMPRESSION_COST = 16           # times validation: gzip takes 15 ms for a megabyte
    # From this version on a batch brings its partition into the transaction (transaction.version 2).
    JOINING_VERSION = 12
    ABORTABLE_VERSION = 11  # clients of this version abort on TRANSACTION_ABORTABLE; INVALID_TXN_STATE is fatal to them
    BATCH_VERSION = 3  # the first version with record batches (magic 2) only
    NAMED_MAX = 10_000  # records examined in a rejected batch; librdkafka sends no larger batches


cdef class PendingProduce:
    """The results of one request, filled in as tickets resolve."""
    cdef object context
    cdef Request request
    cdef list topics  # as hot.produce_response takes them
    cdef int64_t acks
    cdef bint has_transactional_id
    cdef Py_ssize_t left  # unresolved tickets, plus one for the handler: the answer must not be sent while it appends
    cdef bint reuses_buffer

    cdef int all_started(self) except -1:
        """Every batch is staged or rejected."""
        if self.acks == 0:
            self.request.answer(())
        self.one_done()

    cdef int failed(self, list results, number, error, code, records) except -1:
        results.append((number, code_of(error) if code is None else code, -1, -1, -1, str(error), records))

    cdef object code_of_rejection(self, error, data):
        if not -1 <= self.acks <= 1:
            return Code.INVALID_REQUIRED_ACKS
        if isinstance(error, NotInTransaction) and self.request.version >= ABORTABLE_VERSION:
            return Code.TRANSACTION_ABORTABLE
        return code_of_corruption(error, data, self.request.version)

    cdef int follow(
        self, ticket, list results, number, partition, int64_t stamp_ms, int64_t messages, int64_t size
    ) except -1:
        cdef Stored stored = Stored.__new__(Stored)
        stored.pending = self
        stored.results = results
        stored.number = number
        stored.partition = partition
        stored.stamp_ms = stamp_ms
        stored.messages = messages
        stored.size = size
        self.left += 1
        ticket.add_callback(stored)
        return 0

    cdef int one_done(self) except -1:
        self.left -= 1
        if self.left:
            return 0
        cdef Request request = self.request
        context = self.context
        buffer = request.buffer
        request.buffer = NO_BUFFER
        if self.reuses_buffer:
            (<BufferPool?>context.pool).put_back(buffer)
        wait_ms = context.throttle_ms(request.size)
        if self.acks != 0:
            request.answer((hot.produce_response(request.version, request.correlation_id, self.topics, wait_ms),))
        else:
            for _, results in self.topics:
                for result in results:
                    if result[1]:
                        request.fail(InvalidInput("a batch sent with acks=0 was rejected"))
                        return 0
        if wait_ms:
            request.connection.throttle(wait_ms)
        return 0


cdef class Stored:
    """The callback of a ticket: adds the result of one partition to its request."""
    cdef PendingProduce pending
    cdef list results
    cdef object number, partition
    cdef int64_t stamp_ms, messages, size

    def __call__(self, ticket):
        cdef PendingProduce pending = self.pending
        try:
            if ticket.error is not None:
                pending.failed(self.results, self.number, ticket.error, None, ())
                pending.reuses_buffer = False  # after a failure a write of the buffer may still be in progress
            else:
                stats = pending.context.stats
                stats.messages_in += self.messages
                stats.bytes_in += self.size
                start = self.partition.start_offset
                self.results.append((self.number, 0, ticket.base_offset, self.stamp_ms, start, None, ()))
            pending.one_done()
        except Exception as error:  # a callback has no caller that would fail the request
            pending.request.fail(error)


class NeedsThread(Exception):
    """Validating the batch would block the event loop for too long."""


cdef struct Timestamps:
    int64_t lowest, highest


cdef Timestamps accepted_timestamps(rules, int64_t now_ms) except *:
    """The range of timestamps that a stream accepts. Where the append time replaces them, every one, as in Kafka."""
    cdef int64_t before_ms, after_ms
    cdef Timestamps accepted
    if rules.stamps_time:
        accepted.lowest, accepted.highest = INT64_MIN, INT64_MAX
        return accepted
    before_ms, after_ms = rules.timestamp_before_ms, rules.timestamp_after_ms  # at most 1 << 53: no sum overflows
    accepted.lowest = LOWEST_TIMESTAMP if before_ms < 0 else max(LOWEST_TIMESTAMP, now_ms - before_ms)
    accepted.highest = HIGHEST_TIMESTAMP if after_ms < 0 else min(HIGHEST_TIMESTAMP, now_ms + after_ms)
    return accepted


cdef class PendingPartition:
    """The batches of a request for one partition, while they are validated in the thread.

    It has a copy of the stream's rules: a change of the settings meanwhile counts as made after the request."""
    cdef object topic, number, stream, partition
    cdef list results
    cdef object data, rules
    cdef Py_ssize_t size
    cdef int64_t now_ms  # when the request was read
    cdef list infos
    cdef object error, rejected_records

    cdef int check(self, Py_ssize_t decompressed_bytes_max, Py_ssize_t* left_bytes) except -1:
        """Runs in the thread."""
        cdef Timestamps accepted
        try:
            accepted = accepted_timestamps(self.rules, self.now_ms)
            self.infos = validated(
                self.data, self.rules.batch_bytes_max, decompressed_bytes_max, MOST_RECORDS, MOST_HEADERS, True, True,
                self.rules.needs_key, left_bytes, True, accepted.lowest, accepted.highest,
            )
            if self.rules.must_recompress(self.infos):
                self.data = recompressed(self.data, self.infos, self.rules.codec, decompressed_bytes_max)
                self.infos = codec.scan(self.data, verify_crc=False)
        except HeadraceError as error:
            self.error = error
            self.rejected_records = rejected_records(decompressed_bytes_max, error, self.data)


def check_all(list parts not None, Py_ssize_t decompressed_bytes_max, Py_ssize_t left_bytes):
    cdef PendingPartition part
    for part in parts:
        if part.error is None:
            part.check(decompressed_bytes_max, &left_bytes)


async def continue_in_thread(
    context, PendingProduce pending not None, list parts not None, Py_ssize_t decompressed_bytes
):
    """Validate in the thread, then append, the batches that the event loop has not handled.

    decompressed_bytes is what the event loop has already decompressed of the request."""
    cdef Request request = pending.request
    cdef RequestPipeline connection = request.connection
    cdef Py_ssize_t most = context.config.decompressed_bytes_max
    left_bytes = max(most, DECOMPRESSION_RATIO_MAX * request.size, <Py_ssize_t>LOOP_DECOMPRESSED_BYTES)
    left_bytes -= decompressed_bytes
    try:
        await context.loop.run_in_executor(context.checking, check_all, parts, most, left_bytes)
        if context.admits(request):
            append_checked(context, pending, connection, parts)
            pending.all_started()
    except Exception as error:  # caught here: the finally block must not start later requests on a failed connection
        request.fail(error)
    finally:
        context.count_checking(-request.size)
        connection.is_checking = False
        connection.start_more()
        connection.pause_or_resume()


cdef int append_checked(context, PendingProduce pending, RequestPipeline connection, list parts) except -1:
    cdef PendingPartition part
    cdef int64_t stamp_ms, messages = 0
    access = connection.access
    found = context.topics if access is None else access.writes
    for part in parts:
        try:
            if isinstance(part.error, Overloaded) and found.find(part.topic) is part.stream:
                expect_retry(context, part)
            if part.error is not None:
                raise part.error
            if found.find(part.topic) is not part.stream:
                raise StreamNotFound(part.topic)
            stamp_ms = -1
            ticket = append(
                context, pending, part.stream, part.partition, part.data, part.infos, access, &stamp_ms, &messages,
            )
        except HeadraceError as error:
            code = pending.code_of_rejection(error, part.data)
            pending.failed(part.results, part.number, error, code, part.rejected_records)
            continue
        pending.follow(ticket, part.results, part.number, part.partition, stamp_ms, messages, part.size)


cdef int expect_retry(context, PendingPartition part) except -1:
    """The producer will send the batch again: later batches of it must not be accepted before.

    An idempotent producer sends one batch, and everything about it but its decompressed size was validated."""
    size = PREFIX_BYTES + int.from_bytes(part.data[LENGTH_AT : LENGTH_AT + 4], "big")
    [info] = codec.scan(part.data[:size], verify_crc=False)
    if info.producer_id >= 0:
        context.coordination.producers.put_off(part.partition, info)
    return 0


def produce(context, Request request not None):
    cdef RequestPipeline connection = request.connection
    cdef PendingProduce pending = PendingProduce.__new__(PendingProduce)
    cdef list results
    cdef list later = None
    cdef int64_t now_ms, stamp_ms, messages = 0
    cdef Py_ssize_t left_bytes = LOOP_DECOMPRESSED_BYTES
    transactional_id, acks, _, topics = hot.parse_produce(request.buffer, request.position, request.size, request.version)
    if request.size > LARGE_BYTES:
        context.check_named(topics)
    pending.context = context
    pending.request = request
    pending.topics = []
    pending.acks = acks
    pending.has_transactional_id = transactional_id is not None
    pending.left = 1
    pending.reuses_buffer = True
    if not connection.is_publisher:
        connection.is_publisher = True
        context.flow.published(connection)
    if context.broker.pressure.must_throttle:
        connection.throttle(1000)
    now_ms = context.broker.clock.now_ms()
    view = memoryview(request.buffer)
    if request.size > LOOP_PLAIN_BYTES:
        later = []
    access = connection.access
    found = context.topics if access is None else access.writes
    for topic, parts in topics:
        results = []
        pending.topics.append((topic, results))
        for number, start, end in parts:
            try:
                if not -1 <= pending.acks <= 1:
                    raise InvalidInput(f"acks must be -1, 0 or 1, not {acks}")
                if access is None and topic == connection.last_topic and not connection.last_stream.is_deleted:
                    stream = connection.last_stream
                else:
                    stream = found.find(topic)
                    connection.last_topic, connection.last_stream = topic, stream
                if start < 0 or start == end:
                    raise CorruptBatch("the request holds no records for the partition")
                partitions = stream.partitions
                partition = partitions[number] if 0 <= number < len(partitions) else stream.partition(number)
                stamp_ms = -1
                if later is not None:
                    later.append(pending_partition(topic, number, stream, partition, results, view[start:end], now_ms))
                    continue
                ticket = check_and_append(
                    context, pending, stream, partition, view[start:end], access, now_ms, &stamp_ms, &messages,
                    &left_bytes,
                )
            except HeadraceError as error:
                pending.failed(
                    results, number, error, pending.code_of_rejection(error, view[start:end]),
                    rejected_records(context.config.decompressed_bytes_max, error, view[start:end]),
                )
                continue
            except NeedsThread:
                later = [pending_partition(topic, number, stream, partition, results, view[start:end], now_ms)]
                continue
            pending.follow(ticket, results, number, partition, stamp_ms, messages, end - start)
    if later:
        connection.is_checking = True
        context.count_checking(request.size)
        context.spawn(
            continue_in_thread(context, pending, later, LOOP_DECOMPRESSED_BYTES - left_bytes), request
        )
    else:
        pending.all_started()


cdef PendingPartition pending_partition(topic, number, stream, partition, list results, data, int64_t now_ms):
    cdef PendingPartition part = PendingPartition.__new__(PendingPartition)
    part.topic, part.number, part.stream, part.partition = topic, number, stream, partition
    part.results = results
    part.rejected_records = ()
    part.data = data
    part.size = len(data)
    part.now_ms = now_ms
    part.rules = stream.rules  # replaced, not changed, when the settings change
    return part


cdef object check_and_append(
    context, PendingProduce pending, stream, partition, data, access, int64_t now_ms, int64_t* stamp_ms,
    int64_t* messages, Py_ssize_t* left_bytes,
):
    """On the event loop. Raises NeedsThread if the batches would decompress to more than left_bytes."""
    cdef list infos
    cdef Py_ssize_t left = left_bytes[0]
    rules = stream.rules
    cdef Timestamps accepted = accepted_timestamps(rules, now_ms)
    try:
        infos = validated(
            data, rules.batch_bytes_max, context.config.decompressed_bytes_max, MOST_RECORDS, MOST_HEADERS,
            True,
            True,  # sarama leaves the max timestamp empty; Kafka repairs it, too
            rules.needs_key,
            left_bytes,
            False,
            accepted.lowest,
            accepted.highest,
        )
    except Overloaded:
        left_bytes[0] = left  # the thread starts over
        raise NeedsThread from None
    if rules.codec is not None and rules.must_recompress(infos):
        left_bytes[0] -= COMPRESSION_COST * (left - left_bytes[0] + len(data))
        if left_bytes[0] < 0:
            left_bytes[0] = left
            raise NeedsThread
    return append(context, pending, stream, partition, data, infos, access, stamp_ms, messages)


cdef object append(
    context, PendingProduce pending, stream, partition, data, list infos, access, int64_t* stamp_ms, int64_t* messages
):
    """Append validated batches; returns the ticket. stamp_ms becomes the append time if the broker sets it."""
    appender = context.broker.appender
    if len(infos) == 1 and stream.rules.is_plain:
        info = infos[0]
        if not <int64_t>info.attributes & UNUSUAL:
            messages[0] = info.count
            if <int64_t>info.producer_id < 0:
                return partition.append(data, infos)
            if <int64_t>info.base_sequence >= 0:
                return appender.append_sequenced(partition, data, infos)
    sender = Sender(
        pending.has_transactional_id,
        pending.request.version >= JOINING_VERSION,
        None if access is None else access.transaction,
    )
    appended = appender.append(stream, partition, data, infos, sender)
    stamp_ms[0] = appended.append_time_ms
    messages[0] = appended.messages
    return appended.ticket


cdef object code_of_corruption(error, data, int version):
    """The codes that depend on the message format; None where the type of the error decides."""
    if not isinstance(error, CorruptBatch):
        return None
    if len(data) > MAGIC_AT and data[MAGIC_AT] < MAGIC and version < BATCH_VERSION:
        return Code.UNSUPPORTED_FOR_MESSAGE_FORMAT
    if len(data) > MAGIC_AT and data[MAGIC_AT] > MAGIC:
        return Code.CORRUPT_MESSAGE
    return None


cdef object rejected_records(Py_ssize_t decompressed_bytes_max, error, data):
    """The indexes of the records in the first bad batch that have no key, or a timestamp out of range: clients fail
    only these with the error."""
    if not isinstance(error, (KeyRequired, TimestampOutOfRange)):
        return ()
    start = error.position
    _, end, _ = codec.trim(data, start, None, 0, LAST_OFFSET, 1, verify_crc=False)
    try:
        found = codec.records(data, start, end, limit=NAMED_MAX, decompressed_bytes_max=decompressed_bytes_max)
    except CorruptBatch:
        return ()  # validation stopped at the first bad record: a later one may be corrupt, or its timestamp overflows
    if isinstance(error, TimestampOutOfRange):
        return [
            place for place, record in enumerate(found)
            if record.timestamp != NO_TIMESTAMP and not error.lowest <= record.timestamp <= error.highest
        ]
    return [place for place, record in enumerate(found) if record.key is None]
