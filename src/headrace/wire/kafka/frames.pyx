# cython: boundscheck=False, wraparound=False
"""Cuts a byte stream into requests. No sockets here: a connection asks where to read to and says what came.

Bytes are read into one scratch buffer that all connections share, and a request that is not whole yet
moves to a buffer of its own: an idle connection holds no memory. A size is checked before anything is
allocated, and a buffer grows with what has really arrived, so that four bytes can not claim 100 MB. Where requests are
large, copying is what costs: behind one, only the beginning of the next is read to the scratch buffer, and the rest to
where it stays.

New buffers are not filled with zeros: nobody sees of one what has not arrived, as of those that are used again.
"""

from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize, PyByteArray_GET_SIZE
from libc.stdint cimport int32_t, uint8_t, uint32_t
from libc.string cimport memcpy

from headrace.errors import MalformedRequest

cdef enum:
    C_SIZE_BYTES = 4
    C_FIRST_BYTES = 256 * 1024
    C_PEEK_BYTES = 4 * 1024
    C_EAGER_BYTES_MAX = 16 * 1024 * 1024

SIZE_BYTES = C_SIZE_BYTES
REQUEST_BYTES_MAX = 100 * 1024 * 1024  # Kafka's socket.request.max.bytes
SCRATCH_BYTES = 256 * 1024
FIRST_BYTES = C_FIRST_BYTES  # a larger request has to deliver this much before it gets more
PEEK_BYTES = C_PEEK_BYTES  # of what follows a large request
EAGER_BYTES_MAX = C_EAGER_BYTES_MAX  # up to this size the rest is then given at once, above it by doubling
POOL_BYTES_MAX = 64 * 1024 * 1024


cdef inline Py_ssize_t size_at(const uint8_t* p) noexcept nogil:
    return <int32_t> ((<uint32_t> p[0] << 24) | (<uint32_t> p[1] << 16) | (<uint32_t> p[2] << 8) | p[3])


cdef class BufferPool:
    """Keeps buffers of large requests for the next one: fresh memory costs more than the copy into it.

    What was not needed between two calls of trim is let go: a burst's buffers do not stay for ever.
    """

    def __cinit__(self, Py_ssize_t bytes_max=POOL_BYTES_MAX):
        self._free = []
        self._bytes = 0
        self._bytes_max = bytes_max
        self._unused = 0

    @property
    def free_bytes(self):
        return self._bytes

    cpdef bytearray take(self, Py_ssize_t size):
        cdef bytearray buffer = self.take_free(size)
        return buffer if buffer is not None else PyByteArray_FromStringAndSize(NULL, size)

    cpdef bytearray take_free(self, Py_ssize_t size):
        """Only if there is one: it takes no new memory."""
        cdef bytearray buffer
        cdef Py_ssize_t index
        for index in range(len(self._free)):
            buffer = self._free[index]
            if size <= PyByteArray_GET_SIZE(buffer) <= 4 * size:
                del self._free[index]
                self._bytes -= PyByteArray_GET_SIZE(buffer)
                self._unused = min(self._unused, self._bytes)
                return buffer
        return None

    cpdef give(self, bytearray buffer):
        """The caller holds no view on it any more, nor does anybody it handed one to."""
        cdef Py_ssize_t size = len(buffer)
        if size >= C_FIRST_BYTES and self._bytes + size <= self._bytes_max:
            self._free.append(buffer)
            self._bytes += size

    def trim(self):
        """Called every few seconds."""
        self.release(self._unused)
        self._unused = self._bytes

    def release(self, Py_ssize_t wanted_bytes):
        """Lets go of about that much; how much it really was."""
        cdef Py_ssize_t released = 0
        while self._free and released < wanted_bytes:
            released += len(self._free.pop())
        self._bytes -= released
        self._unused = min(self._unused, self._bytes)
        return released


cdef class FrameReader:
    """The requests of one connection, as (buffer, size) pairs; the buffer may be longer than the request."""

    def __cinit__(
        self, BufferPool pool not None, bytearray scratch not None, *, Py_ssize_t request_bytes_max=REQUEST_BYTES_MAX
    ):
        self._pool = pool
        self._scratch = scratch
        self._scratch_view = memoryview(scratch)
        self._max = request_bytes_max

    @property
    def waiting(self):
        """Whether half a request has arrived."""
        return self._frame is not None or self._head_bytes > 0

    cdef bint is_inside(self) noexcept:
        """Whether a request has begun, and a buffer is held for it."""
        return self._frame is not None

    @property
    def held_bytes(self):
        return len(self._frame) if self._frame is not None else 0

    cpdef object target(self):
        """Where the next bytes belong."""
        if self._frame is None:
            return self._scratch_view[:C_PEEK_BYTES] if self._last_large else self._scratch_view
        return memoryview(self._frame)[self._filled : min(self._size, len(self._frame))]

    cpdef list arrived(self, Py_ssize_t count):
        """count bytes were written to target(). The whole requests, in order."""
        cdef Py_ssize_t room
        if self._frame is not None:
            room = min(self._size, len(self._frame)) - self._filled
        else:
            room = len(self._scratch)
        if count < 0 or count > room:
            raise ValueError(f"{count} bytes can not have come where {room} fit")
        if self._frame is None:
            return self._cut(<const uint8_t*> PyByteArray_AS_STRING(self._scratch), count)
        self._filled += count
        return self._finish_or_grow()

    def feed(self, data):
        """As target() and arrived(), for bytes that came another way."""
        cdef list requests = []
        rest = memoryview(data)
        while rest:
            target = self.target()
            step = min(len(target), len(rest))
            target[:step] = rest[:step]
            requests += self.arrived(step)
            rest = rest[step:]
        return requests

    cdef list _finish_or_grow(self):
        cdef bytearray frame = self._frame, larger
        cdef Py_ssize_t room = len(frame)
        if self._filled == self._size:
            self._frame = None
            self._last_large = self._size if self._size >= C_FIRST_BYTES else 0
            return [(frame, self._size)]
        if self._filled == room:
            larger = self._pool.take(self._size if self._size <= C_EAGER_BYTES_MAX else min(self._size, 2 * room))
            assert room < len(larger)
            memcpy(PyByteArray_AS_STRING(larger), PyByteArray_AS_STRING(frame), room)
            self._pool.give(frame)
            self._frame = larger
        return []

    cdef list _cut(self, const uint8_t* data, Py_ssize_t end):
        cdef list requests = []
        cdef Py_ssize_t position = 0, size
        while position < end:
            if self._head_bytes == 0 and end - position >= C_SIZE_BYTES:
                size = size_at(data + position)
                position += C_SIZE_BYTES
            else:
                while self._head_bytes < C_SIZE_BYTES and position < end:
                    self._head[self._head_bytes] = data[position]
                    self._head_bytes += 1
                    position += 1
                if self._head_bytes < C_SIZE_BYTES:
                    break
                size = size_at(self._head)
                self._head_bytes = 0
            if not 0 < size <= self._max:
                raise MalformedRequest(f"a request of {size:,} bytes")
            if end - position < size:
                self._begin(size, data + position, end - position)
                break
            requests.append((PyByteArray_FromStringAndSize(<const char*> data + position, size), size))
            self._last_large = 0
            position += size
        return requests

    cdef int _begin(self, Py_ssize_t size, const uint8_t* data, Py_ssize_t given) except -1:
        cdef bytearray frame = None
        if size < C_FIRST_BYTES:
            frame = PyByteArray_FromStringAndSize(NULL, size)
        else:
            # Who has just sent as much is believed, as far as it takes no new memory.
            if size <= 2 * self._last_large:
                frame = self._pool.take_free(size)
            if frame is None:
                frame = self._pool.take(max(C_FIRST_BYTES, given))
        assert given <= len(frame)
        memcpy(PyByteArray_AS_STRING(frame), data, given)
        self._frame, self._size, self._filled = frame, size, given
        if given == len(frame):
            self._finish_or_grow()
        return 0
