# cython: boundscheck=False, wraparound=False, nonecheck=True
"""The hot half of a connection: requests in, responses out, in the order of the requests.

Requests start as they arrive and may complete in any order; a response waits until those before it are sent. Responses
that become ready in one event-loop iteration leave in one gathering write.

RequestPipeline is the base of connection.Connection, and of nothing else. It is a base class because the event loop
calls get_buffer and buffer_updated on the protocol object for every read, and a forwarding method in Python would cost
more than the rest of the call. The contract between the two:

- Connection provides, and RequestPipeline calls on self: abort(error), _send_files(pieces) for responses with file
  ranges, and _allow_large_requests() after each read while _is_narrow. Handlers also call throttle(wait_ms) and end().
- RequestPipeline provides, and Connection calls: _limit_requests, _forget_requests, _flush, _pause_or_resume.
- Connection sets _transport, _files, _is_narrow, _throttled, _is_over, is_closed and adds reasons to _holds. The other
  fields of the .pxd belong to RequestPipeline; Connection only reads them.
"""

from collections import deque

from libc.string cimport memcmp

from headrace.wire.kafka.frames cimport FrameReader
from headrace.wire.kafka.primitives cimport Reader, reader_of

from headrace.broker.streams.partition import FileRange
from headrace.listeners.kafka.auth.gate import LoginStage
from headrace.errors import MalformedRequest
from headrace.wire.kafka.apis import VERSIONS, Api, has_header_tags
from headrace.wire.kafka.codec import encode
from headrace.wire.kafka.frames import SCRATCH_BYTES
from headrace.wire.kafka.schema import response_struct


cdef extern from "Python.h":
    const char* PyUnicode_AsUTF8AndSize(object text, Py_ssize_t* size) except NULL


cdef enum:
    REQUESTS_MAX = 128                      # unanswered requests of one connection; with more it is not read
    REQUEST_BYTES_WAITING_MAX = 16 << 20    # of one connection
    FAIR_BYTES_MIN = 1 << 20                # of one connection, however many connections there are
    JOIN_BYTES_MAX = 16 << 10               # up to this size in total, copying responses is cheaper than gathering them
    HEAVY_BYTES = 64 << 10                  # a connection with less waiting does not count in the fair share
    ANSWER_BYTES_AHEAD = 1 << 20            # ready, not written: with more, no request is started
    COLD_REQUEST_BYTES_MAX = 8 << 20        # of every API but Produce
    UNSEEN_BYTES_MAX = 64 << 10             # of all connections: small reads are reported to the flow together
    KEYS = 128

LISTENER_BYTES_WAITING_MAX = 64 << 20  # of all connections: more would only wait for the disk, in newly touched memory

cdef object RAW_TOKEN = LoginStage.RAW_TOKEN
cdef object PRODUCE = Api.PRODUCE
cdef object API_VERSIONS = Api.API_VERSIONS


cdef struct Offer:
    int lowest
    int highest
    int flexible_from


cdef Offer[KEYS] offers
cdef list apis = [None] * KEYS      # None: not offered


def _fill_tables():
    for api, versions in VERSIONS.items():
        assert 0 <= api < KEYS
        apis[api] = api
        offers[<int> api] = Offer(versions.lowest, versions.highest, versions.flexible_from)


_fill_tables()


cdef class Request:
    """One request and its response. buffer[position:size] is the body."""

    @property
    def body(self):
        return memoryview(self.buffer)[: self.size]

    cpdef answer(self, pieces):
        """Send the whole response. Empty: there is none (Produce with acks=0)."""
        assert not self.answered, "a request is answered once"
        self.pieces = pieces
        self.answered = True
        (<RequestPipeline?> self.connection).answer_ready(pieces)

    def reply(self, dict values not None):
        """Send the response with these fields."""
        tagged = has_header_tags(self.api, self.version)
        self.answer([encode(response_struct(self.api, self.version), values, self.correlation_id, tagged)])

    def fail(self, error):
        """Close the connection: the response has no place for this error."""
        self.connection.abort(error)


cdef class PipelineGroup:
    """State that the connections of one listener share: handlers, buffers, and work done for all of them at once."""

    def __cinit__(self, context, users, dict handlers not None, answer_in_task, take_raw_token):
        self.context = context
        self.loop = context.loop
        self.flow = context.flow
        self.gate = context.gate
        self.pool = context.pool
        self.users = users
        self.handlers = handlers
        self.answer_in_task = answer_in_task
        self.take_raw_token = take_raw_token
        self.scratch = bytearray(SCRATCH_BYTES)
        self.ready = []

    cdef int plan_flush(self, RequestPipeline pipeline) except -1:
        """Flush in the next event-loop iteration, so that all responses that are ready by then leave together."""
        self.ready.append(pipeline)
        if len(self.ready) == 1:
            self.loop.call_soon(self._flush)
        return 0

    def _flush(self):
        cdef list ready = self.ready
        cdef RequestPipeline pipeline
        self.ready = []
        for pipeline in ready:
            try:
                pipeline.flush()
            except Exception as error:  # a bug in one connection must not keep the responses of the others
                self.loop.call_exception_handler({"message": "cannot write Kafka responses", "exception": error})

    cdef int received(self, RequestPipeline pipeline, Py_ssize_t count) except -1:
        """Report received bytes to the flow: at once for a connection that is sending a large request."""
        self.unseen_bytes += count
        if self.unseen_bytes >= UNSEEN_BYTES_MAX or pipeline._frames.is_inside():
            count, self.unseen_bytes = self.unseen_bytes, 0
            self.flow.received(pipeline, count)
        return 0


cdef class RequestPipeline:
    """The requests and responses of one connection; see the module's docstring for the contract with Connection."""

    def __cinit__(self, PipelineGroup group not None, *others):
        self._group = group
        self._frames = FrameReader(group.pool, group.scratch)
        self._waiting = []
        self._not_started = deque()
        self._holds = set()
        self.login = LoginStage.NONE
        self.admitted_at = -1
        self.client_id = self._known_client = ""

    # Called by the event loop.

    def get_buffer(self, sizehint):
        return self._frames.target()

    def buffer_updated(self, Py_ssize_t count):
        cdef bytearray buffer
        cdef Py_ssize_t size
        cdef Request request
        self.received_bytes += count
        try:
            for buffer, size in self._frames.arrived(count):
                if self.login is RAW_TOKEN:
                    self._group.take_raw_token(self._group.context, self, bytes(memoryview(buffer)[:size]))
                    continue
                request = self.request_of(buffer, size)
                if self._not_started or self.is_full():
                    self._not_started.append(request)  # bounded by one read: the next read is paused
                else:
                    self.start(request)
            if self._is_narrow:
                self._allow_large_requests()
            self.pause_or_resume()
            self._group.received(self, count)
        except MalformedRequest as error:
            self.abort(error)

    def pause_writing(self):
        """The client does not read its responses: start no more requests."""
        self._writing_paused = True
        self.pause_or_resume()

    def resume_writing(self):
        self._writing_paused = False
        self.start_more()
        self.pause_or_resume()

    # Called by Connection.

    def _limit_requests(self, Py_ssize_t bytes_max):
        """Accept requests of at most this size from now on. Drops a partial request."""
        self._frames = FrameReader(self._group.pool, self._group.scratch, request_bytes_max=bytes_max)

    def _forget_requests(self):
        self.weigh(-self._waiting_bytes)
        self._waiting.clear()
        self._not_started.clear()

    def _flush(self):
        self.flush()

    def _pause_or_resume(self):
        self.pause_or_resume()

    # Requests.

    cdef Request request_of(self, bytearray buffer, Py_ssize_t size):
        cdef Reader reader = reader_of(buffer, 0, size)
        cdef Request request = Request.__new__(Request)
        cdef int key = <int> reader.int16()
        cdef int version = <int> reader.int16()
        cdef Py_ssize_t client_at, client_bytes, known_bytes = 0
        cdef const char* known
        cdef Offer offer
        request.connection = self
        request.buffer = buffer
        request.size = size
        request.version = version
        request.correlation_id = reader.int32()
        client_at = reader.position
        client_bytes = reader.length(False, False, True)
        known = PyUnicode_AsUTF8AndSize(self._known_client, &known_bytes)
        if client_bytes < 0:
            request.client_id = ""
        elif client_bytes == known_bytes and memcmp(reader.data + reader.position, known, known_bytes) == 0:
            request.client_id = self._known_client
            reader.position += client_bytes
        else:
            reader.position = client_at
            request.client_id = self._known_client = reader.string(False, True)
        request.pieces = ()
        if not 0 <= key < KEYS or apis[key] is None:
            raise MalformedRequest(f"unknown API key {key}")
        offer = offers[key]
        request.api = api = apis[key]
        if not offer.lowest <= version <= offer.highest and api is not API_VERSIONS:
            raise MalformedRequest(f"{api.name} version {version} is not supported")
        if size > COLD_REQUEST_BYTES_MAX and api is not PRODUCE:
            raise MalformedRequest(f"{api.name} request of {size:,} bytes is too large")
        if offer.flexible_from <= version <= offer.highest:
            reader.skip_tags()
        request.position = reader.position
        return request

    cdef int start(self, Request request) except -1:
        if self._is_over:
            return 0
        self.requests += 1
        self.client_id = request.client_id
        self._waiting.append(request)
        self.weigh(request.size)
        self.handle(request)
        return 0

    cdef int handle(self, Request request) except -1:
        cdef PipelineGroup group = self._group
        if self.admitted_at != <long long> group.users.version and not group.gate.admits(request):
            return 0
        try:
            handler = group.handlers.get(request.api)
            if handler is not None:
                handler(group.context, request)
            else:
                group.answer_in_task(group.context, request)
        except Exception as error:  # one bad request must not stop the others
            request.fail(error)
        return 0

    cdef int start_more(self) except -1:
        while self._not_started and not self.is_full() and not self.is_closed:
            self.start(self._not_started.popleft())
        return 0

    cdef bint is_full(self) except -1:
        """Whether no more requests are started: with unread responses, a few small requests could use up the memory."""
        if self._writing_paused or self._answer_bytes >= ANSWER_BYTES_AHEAD or len(self._waiting) >= REQUESTS_MAX:
            return True
        if self.is_checking:
            return True
        if self._files is not None and self._files.unsent_bytes >= ANSWER_BYTES_AHEAD:
            return True
        if self._waiting_bytes < FAIR_BYTES_MIN:
            return False
        # This connection's fair share of the bytes that may wait for the disk.
        cdef Py_ssize_t fair = LISTENER_BYTES_WAITING_MAX // max(<Py_ssize_t> 1, self._group.heavy)
        return self._waiting_bytes >= min(REQUEST_BYTES_WAITING_MAX, fair)

    cdef int weigh(self, Py_ssize_t change) except -1:
        """Count waiting bytes, and whether this connection takes part in the fair share."""
        cdef bint was_heavy = self._waiting_bytes >= HEAVY_BYTES
        self._waiting_bytes += change
        cdef bint is_heavy = self._waiting_bytes >= HEAVY_BYTES
        if is_heavy != was_heavy:
            self._group.heavy += 1 if is_heavy else -1
        return 0

    # Responses.

    cdef int answer_ready(self, pieces) except -1:
        for piece in pieces:
            self._answer_bytes += len(piece)
        if not self._flush_planned and not self.is_closed:
            self._flush_planned = True
            self._group.plan_flush(self)
        return 0

    cdef int flush(self) except -1:
        cdef list waiting = self._waiting
        cdef list pieces = []
        cdef Py_ssize_t total = 0, freed = 0, done = 0
        cdef Request request
        cdef bint is_sending = self._files is not None and self._files.unsent_bytes > 0
        cdef bint has_files = is_sending
        self._flush_planned = False
        while done < len(waiting):
            request = waiting[done]
            if not request.answered:
                break
            done += 1
            freed += request.size
            for piece in request.pieces:
                total += len(piece)
                pieces.append(piece)
                if type(piece) is FileRange:
                    has_files = True
        if done:
            del waiting[:done]
        self.weigh(-freed)
        self._answer_bytes -= total
        if self.is_closed:
            return 0
        if pieces:
            self.sent_bytes += total
            self.writes += 1
        if has_files:
            if pieces:
                self._send_files(pieces)
                is_sending = self._files.unsent_bytes > 0
                if self.is_closed:
                    return 0
        elif len(pieces) == 1:
            self._transport.write(pieces[0])
        elif total > JOIN_BYTES_MAX:
            self._transport.writelines(pieces)
        elif pieces:
            self._transport.write(b"".join(pieces))
        if self._is_over and not waiting and not is_sending:
            self._transport.close()
            return 0
        self.start_more()
        self.pause_or_resume()
        return 0

    cdef int pause_or_resume(self) except -1:
        cdef bint is_full = (
            self.is_full() or self._throttled is not None or len(self._holds) > 0 or len(self._not_started) > 0
        )
        if is_full == self._reading_paused or self.is_closed:
            return 0
        self._reading_paused = is_full
        if is_full:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()
        return 0
