"""Parses the bytes of an AMQP connection in one pass, appends publishes to record batches and collects acks.

A publish to queues that need no decision per message becomes a record in the open batch of each queue, without a
Python object: the target of the last publish is cached and found again by comparing the whole method frame.
Everything else goes to Python: methods to Events.on_method, messages to Events.on_message. Every length is checked
against the end of its container, and a frame against the negotiated maximum before any of it is kept.

For speed the scanner calls the owners of a target (the broker's queues) directly; scan.pyi types that contract.
"""

from cpython.bytes cimport PyBytes_FromStringAndSize
from libc.stdint cimport int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, realloc
from libc.string cimport memcmp, memcpy

from headrace.record.batch.build cimport APPENDED, BatchWriter, header_size, put_header
from headrace.record.amqp.validate cimport (
    BAD, EXCHANGE_NAME, EXCHANGE_NAME_SIZE, NEEDS_DECISION, PROPERTIES_NAME, PROPERTIES_NAME_SIZE, check_properties,
)
from headrace.record.raw cimport get16, get32, get64
from headrace.record.amqp.trace_headers cimport TRACES_MAX, Trace, find_traces
from headrace.publish_counts cimport PublishCounts
from headrace.wire.amqp.tags cimport TagRing

from headrace.errors import BatchTooLarge
from headrace.record.layout import SEAL_BYTES
from headrace.wire.amqp.protocol import MESSAGE_BYTES_MAX, ProtocolError

cdef enum:
    FRAME_METHOD = 1
    FRAME_HEADER = 2
    FRAME_BODY = 3
    FRAME_HEARTBEAT = 8
    FRAME_END = 0xCE
    FRAME_ERROR = 501
    SYNTAX_ERROR = 502
    UNEXPECTED_FRAME = 505

    CLASS_CHANNEL = 20
    CLASS_BASIC = 60
    METHOD_PUBLISH = 40
    METHOD_ACK = 80
    METHOD_CHANNEL_OPEN = 10
    METHOD_CHANNEL_CLOSE = 40
    METHOD_CHANNEL_CLOSE_OK = 41

    IDLE = 0
    WANTS_HEADER = 1
    WANTS_BODY = 2

    BIT_MANDATORY = 1
    BIT_IMMEDIATE = 2

    ROUTES_MAX = 10_000

cdef uint64_t BODY_MAX = MESSAGE_BYTES_MAX
cdef Py_ssize_t SEAL_SIZE = SEAL_BYTES


cdef out_of_step(int state):
    """The error for a frame that is not the expected one. The texts are RabbitMQ's."""
    if state == WANTS_HEADER:
        text = "expected content header for class 60, got non content header frame instead"
    elif state == WANTS_BODY:
        text = "expected content body, got non content body frame instead"
    else:
        return ProtocolError(UNEXPECTED_FRAME, "expected method frame, got non method frame instead")
    return ProtocolError(UNEXPECTED_FRAME, text, CLASS_BASIC, METHOD_PUBLISH)


cdef class Target:
    """The queues of a publish. `slow` if each message needs a decision in Python.

    The owners are the queues; see Owner in scan.pyi. open_batch(target) is called once per flush and registers the
    target with the batch, which calls target.reset() when it is closed. seal() finishes a buffer of the batch that has
    grown large; the writer stays the same. `counts` are those of the exchange; a message that
    Python handles is counted there by Python.
    """

    def __init__(self, owners, bint slow, bint durable, PublishCounts counts=None):
        self.owners = list(owners)
        self.slow = slow
        self.durable = durable
        self.counts = counts if counts is not None else PublishCounts()

    def reset(self):
        self.writers = self.batches = None

    cdef int open(self) except -1:
        cdef list batches = [owner.open_batch(self) for owner in self.owners]
        self.writers = [batch.writer for batch in batches]
        self.batches = batches
        return 0


cdef class Runs:
    """The batches of publishes that are confirmed together, as runs of publishes to the same batches."""

    def __cinit__(self):
        self.batches = []

    def __dealloc__(self):
        free(self.firsts)

    cdef int begin(self, uint64_t sequence, batches) except -1:
        cdef Py_ssize_t count = len(self.batches), wanted
        cdef void* grown
        if count == self.capacity:
            wanted = max(4, self.capacity * 2)
            grown = realloc(self.firsts, wanted * sizeof(uint64_t))
            if grown == NULL:
                raise MemoryError
            self.firsts = <uint64_t*>grown
            self.capacity = wanted
        self.firsts[count] = sequence
        self.batches.append(batches)
        self.last = batches
        return 0

    def ends(self, uint64_t sequence):
        """[(last sequence number of a run, its batches)]; the last run ends at sequence. The batches are None if
        went_to was not called for the publish."""
        cdef Py_ssize_t i, count = len(self.batches)
        return [
            (self.firsts[i + 1] - 1 if i + 1 < count else sequence, self.batches[i]) for i in range(count)
        ]


cdef class ChannelState:
    """The scanner's state of one channel. The listener sets the public fields. `messages` counts all publishes, `dropped`
    those that the scanner routed to no queue."""

    def __init__(self, int number):
        self.number = number
        self.tags = TagRing()
        self.fast_acks = True

    def __dealloc__(self):
        free(self.body)

    cdef int keep_body(self, const uint8_t* data, Py_ssize_t size) except -1:
        cdef Py_ssize_t wanted
        cdef void* grown
        if self.body_used + size > self.body_capacity:
            # Grow with the bytes received, never to the announced size: a header alone must not allocate memory.
            wanted = max(self.body_used + size, self.body_capacity * 2)
            grown = realloc(self.body, wanted)
            if grown == NULL:
                raise MemoryError
            self.body = <uint8_t*>grown
            self.body_capacity = wanted
        memcpy(self.body + self.body_used, data, size)
        self.body_used += size
        return 0

    @property
    def confirms(self):
        """Whether the batches of publishes are recorded."""
        return self.runs is not None

    @confirms.setter
    def confirms(self, bint value):
        self.runs = Runs() if value else None

    def went_to(self, batches not None):
        """Records the batches of the publish that on_message handles."""
        if self.runs is not None and self.runs.batches:
            self.runs.batches[len(self.runs.batches) - 1] = self.runs.last = batches

    def take_runs(self):
        """The runs of the publishes since the last call."""
        cdef Runs runs = self.runs
        self.runs = Runs()
        return runs

    def drop_content(self):
        """Drops a partly received message."""
        self.state = IDLE
        self.method = None
        self.properties = None
        free(self.body)
        self.body = NULL
        self.body_used = self.body_capacity = 0

    @property
    def expects_content(self):
        return self.state != IDLE

    @property
    def pending_bytes(self):
        return self.body_capacity


cdef class Scanner:
    """The receiving half of one connection. `events` receives everything the scanner does not handle itself; see
    Events in scan.pyi."""

    def __init__(self, events, uint32_t frame_max):
        self.events = events
        self.frame_max = frame_max
        self.channels = {}
        self.routes = {}
        self.version = -1
        self.last_number = -1
        self.published = []
        self.acked = []

    def __dealloc__(self):
        free(self.head)

    def add_channel(self, ChannelState channel not None):
        self.channels[channel.number] = channel
        self.last_number = -1

    def remove_channel(self, int number):
        self.channels.pop(number, None)
        self.last_number = -1
        self.last_channel = None

    cdef ChannelState channel_of(self, int number):
        if number != self.last_number:
            self.last_channel = self.channels.get(number)
            self.last_number = number
        return self.last_channel

    cdef int check_version(self) except -1:
        cdef int64_t version = self.events.topology_version
        if version != self.version:
            self.version = version
            self.routes.clear()
            self.last_method = None
        return 0

    def feed(self, const uint8_t[::1] data not None, int64_t now_ms):
        """Returns the number of bytes used. Stops early when on_method or on_message returns True."""
        cdef const uint8_t* start
        cdef const uint8_t* p
        cdef const uint8_t* end
        cdef const uint8_t* payload
        cdef uint32_t size
        cdef int number
        cdef bint stop
        if data.shape[0] == 0:
            return 0
        self.now_ms = now_ms
        self.check_version()
        start = p = &data[0]
        end = p + data.shape[0]
        while end - p >= 7:
            size = get32(p + 3)
            # Compare the payload without its 8 bytes of framing, as RabbitMQ does: some clients (AMQPStorm) fill
            # frame_max with the payload alone, and none of their large messages would be accepted.
            if size > self.frame_max:
                raise ProtocolError(
                    FRAME_ERROR, f"frame of {<uint64_t>size + 8} bytes exceeds frame_max {self.frame_max}")
            if end - p < <Py_ssize_t>size + 8:
                break
            payload = p + 7
            if payload[size] != FRAME_END:
                raise ProtocolError(FRAME_ERROR, "frame does not end with the frame-end octet")
            number = get16(p + 1)
            if p[0] == FRAME_METHOD:
                p = payload + size + 1
                stop = self.on_method_frame(number, payload, size)
            elif p[0] == FRAME_BODY:
                p = payload + size + 1
                stop = self.on_body_frame(number, payload, size)
            elif p[0] == FRAME_HEADER:
                p = payload + size + 1
                stop = self.on_header_frame(number, payload, size)
            elif p[0] == FRAME_HEARTBEAT:
                p = payload + size + 1
                if size != 0:
                    raise ProtocolError(FRAME_ERROR, "heartbeat frame with a payload")
                if number != 0:
                    raise ProtocolError(UNEXPECTED_FRAME, "type 8, all octets = <<>>")
                stop = False
            else:
                raise ProtocolError(FRAME_ERROR, f"unknown frame type {p[0]}")
            if stop:
                break
        return p - start

    cdef bint on_method_frame(self, int number, const uint8_t* p, uint32_t size) except -1:
        cdef uint16_t class_id, method_id
        cdef ChannelState channel
        cdef bint stop
        if size < 4:
            raise ProtocolError(FRAME_ERROR, "method frame without a method")
        class_id = get16(p)
        method_id = get16(p + 2)
        channel = self.channel_of(number)
        if channel is not None:
            if channel.closing:
                if class_id != CLASS_CHANNEL or method_id not in (
                    METHOD_CHANNEL_OPEN, METHOD_CHANNEL_CLOSE, METHOD_CHANNEL_CLOSE_OK
                ):
                    return False        # sent before the client received channel.close
            elif channel.state != IDLE:
                raise out_of_step(channel.state)
            elif class_id == CLASS_BASIC:
                if method_id == METHOD_PUBLISH:
                    return self.on_publish(channel, p, size)
                if method_id == METHOD_ACK and channel.fast_acks:
                    if size != 13:
                        raise ProtocolError(FRAME_ERROR, "basic.ack has the wrong size", class_id, method_id)
                    if channel.tags.ack(get64(p + 4), p[12] & 1) != 0:
                        return self.events.on_unknown_tag(channel, get64(p + 4))
                    if not channel.acked:
                        channel.acked = True
                        self.acked.append(channel)
                    return False
        stop = self.events.on_method(number, class_id, method_id, PyBytes_FromStringAndSize(<const char*>p + 4, size - 4))
        self.check_version()
        return stop

    cdef bint on_publish(self, ChannelState channel, const uint8_t* p, uint32_t size) except -1:
        cdef Py_ssize_t exchange_size, key_size
        cdef bytes method
        if self.last_method is not None and size == self.last_size and memcmp(p, <const char*>self.last_method, size) == 0:
            channel.target = self.last_target
            channel.method = self.last_method
            channel.state = WANTS_HEADER
            return False
        if size < 9:
            raise ProtocolError(FRAME_ERROR, "basic.publish is truncated", CLASS_BASIC, METHOD_PUBLISH)
        exchange_size = p[6]
        if <Py_ssize_t>size < 9 + exchange_size:
            raise ProtocolError(FRAME_ERROR, "basic.publish is truncated", CLASS_BASIC, METHOD_PUBLISH)
        key_size = p[7 + exchange_size]
        if <Py_ssize_t>size != 9 + exchange_size + key_size:
            raise ProtocolError(FRAME_ERROR, "basic.publish has the wrong size", CLASS_BASIC, METHOD_PUBLISH)
        method = PyBytes_FromStringAndSize(<const char*>p, size)
        found = self.routes.get(method)
        if found is None:
            found = self.events.on_route(channel, method[7:7 + exchange_size],
                                         method[8 + exchange_size:8 + exchange_size + key_size], p[size - 1])
            if found is None:
                return False            # the channel is closing; the content frames are ignored
            if len(self.routes) >= ROUTES_MAX:
                self.routes.clear()
            self.routes[method] = found
        channel.target = <Target?>found
        channel.method = method
        channel.state = WANTS_HEADER
        self.last_method = method
        self.last_size = size
        self.last_target = channel.target
        return False

    cdef bint on_header_frame(self, int number, const uint8_t* p, uint32_t size) except -1:
        cdef ChannelState channel = self.channel_of(number)
        cdef uint64_t body_size
        cdef int kind
        if number == 0 or channel is None:
            raise out_of_step(IDLE)
        if channel.closing:
            return False
        if channel.state != WANTS_HEADER:
            raise out_of_step(channel.state)
        if size < 14:
            raise ProtocolError(FRAME_ERROR, "content header is truncated")
        if get16(p + 2) != 0:
            raise out_of_step(WANTS_HEADER)     # a weight: RabbitMQ does not accept this as a content header
        if get16(p) != CLASS_BASIC:
            raise ProtocolError(
                UNEXPECTED_FRAME, f"expected content header for class 60, got one for class {get16(p)} instead",
                CLASS_BASIC, METHOD_PUBLISH)
        body_size = get64(p + 4)
        if body_size > BODY_MAX:
            channel.drop_content()
            return self.events.on_too_large(channel, body_size)
        kind = check_properties(p + 12, p + size)
        if kind == BAD:
            raise ProtocolError(SYNTAX_ERROR, "content header with malformed properties")
        channel.python = kind == NEEDS_DECISION or channel.target.slow or channel.tx
        channel.body_left = body_size
        if body_size == 0:
            return self.on_content(channel, p + 12, size - 12, p, 0)
        # Most bodies arrive whole in the next frame: then only the properties are copied twice.
        channel.properties = PyBytes_FromStringAndSize(<const char*>p + 12, size - 12)
        channel.state = WANTS_BODY
        return False

    cdef bint on_body_frame(self, int number, const uint8_t* p, uint32_t size) except -1:
        cdef ChannelState channel = self.channel_of(number)
        cdef bytes properties
        cdef bint stop
        if number == 0 or channel is None:
            raise out_of_step(IDLE)
        if channel.closing:
            return False
        if channel.state != WANTS_BODY:
            raise out_of_step(channel.state)
        if size > channel.body_left:
            raise ProtocolError(UNEXPECTED_FRAME, "content body is longer than announced in its header")
        properties = channel.properties
        channel.body_left -= size
        if channel.body_left == 0 and channel.body_used == 0:
            return self.on_content(channel, <const uint8_t*><const char*>properties, len(properties), p, size)
        channel.keep_body(p, size)
        if channel.body_left == 0:
            stop = self.on_content(
                channel, <const uint8_t*><const char*>properties, len(properties), channel.body, channel.body_used)
            channel.body_used = 0
            if channel.body_capacity > 65536:
                free(channel.body)
                channel.body = NULL
                channel.body_capacity = 0
            return stop
        return False

    cdef bint on_content(
        self, ChannelState channel, const uint8_t* properties, Py_ssize_t properties_size,
        const uint8_t* body, Py_ssize_t body_size,
    ) except -1:
        cdef bytes method = channel.method
        cdef Py_ssize_t copies
        cdef bint stop
        channel.state = IDLE
        channel.sequence += 1
        channel.messages += 1
        if not channel.published:
            channel.published = True
            self.published.append(channel)
        if channel.python:
            if channel.runs is not None:
                channel.runs.begin(channel.sequence, None)
            stop = self.events.on_message(
                channel, method,
                PyBytes_FromStringAndSize(<const char*>properties, properties_size),
                PyBytes_FromStringAndSize(<const char*>body, body_size))
            channel.method = None
            self.check_version()
            return stop
        self.messages += 1
        self.bytes += body_size
        copies = len(channel.target.owners)
        channel.target.counts.published += 1
        channel.target.counts.routed += copies
        if copies == 0:
            channel.target.counts.dropped += 1
            channel.dropped += 1
        if channel.target.durable:
            channel.touched_disk = True
        if channel.target.writers is None:
            channel.target.open()
        if channel.runs is not None and channel.runs.last is not channel.target.batches:
            channel.runs.begin(channel.sequence, channel.target.batches)
        self.append(channel.target, method, properties, properties_size, body, body_size)
        return False

    cdef int append(
        self, Target target, bytes method, const uint8_t* properties, Py_ssize_t properties_size,
        const uint8_t* body, Py_ssize_t body_size,
    ) except -1:
        cdef const uint8_t* p = <const uint8_t*><const char*>method
        cdef Py_ssize_t exchange_size = p[6]
        cdef Py_ssize_t key_size = p[7 + exchange_size]
        cdef Py_ssize_t need = header_size(15, properties_size) + header_size(13, exchange_size)
        cdef Trace traces[TRACES_MAX]
        cdef int traced = find_traces(properties, properties + properties_size, traces)
        cdef BatchWriter writer
        cdef uint8_t* after
        cdef void* grown
        cdef Py_ssize_t i
        for i in range(traced):
            need += header_size(traces[i].name_size, traces[i].value_size)
        if need > self.head_capacity:
            grown = realloc(self.head, need + 512)
            if grown == NULL:
                raise MemoryError
            self.head = <uint8_t*>grown
            self.head_capacity = need + 512
        after = put_header(
            self.head, <const uint8_t*>PROPERTIES_NAME, PROPERTIES_NAME_SIZE, properties, properties_size
        )
        after = put_header(after, <const uint8_t*>EXCHANGE_NAME, EXCHANGE_NAME_SIZE, p + 7, exchange_size)
        for i in range(traced):
            after = put_header(
                after, traces[i].name, traces[i].name_size, traces[i].value, traces[i].value_size
            )
        for i in range(len(target.writers)):
            writer = <BatchWriter>target.writers[i]
            if writer._used > SEAL_SIZE:
                target.batches[i].seal()
            if writer.append_raw(
                p + 8 + exchange_size, key_size, body, body_size, self.head, after - self.head, 2 + traced, self.now_ms
            ) != APPENDED:
                raise BatchTooLarge(body_size, MESSAGE_BYTES_MAX)
        return 0

    def take_published(self):
        """The channels with publishes since the last call."""
        cdef ChannelState channel
        cdef list out = self.published
        if out:
            self.published = []
            for channel in out:
                channel.published = False
        return out

    def take_acked(self):
        """The channels with acks since the last call."""
        cdef ChannelState channel
        cdef list out = self.acked
        if out:
            self.acked = []
            for channel in out:
                channel.acked = False
        return out
