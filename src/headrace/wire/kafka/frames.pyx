# cython: boundscheck=False, wraparound=False
"""Splits a byte stream into requests. Does no I/O: a connection asks for a buffer to read into and reports the bytes.

Bytes are read into one scratch buffer that all connections share, and an incomplete request moves to a buffer of its
own, so an idle connection holds no memory. A size is checked before memory is allocated, and a buffer grows with the
bytes that have arrived, so four bytes cannot claim 100 MB. For large requests, copying is the main cost: after a large
request only the beginning of the next one is read into the scratch buffer, and the rest straight into its own buffer.

New buffers are not zeroed: bytes that have not arrived are never read, in new and in reused buffers.
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
FIRST_BYTES = C_FIRST_BYTES  # a larger request gets more memory only after this many bytes have arrived
PEEK_BYTES = C_PEEK_BYTES  # read into the scratch buffer after a large request
EAGER_BYTES_MAX = C_EAGER_BYTES_MAX  # up to this size the whole buffer is then allocated at once, above it by doubling
POOL_BYTES_MAX = 64 * 1024 * 1024


cdef inline Py_ssize_t size_at(const uint8_t* p) noexcept nogil:
    return <int32_t> ((<uint32_t> p[0] << 24) | (<uint32_t> p[1] << 16) | (<uint32_t> p[2] << 8) | p[3])


cdef class BufferPool:
    """Keeps the buffers of large requests for later ones: touching new memory costs more than the copy into it.

    Buffers that were not needed between two calls of trim are released, so those of a burst do not stay forever.
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
        """A free buffer, or None: allocates no memory."""
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

    cpdef put_back(self, bytearray buffer):
        """Return a buffer. No memoryview of it may exist any more."""
        cdef Py_ssize_t size = len(buffer)
        if size >= C_FIRST_BYTES and self._bytes + size <= self._bytes_max:
            self._free.append(buffer)
            self._bytes += size

    def trim(self):
        """Release unused buffers; called every few seconds."""
        self.release(self._unused)
        self._unused = self._bytes

    def release(self, Py_ssize_t wanted_bytes):
        """Release about this many bytes; returns how many it were."""
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
        """Whether a request has arrived in part."""
        return self._frame is not None or self._head_bytes > 0

    cdef bint is_inside(self) noexcept:
        """Whether a buffer is held for an incomplete request."""
        return self._frame is not None

    @property
    def held_bytes(self):
        return len(self._frame) if self._frame is not None else 0

    cpdef object target(self):
        """The buffer for the next read."""
        if self._frame is None:
            return self._scratch_view[:C_PEEK_BYTES] if self._last_large else self._scratch_view
        return memoryview(self._frame)[self._filled : min(self._size, len(self._frame))]

    cpdef list arrived(self, Py_ssize_t count):
        """To be called when count bytes were written to target(). Returns the complete requests, in order."""
        cdef Py_ssize_t room
        if self._frame is not None:
            room = min(self._size, len(self._frame)) - self._filled
        else:
            room = len(self._scratch)
        if count < 0 or count > room:
            raise ValueError(f"{count} bytes do not fit into a target of {room}")
        if self._frame is None:
            return self._cut(<const uint8_t*> PyByteArray_AS_STRING(self._scratch), count)
        self._filled += count
        return self._finish_or_grow()

    def feed(self, data):
        """target() and arrived() for bytes that were received in another buffer."""
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
            self._pool.put_back(frame)
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
                raise MalformedRequest(f"invalid request size: {size:,} bytes")
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
            # Trust the announced size if the client just sent a similar request and a free buffer covers it.
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
