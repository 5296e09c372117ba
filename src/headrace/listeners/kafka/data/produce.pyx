# cython: boundscheck=False, wraparound=False
"""Produce: batches are checked and stored as they came, and answered when the log says they are safe.

What unfolds to much is checked in a thread, and with it all that comes behind it on the same connection waits: in the
log, too, the order is that of the requests.
"""

from libc.stdint cimport int64_t

from headrace.listeners.kafka.request_pipeline cimport RequestPipeline, Request
from headrace.record.batch.scan cimport validated
from headrace.wire.kafka.frames cimport BufferPool

from headrace.broker.streams import rewriting
from headrace.listeners.kafka.errors import Code, TransactionRefused, code_of
from headrace.errors import (
    CorruptBatch, HeadraceError, InvalidInput, NotInTransaction, Overloaded, StreamNotFound,
)
from headrace.record import codec
from headrace.record.layout import (
    CODECS, CONTROL_BIT, HEADERS_MAX, LENGTH_AT, LOG_APPEND_TIME_BIT, MAGIC, MAGIC_AT, PREFIX_BYTES, RECORDS_MAX,
    TRANSACTIONAL_BIT,
)
from headrace.wire.kafka import hot

cdef object NO_BUFFER = bytearray()
cdef str NO_KEY = "without a key"
cdef int64_t LAST_OFFSET = 0x7FFFFFFFFFFFFFFF
cdef str NOT_YOUR_TIME = "the log's append time is the broker's to say"
cdef int64_t CONTROL = CONTROL_BIT, TRANSACTIONAL = TRANSACTIONAL_BIT, APPEND_TIME = LOG_APPEND_TIME_BIT
cdef int64_t MOST_RECORDS = RECORDS_MAX, MOST_HEADERS = HEADERS_MAX


cdef enum:
    # Times its size, or one batch as large as can be: what a request may unfold to. Others that unfold to much wait
    # for the same thread, and a megabyte of batches that hold nothing but zeros would take minutes.
    UNFOLDING_MAX = 64
    LARGE_BYTES = 64 << 10  # may name more partitions than there are
    # On the loop, of one request: a millisecond or two. To go to the thread and back takes a tenth of that.
    LOOP_UNFOLDED_BYTES = 1 << 20
    LOOP_PLAIN_BYTES = 8 << 20      # what need not be unfolded is checked ten times as fast
    PACKING = 16                    # times as dear: gzip, if that is what the topic wants, takes 15 ms for a megabyte
    # Of this version and up a batch brings its partition into the transaction (transaction.version 2).
    JOINING_VERSION = 12
    ABORTABLE_VERSION = 11  # those who send it abort when told so, where INVALID_TXN_STATE ends them
    BATCH_VERSION = 3  # of record batches, and nothing older
    NAMED_MAX = 10_000  # looked at in a batch that is refused; those of librdkafka have no more


cdef class Pending:
    """The results of one request, filled in as tickets resolve."""
    cdef object listener
    cdef Request request
    cdef list topics  # as hot.produce_response takes them
    cdef int64_t acks
    cdef bint is_nameless  # it names no transactional id
    cdef Py_ssize_t left  # one is held by the handler, so that tickets that are done at once do not answer early
    cdef bint keeps_buffer  # to be used again

    cdef int begun(self) except -1:
        """All is under way, or refused."""
        if self.acks == 0:
            self.request.answer(())
        self.one_done()

    cdef int failed(self, list results, number, error, code, records) except -1:
        results.append((number, code_of(error) if code is None else code, -1, -1, -1, str(error), records))

    cdef object code_of_refusal(self, error, data):
        if not -1 <= self.acks <= 1:
            return Code.INVALID_REQUIRED_ACKS
        if isinstance(error, NotInTransaction) and self.request.version >= ABORTABLE_VERSION:
            return Code.TRANSACTION_ABORTABLE
        return refusal(error, data, self.request.version)

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
        listener = self.listener
        buffer = request.buffer
        request.buffer = NO_BUFFER
        if self.keeps_buffer:
            (<BufferPool?>listener.pool).give(buffer)
        wait_ms = listener.throttle_ms(request.size)
        if self.acks != 0:
            request.answer((hot.produce_response(request.version, request.correlation_id, self.topics, wait_ms),))
        else:
            for _, results in self.topics:
                for result in results:
                    if result[1]:
                        request.fail(InvalidInput("a batch without acks was refused"))
                        return 0
        if wait_ms:
            request.connection.throttle(wait_ms)
        return 0


cdef class Stored:
    """To be called when a ticket of the request has resolved."""
    cdef Pending pending
    cdef list results
    cdef object number, partition
    cdef int64_t stamp_ms, messages, size

    def __call__(self, ticket):
        cdef Pending pending = self.pending
        try:
            if ticket.error is not None:
                pending.failed(self.results, self.number, ticket.error, None, ())
                pending.keeps_buffer = False  # after a failure a write of it may still be under way
            else:
                stats = pending.listener.stats
                stats.messages_in += self.messages
                stats.bytes_in += self.size
                start = self.partition.log.start_offset
                self.results.append((self.number, 0, ticket.base_offset, self.stamp_ms, start, None, ()))
            pending.one_done()
        except Exception as error:  # as where requests are handled: nobody else waits here who could
            pending.request.fail(error)


class ForThread(Exception):
    """It would hold the loop for too long."""


cdef class PendingPartition:
    """What a request has for one partition, on its way through the thread."""
    cdef object topic, number, stream, partition
    cdef list results
    cdef object data, codec  # None: of whatever it is
    cdef bint keyed
    cdef Py_ssize_t size, batch_bytes_max
    cdef list infos
    cdef object error, refused_records

    cdef int check(self, Py_ssize_t decompressed_bytes_max, Py_ssize_t* left_bytes) except -1:
        """In the thread. Its settings were copied: they may change meanwhile, and then came earlier."""
        try:
            self.infos = validated(
                self.data, self.batch_bytes_max, decompressed_bytes_max, MOST_RECORDS, MOST_HEADERS, True, True,
                self.keyed, left_bytes, True,
            )
            if self.codec is not None and is_packed_anew(self.infos, self.codec):
                self.data = packed(self.data, self.infos, self.codec, decompressed_bytes_max)
                self.infos = codec.scan(self.data, verify_crc=False)
        except HeadraceError as error:
            self.error = error
            self.refused_records = refused_records(decompressed_bytes_max, error, self.data)


def check_all(list parts not None, Py_ssize_t decompressed_bytes_max, Py_ssize_t left_bytes):
    cdef PendingPartition part
    for part in parts:
        if part.error is None:
            part.check(decompressed_bytes_max, &left_bytes)


async def go_on(listener, Pending pending not None, list parts not None, Py_ssize_t unfolded_bytes):
    """With what the loop has not done of a request, and what it has unfolded of it."""
    cdef Request request = pending.request
    cdef RequestPipeline connection = request.connection
    cdef Py_ssize_t unfolded_max = listener.config.decompressed_bytes_max
    left_bytes = max(unfolded_max, UNFOLDING_MAX * request.size, <Py_ssize_t>LOOP_UNFOLDED_BYTES) - unfolded_bytes
    try:
        await listener.loop.run_in_executor(listener.checking, check_all, parts, unfolded_max, left_bytes)
        if listener.admits(request):
            store_all(listener, pending, connection, parts)
            pending.begun()
    except Exception as error:  # here: what waits behind it must not be started on a connection that ends
        request.fail(error)
    finally:
        listener.checks(-request.size)
        connection.is_checking = False
        connection.start_more()
        connection.pause_or_resume()


cdef int store_all(listener, Pending pending, RequestPipeline connection, list parts) except -1:
    cdef PendingPartition part
    cdef int64_t stamp_ms, messages = 0
    access = connection.access
    found = listener.topics if access is None else access.writes
    for part in parts:
        try:
            if isinstance(part.error, Overloaded) and found.find(part.topic) is part.stream:
                put_off(listener, part)
            if part.error is not None:
                raise part.error
            if found.find(part.topic) is not part.stream:
                raise StreamNotFound(part.topic)
            stamp_ms = -1
            ticket = put(
                listener, pending, part.stream, part.partition, part.data, part.infos, access, &stamp_ms, &messages,
            )
        except HeadraceError as error:
            code = pending.code_of_refusal(error, part.data)
            pending.failed(part.results, part.number, error, code, part.refused_records)
            continue
        pending.follow(ticket, part.results, part.number, part.partition, stamp_ms, messages, part.size)


cdef int put_off(listener, PendingPartition part) except -1:
    """It is to come again. A batch of a producer with an id comes alone, and all but what it unfolds to was checked."""
    size = PREFIX_BYTES + int.from_bytes(part.data[LENGTH_AT : LENGTH_AT + 4], "big")
    [info] = codec.scan(part.data[:size], verify_crc=False)
    if info.producer_id >= 0:
        listener.coordination.producers.put_off(part.partition.log, info)
    return 0


def produce(listener, Request request not None):
    cdef RequestPipeline connection = request.connection
    cdef Pending pending = Pending.__new__(Pending)
    cdef list results
    cdef list later = None
    cdef int64_t stamp_ms, messages = 0
    cdef Py_ssize_t left_bytes = LOOP_UNFOLDED_BYTES
    transactional_id, acks, _, topics = hot.parse_produce(request.buffer, request.position, request.size, request.version)
    if request.size > LARGE_BYTES:
        listener.check_named(topics)
    pending.listener = listener
    pending.request = request
    pending.topics = []
    pending.acks = acks
    pending.is_nameless = transactional_id is None
    pending.left = 1
    pending.keeps_buffer = True
    if not connection.is_publisher:
        connection.is_publisher = True
        listener.flow.published(connection)
    broker = listener.broker
    if broker.shard.staging.pending_bytes > broker.pressure.limits.pending_bytes:
        connection.throttle(1000)
    view = memoryview(request.buffer)
    if request.size > LOOP_PLAIN_BYTES:
        later = []
    access = connection.access
    found = listener.topics if access is None else access.writes
    for topic, parts in topics:
        results = []
        pending.topics.append((topic, results))
        for number, start, end in parts:
            try:
                if not -1 <= pending.acks <= 1:
                    raise InvalidInput(f"acks={acks}")
                if access is None and topic == connection.last_topic and not connection.last_stream.is_deleted:
                    stream = connection.last_stream
                else:
                    stream = found.find(topic)
                    connection.last_topic, connection.last_stream = topic, stream
                if start < 0 or start == end:
                    raise CorruptBatch("no records")
                partitions = stream.partitions
                partition = partitions[number] if 0 <= number < len(partitions) else stream.partition(number)
                stamp_ms = -1
                if later is not None:
                    later.append(part_of(topic, number, stream, partition, results, view[start:end]))
                    continue
                ticket = append(
                    listener, pending, stream, partition, view[start:end], access, &stamp_ms, &messages, &left_bytes,
                )
            except HeadraceError as error:
                pending.failed(
                    results, number, error, pending.code_of_refusal(error, view[start:end]),
                    refused_records(listener.config.decompressed_bytes_max, error, view[start:end]),
                )
                continue
            except ForThread:
                later = [part_of(topic, number, stream, partition, results, view[start:end])]
                continue
            pending.follow(ticket, results, number, partition, stamp_ms, messages, end - start)
    if later:
        connection.is_checking = True
        listener.checks(request.size)
        listener.spawn(go_on(listener, pending, later, LOOP_UNFOLDED_BYTES - left_bytes), request)
    else:
        pending.begun()


cdef PendingPartition part_of(topic, number, stream, partition, list results, data):
    cdef PendingPartition part = PendingPartition.__new__(PendingPartition)
    settings = partition.log.settings
    part.topic, part.number, part.stream, part.partition = topic, number, stream, partition
    part.results = results
    part.refused_records = ()
    part.data = data
    part.size = len(data)
    part.codec = CODECS[stream.settings.compression] if "compression" in stream.document.config else None
    part.keyed = settings.is_compacted
    part.batch_bytes_max = settings.batch_bytes_max
    return part


cdef object append(
    listener, Pending pending, stream, partition, data, access, int64_t* stamp_ms, int64_t* messages,
    Py_ssize_t* left_bytes,
):
    """Puts the broker's time into stamp_ms if that is what the records carry. Raises ForThread if it is too much."""
    cdef list infos
    cdef Py_ssize_t left = left_bytes[0]
    log = partition.log
    try:
        infos = validated(
            data, log.settings.batch_bytes_max, listener.config.decompressed_bytes_max, MOST_RECORDS, MOST_HEADERS,
            True,
            True,  # sarama leaves the max timestamp empty; Kafka puts it right, too
            log.settings.is_compacted,
            left_bytes,
            False,
        )
    except Overloaded:
        left_bytes[0] = left  # it begins anew there
        raise ForThread from None
    if "compression" in stream.document.config and is_packed_anew(infos, CODECS[stream.settings.compression]):
        left_bytes[0] -= PACKING * (left - left_bytes[0] + len(data))
        if left_bytes[0] < 0:
            left_bytes[0] = left
            raise ForThread
    return put(listener, pending, stream, partition, data, infos, access, stamp_ms, messages)


cdef object put(
    listener, Pending pending, stream, partition, data, list infos, access, int64_t* stamp_ms, int64_t* messages
):
    """What was found to be sound goes to the log, and if the request is new enough its partition to the transaction."""
    cdef int64_t attributes
    cdef Py_ssize_t batches
    log = partition.log
    if not infos:
        raise CorruptBatch("no whole batch")
    messages[0] = 0
    for info in infos:
        messages[0] += <int64_t>info.count
        attributes = info.attributes
        if attributes & APPEND_TIME:  # nothing of its records bounds the time it says
            raise CorruptBatch(NOT_YOUR_TIME)
    stored = data
    if "compression" in stream.document.config or stream.settings.timestamp_type == "append":
        stored = rewritten(listener, stream, data, infos, stamp_ms)
        infos = codec.scan(stored, verify_crc=False)
    first = infos[0]
    producer_id = first.producer_id
    batches = len(infos)
    for info in infos:
        attributes = info.attributes
        if attributes & CONTROL:
            raise CorruptBatch("control batches are the broker's")
        if batches > 1 and <int64_t>info.producer_id >= 0:
            raise CorruptBatch("a batch of a producer with an id comes alone")
        if attributes & TRANSACTIONAL and producer_id < 0:
            raise CorruptBatch("a transactional batch without a producer")
        if producer_id >= 0 and <int64_t>info.base_sequence < 0:
            raise CorruptBatch("a producer with an id numbers its batches")
    attributes = first.attributes
    if producer_id < 0:
        return log.append(stored, infos)
    if attributes & TRANSACTIONAL:
        if pending.is_nameless:
            raise TransactionRefused("a batch of a transaction, and no transactional id")
        transactions = listener.coordination.transactions
        # The id that the producer has, whichever the request names.
        name = transactions.name_of(producer_id) if access is not None else None
        if access is not None and name is not None:
            access.transaction(name)
        if pending.request.version >= JOINING_VERSION:
            return transactions.append(log, stored, infos, (stream.name, partition.number))
        transactions.check_append(producer_id, first.producer_epoch, (stream.name, partition.number))
    return listener.coordination.producers.append(log, stored, infos)


cdef object rewritten(listener, stream, data, list infos, int64_t* stamp_ms):
    """The batches as the topic's settings want them."""
    wanted = CODECS[stream.settings.compression] if "compression" in stream.document.config else None
    if stream.settings.timestamp_type == "append":
        stamp_ms[0] = listener.broker.clock.now_ms()
    if wanted is not None and is_packed_anew(infos, wanted):
        data = packed(data, infos, wanted, listener.config.decompressed_bytes_max)
        infos = codec.scan(data, verify_crc=False)
    if stamp_ms[0] >= 0:
        data = bytearray(data)
        for info in infos:
            rewriting.stamp(memoryview(data)[info.position : info.end], stamp_ms[0])
    return data


cdef bint is_packed_anew(list infos, wanted) except -1:
    for info in infos:
        if info.codec != wanted:
            return True
    return False


cdef object packed(data, list infos, wanted, Py_ssize_t decompressed_bytes_max):
    """The batches, all of them under this codec."""
    result = bytearray()
    for info in infos:
        batch = data[info.position : info.end]
        result += batch if info.codec == wanted else rewriting.recompress(batch, wanted, decompressed_bytes_max)
    return result


cdef object refusal(error, data, int version):
    """Kafka tells four kinds of bad batch apart; ours is one error with a reason."""
    if not isinstance(error, CorruptBatch):
        return None
    if len(data) > MAGIC_AT and data[MAGIC_AT] < MAGIC and version < BATCH_VERSION:
        return Code.UNSUPPORTED_FOR_MESSAGE_FORMAT
    if len(data) > MAGIC_AT and data[MAGIC_AT] > MAGIC:
        return Code.CORRUPT_MESSAGE
    reason = str(error)
    if NOT_YOUR_TIME in reason:
        return Code.INVALID_TIMESTAMP
    return Code.CORRUPT_MESSAGE if "CRC" in reason or "checksum" in reason else Code.INVALID_RECORD


cdef object refused_records(Py_ssize_t decompressed_bytes_max, error, data):
    """Which records of the first bad batch are to blame, by their place in it: clients tell the senders of the others
    that theirs were good."""
    if not isinstance(error, CorruptBatch) or NO_KEY not in str(error):
        return ()
    start = error.position
    _, end, _ = codec.trim(data, start, None, 0, LAST_OFFSET, 1, verify_crc=False)
    try:
        found = codec.records(data, start, end, limit=NAMED_MAX, decompressed_bytes_max=decompressed_bytes_max)
    except CorruptBatch:
        return ()  # what comes behind the first without a key was not looked at
    return [place for place, record in enumerate(found) if record.key is None]
