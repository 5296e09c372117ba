# One connection's requests and responses; see request_pipeline.pyx.
cimport cython

from headrace.wire.kafka.frames cimport BufferPool, FrameReader


@cython.final
cdef class Request:
    cdef public object connection, buffer, client_id, api, pieces
    cdef public Py_ssize_t size, position
    cdef public int version
    cdef public long long correlation_id
    cdef public bint answered

    cpdef answer(self, pieces)


@cython.final
cdef class PipelineGroup:
    cdef readonly object context            # KafkaContext, the first argument of each handler
    cdef object loop, flow, users, gate
    cdef object answer_in_task, take_raw_token
    cdef dict handlers
    cdef BufferPool pool
    cdef bytearray scratch
    cdef list ready                         # pipelines with responses to write
    cdef Py_ssize_t unseen_bytes            # received, not reported to the flow yet
    cdef readonly Py_ssize_t heavy          # connections with large requests that wait for the disk

    cdef int plan_flush(self, RequestPipeline pipeline) except -1
    cdef int received(self, RequestPipeline pipeline, Py_ssize_t count) except -1


cdef class RequestPipeline:
    cdef PipelineGroup _group
    cdef readonly FrameReader _frames
    cdef public object _transport
    cdef public object _files               # FileSending, once a file range was sent
    cdef public bint _is_narrow             # large requests are not accepted yet
    cdef readonly list _waiting             # started requests, from the first that is not answered and sent
    cdef readonly Py_ssize_t _waiting_bytes
    cdef readonly Py_ssize_t _answer_bytes  # of responses that are ready, but not sent
    cdef object _not_started
    cdef readonly set _holds                # reasons not to read the socket
    cdef bint _flush_planned
    cdef readonly bint _reading_paused
    cdef bint _writing_paused
    cdef public object _throttled           # timer
    cdef public bint _is_over               # no more requests are started
    cdef public bint is_closed
    cdef public object login                # gate.Stage
    cdef public long long admitted_at       # the version of the users when it was admitted
    cdef bint is_publisher                  # it has sent a Produce request
    cdef bint is_checking                   # a thread checks one of its requests: those behind it wait
    cdef object last_topic, last_stream     # of its last Produce request
    cdef public str client_id
    cdef str _known_client                  # client id of the last request
    cdef readonly long long requests
    cdef readonly long long received_bytes, sent_bytes, writes

    cdef Request request_of(self, bytearray buffer, Py_ssize_t size)
    cdef int start(self, Request request) except -1
    cdef int handle(self, Request request) except -1
    cdef int start_more(self) except -1
    cdef bint is_full(self) except -1
    cdef int weigh(self, Py_ssize_t change) except -1
    cdef int answer_ready(self, pieces) except -1
    cdef int flush(self) except -1
    cdef int pause_or_resume(self) except -1
