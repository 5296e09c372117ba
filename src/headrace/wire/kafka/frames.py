"""Cuts a byte stream into requests. No sockets here: a connection asks where to read to and says what came.

Bytes are read into one scratch buffer that all connections share, and a request that is not whole yet
moves to a buffer of its own: an idle connection holds no memory. A size is checked before anything is
allocated, and a buffer grows with what has really arrived, so that four bytes can not claim 100 MB. Where requests are
large, copying is what costs: behind one, only the beginning of the next is read to the scratch buffer, and the rest to
where it stays.
"""

from headrace.errors import MalformedRequest

SIZE_BYTES = 4
REQUEST_BYTES_MAX = 100 * 1024 * 1024  # Kafka's socket.request.max.bytes
SCRATCH_BYTES = 256 * 1024
FIRST_BYTES = 256 * 1024  # a larger request has to deliver this much before it gets more
PEEK_BYTES = 4 * 1024  # of what follows a large request
EAGER_BYTES_MAX = 16 * 1024 * 1024  # up to this size the rest is then given at once, above it by doubling
POOL_BYTES_MAX = 64 * 1024 * 1024


class BufferPool:
    """Keeps buffers of large requests for the next one: fresh memory costs more than the copy into it.

    What was not needed between two calls of trim is let go: a burst's buffers do not stay for ever.
    """

    def __init__(self, bytes_max: int = POOL_BYTES_MAX) -> None:
        self._free: list[bytearray] = []
        self._bytes = 0
        self._bytes_max = bytes_max
        self._unused = 0  # the least that was free since the last trim

    @property
    def free_bytes(self) -> int:
        return self._bytes

    def take(self, size: int) -> bytearray:
        return self.take_free(size) or bytearray(size)

    def take_free(self, size: int) -> bytearray | None:
        """Only if there is one: it takes no new memory."""
        for index, buffer in enumerate(self._free):
            if size <= len(buffer) <= 4 * size:
                del self._free[index]
                self._bytes -= len(buffer)
                self._unused = min(self._unused, self._bytes)
                return buffer
        return None

    def give(self, buffer: bytearray) -> None:
        """The caller holds no view on it any more, nor does anybody it handed one to."""
        if len(buffer) >= FIRST_BYTES and self._bytes + len(buffer) <= self._bytes_max:
            self._free.append(buffer)
            self._bytes += len(buffer)

    def trim(self) -> None:
        """Called every few seconds."""
        self.release(self._unused)
        self._unused = self._bytes

    def release(self, wanted_bytes: int) -> int:
        """Lets go of about that much; how much it really was."""
        released = 0
        while self._free and released < wanted_bytes:
            released += len(self._free.pop())
        self._bytes -= released
        self._unused = min(self._unused, self._bytes)
        return released


class FrameReader:
    """The requests of one connection, as (buffer, size) pairs; the buffer may be longer than the request."""

    def __init__(
        self, pool: BufferPool, scratch: bytearray, *, request_bytes_max: int = REQUEST_BYTES_MAX
    ) -> None:
        self._pool = pool
        self._scratch = memoryview(scratch)
        self._max = request_bytes_max
        self._head = b""  # the first bytes of a size that is not whole
        self._frame: bytearray | None = None
        self._size = 0
        self._filled = 0
        self._last_large = 0  # bytes of the request before, if it was large

    @property
    def waiting(self) -> bool:
        """Whether half a request has arrived."""
        return self._frame is not None or bool(self._head)

    @property
    def held_bytes(self) -> int:
        return len(self._frame) if self._frame is not None else 0

    def target(self) -> memoryview:
        """Where the next bytes belong."""
        if self._frame is None:
            return self._scratch[:PEEK_BYTES] if self._last_large else self._scratch
        return memoryview(self._frame)[self._filled : min(self._size, len(self._frame))]

    def arrived(self, count: int) -> list[tuple[bytearray, int]]:
        """count bytes were written to target(). The whole requests, in order."""
        if self._frame is not None:
            self._filled += count
            return self._finish_or_grow(self._frame)
        return self._cut(self._scratch[:count])

    def feed(self, data: bytes) -> list[tuple[bytearray, int]]:
        """As target() and arrived(), for bytes that came another way."""
        requests = []
        rest = memoryview(data)
        while rest:
            target = self.target()
            step = min(len(target), len(rest))
            target[:step] = rest[:step]
            requests += self.arrived(step)
            rest = rest[step:]
        return requests

    def _finish_or_grow(self, frame: bytearray) -> list[tuple[bytearray, int]]:
        if self._filled == self._size:
            self._frame = None
            self._last_large = self._size if self._size >= FIRST_BYTES else 0
            return [(frame, self._size)]
        if self._filled == len(frame):
            wanted = self._size if self._size <= EAGER_BYTES_MAX else min(self._size, 2 * len(frame))
            larger = self._pool.take(wanted)
            larger[: len(frame)] = frame
            self._pool.give(frame)
            self._frame = larger
        return []

    def _cut(self, data: memoryview) -> list[tuple[bytearray, int]]:
        if self._head:
            data = memoryview(self._head + data)
            self._head = b""
        requests: list[tuple[bytearray, int]] = []
        position, end = 0, len(data)
        while end - position >= SIZE_BYTES:
            size = int.from_bytes(data[position : position + SIZE_BYTES], "big", signed=True)
            if not 0 < size <= self._max:
                raise MalformedRequest(f"a request of {size:,} bytes")
            start = position + SIZE_BYTES
            if end - start < size:
                self._begin(size, data[start:end])
                return requests
            requests.append((bytearray(data[start : start + size]), size))
            self._last_large = 0
            position = start + size
        self._head = bytes(data[position:end])
        return requests

    def _begin(self, size: int, data: memoryview) -> None:
        if size < FIRST_BYTES:
            self._frame = bytearray(size)
        else:
            # Who has just sent as much is believed, as far as it takes no new memory.
            free = self._pool.take_free(size) if size <= 2 * self._last_large else None
            self._frame = free or self._pool.take(FIRST_BYTES)
        self._frame[: len(data)] = data
        self._size, self._filled = size, len(data)
        if self._filled == len(self._frame):
            self._finish_or_grow(self._frame)
