# One connection's requests and answers, as C sees them; see pipe.pyx.
cimport cython

from headrace.wire.kafka.frames cimport FrameReader


@cython.final
cdef class Request:
    cdef public object connection, buffer, client_id, api, pieces
    cdef public Py_ssize_t size, position
    cdef public int version
    cdef public long long correlation_id
    cdef public bint answered

    cpdef answer(self, pieces)


@cython.final
cdef class RequestPipelines:
    cdef object loop
    cdef object flow
    cdef object users
    cdef object gate
    cdef dict handlers
    cdef list ready                 # with answers to write
    cdef Py_ssize_t unseen_bytes    # not told to the flow yet

    cdef int plan_flush(self, RequestPipeline pipe) except -1
    cdef int received(self, RequestPipeline pipe, Py_ssize_t count) except -1


cdef class RequestPipeline:
    cdef readonly object _listener
    cdef RequestPipelines _pipes
    cdef readonly FrameReader _frames
    cdef public object _transport
    cdef public object _files               # FileSending, once a part of a file was sent
    cdef public bint _is_narrow             # large requests are not taken yet
    cdef readonly list _waiting             # requests that were started, up to the first that is not answered and sent
    cdef readonly Py_ssize_t _waiting_bytes
    cdef readonly Py_ssize_t _answer_bytes
    cdef object _not_started
    cdef readonly set _holds
    cdef bint _flush_planned
    cdef readonly bint _reading_paused
    cdef bint _writing_paused
    cdef public object _throttled
    cdef public bint _is_over               # nothing more is started
    cdef public bint is_closed
    cdef public object login
    cdef public long long admitted_at       # the version of the users that let it in
    cdef bint is_publisher                  # it has sent a Produce request
    cdef bint is_checking                   # one of its requests is with a thread: those behind it wait
    cdef object last_topic, last_stream     # that it was for
    cdef public str client_id
    cdef str _known_client                  # of the request before
    cdef readonly long long requests

    cdef Request request_of(self, bytearray buffer, Py_ssize_t size)
    cdef int start(self, Request request) except -1
    cdef int handle(self, Request request) except -1
    cdef int start_more(self) except -1
    cdef bint is_full(self) except -1
    cdef int weigh(self, Py_ssize_t change) except -1
    cdef int answer_ready(self, pieces) except -1
    cdef int flush(self) except -1
    cdef int pause_or_resume(self) except -1
