# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Builds a batch from many records: one pass, one buffer, no Python object per record.

Used by producers of all kinds: the clients, the wire kernels and the log's own state batches.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_FromStringAndSize
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_CheckExact, PyBytes_GET_SIZE
from libc.stdint cimport INT32_MAX, int16_t, int32_t, int64_t, uint8_t, uint32_t
from libc.stdlib cimport free, malloc, realloc
from libc.string cimport memcpy

from headrace.record.batch_layout cimport (
    ATTRIBUTES_AT, BASE_OFFSET_AT, BASE_SEQUENCE_AT, BASE_TIMESTAMP_AT, CODEC_LAST, CONTROL_BIT, COUNT_AT, CRC_AT,
    HEADER_SIZE, LAST_OFFSET_DELTA_AT, LEADER_EPOCH_AT, LENGTH_AT, MAGIC_AT, MAX_TIMESTAMP_AT, PREFIX_SIZE,
    PRODUCER_EPOCH_AT, PRODUCER_ID_AT, TRANSACTIONAL_BIT,
)
from headrace.record.batch.crc32c cimport crc32c_of
from headrace.record.raw cimport put16, put32, put64, put_varint, sub_overflows, varint_size

from headrace.errors import BatchTooLarge, InvalidInput, UnknownCodec
from headrace.record.compression.codecs import compress

cdef extern from "Python.h":
    enum: PyBUF_READ
    object PyMemoryView_FromMemory(char* data, Py_ssize_t size, int flags)

cdef enum:
    CAPACITY = 64 * 1024
    KEEP = 4 * 1024 * 1024      # a buffer that a huge batch grew beyond this is shrunk after the batch


cdef Py_ssize_t header_size(Py_ssize_t name_size, Py_ssize_t value_size) noexcept nogil:
    """Encoded size of one record header; value_size -1 stands for a null value."""
    return (varint_size(name_size) + name_size
            + varint_size(value_size) + (value_size if value_size > 0 else 0))


cdef uint8_t* put_header(
    uint8_t* p, const uint8_t* name, Py_ssize_t name_size, const uint8_t* value, Py_ssize_t value_size
) noexcept nogil:
    """Write one record header at p, which must have room for header_size bytes. Returns the position after it."""
    p = put_varint(p, name_size)
    memcpy(p, name, name_size)
    p = put_varint(p + name_size, value_size)
    if value_size > 0:
        memcpy(p, value, value_size)
        p += value_size
    return p


cdef class BatchWriter:
    """Collects records and returns them as one batch; after finish it is empty and ready for the next batch.

    Not thread-safe: a writer has one owner. Records without a timestamp get the writer's. The batch never exceeds
    bytes_max: an append that would exceed it raises BatchTooLarge (append_raw: APPEND_TOO_LARGE) and changes nothing.
    """

    def __cinit__(self, int64_t timestamp_ms, Py_ssize_t capacity=CAPACITY, *, Py_ssize_t bytes_max=INT32_MAX):
        if bytes_max < HEADER_SIZE or bytes_max > INT32_MAX:
            raise InvalidInput(f"a batch of at most {bytes_max} bytes cannot be built")
        self._limit = bytes_max
        self._capacity = min(max(capacity, <Py_ssize_t>1024), <Py_ssize_t>INT32_MAX)
        self._keep = max(self._capacity, <Py_ssize_t>KEEP)
        self._buffer = <uint8_t*>malloc(self._capacity)
        if self._buffer == NULL:
            raise MemoryError
        self._timestamp = timestamp_ms
        self._reset()

    def __dealloc__(self):
        free(self._buffer)

    @property
    def count(self):
        return self._count

    @property
    def size(self):
        """Size of the batch so far, uncompressed, including its header."""
        return self._used

    @property
    def timestamp_ms(self):
        return self._timestamp

    @timestamp_ms.setter
    def timestamp_ms(self, int64_t value):
        self._timestamp = value

    cdef void _reset(self) noexcept:
        cdef uint8_t* smaller
        self._used = HEADER_SIZE
        self._count = 0
        self._base_timestamp = -1
        self._max_timestamp = -1
        if self._capacity > self._keep:
            smaller = <uint8_t*>realloc(self._buffer, self._keep)
            if smaller != NULL:
                self._buffer = smaller
                self._capacity = self._keep

    cdef AppendResult _reserve(self, Py_ssize_t size) noexcept nogil:
        cdef Py_ssize_t capacity
        cdef uint8_t* larger
        capacity = max(self._capacity * 2, self._used + size)
        larger = <uint8_t*>realloc(self._buffer, capacity)
        if larger == NULL:
            return APPEND_NO_MEMORY
        self._buffer = larger
        self._capacity = capacity
        return APPENDED

    cdef uint8_t* open_record(
        self,
        const uint8_t* key, Py_ssize_t key_size,
        Py_ssize_t value_size,
        Py_ssize_t headers_size, int32_t header_count,
        int64_t timestamp_ms,
        AppendResult* result,
    ) noexcept nogil:
        """Write a record up to its value and return the position of the value. The caller writes value_size bytes
        there, then header_count as a varint, then headers_size bytes. On failure returns NULL, sets result to the
        reason and writes nothing."""
        cdef int64_t timestamp = timestamp_ms if timestamp_ms != -1 else self._timestamp
        cdef int64_t delta = 0
        cdef Py_ssize_t body, needed
        cdef uint8_t* p
        # Check each size on its own first, so that their sum cannot overflow.
        if key_size > self._limit or value_size > self._limit or headers_size > self._limit:
            result[0] = APPEND_TOO_LARGE
            return NULL
        if self._count and sub_overflows(timestamp, self._base_timestamp, &delta):
            result[0] = APPEND_BAD_TIMESTAMP
            return NULL
        body = (1 + varint_size(delta) + varint_size(self._count)
                + varint_size(key_size) + (key_size if key_size > 0 else 0)
                + varint_size(value_size) + (value_size if value_size > 0 else 0)
                + varint_size(header_count) + headers_size)
        needed = varint_size(body) + body
        if needed > self._limit - self._used:
            result[0] = APPEND_TOO_LARGE
            return NULL
        if needed > self._capacity - self._used:
            result[0] = self._reserve(needed)
            if result[0] != APPENDED:
                return NULL
        if self._count == 0:
            self._base_timestamp = timestamp
            self._max_timestamp = timestamp
        elif timestamp > self._max_timestamp:
            self._max_timestamp = timestamp
        p = put_varint(self._buffer + self._used, body)
        p[0] = 0
        p = put_varint(p + 1, delta)
        p = put_varint(p, self._count)
        p = put_varint(p, key_size)
        if key_size > 0:
            memcpy(p, key, key_size)
            p += key_size
        self._used += needed
        self._count += 1
        result[0] = APPENDED
        return put_varint(p, value_size)

    cdef AppendResult append_raw(
        self,
        const uint8_t* key, Py_ssize_t key_size,
        const uint8_t* value, Py_ssize_t value_size,
        const uint8_t* headers, Py_ssize_t headers_size,
        int32_t header_count,
        int64_t timestamp_ms,
    ) noexcept nogil:
        cdef AppendResult result = APPENDED
        cdef uint8_t* p = self.open_record(
            key, key_size, value_size, headers_size, header_count, timestamp_ms, &result)
        if p == NULL:
            return result
        if value_size > 0:
            memcpy(p, value, value_size)
            p += value_size
        p = put_varint(p, header_count)
        if headers_size > 0:
            memcpy(p, headers, headers_size)
        return APPENDED

    cdef AppendResult append_parts(
        self,
        const uint8_t* key, Py_ssize_t key_size,
        const Part* parts, Py_ssize_t part_count,
        const uint8_t* headers, Py_ssize_t headers_size,
        int32_t header_count,
        int64_t timestamp_ms,
    ) noexcept nogil:
        cdef AppendResult result = APPENDED
        cdef Py_ssize_t value_size = 0
        cdef Py_ssize_t i
        cdef uint8_t* p
        for i in range(part_count):
            if parts[i].size > self._limit - value_size:
                return APPEND_TOO_LARGE
            value_size += parts[i].size
        p = self.open_record(key, key_size, value_size, headers_size, header_count, timestamp_ms, &result)
        if p == NULL:
            return result
        for i in range(part_count):
            memcpy(p, parts[i].data, parts[i].size)
            p += parts[i].size
        p = put_varint(p, header_count)
        if headers_size > 0:
            memcpy(p, headers, headers_size)
        return APPENDED

    def append(self, key, value, headers=(), int64_t timestamp_ms=-1):
        """Append one record. Key and value are bytes-like or None; headers are pairs of a name and bytes or None."""
        cdef Py_buffer key_view, value_view
        cdef const uint8_t* key_data = NULL
        cdef const uint8_t* value_data = NULL
        cdef const uint8_t* headers_data = NULL
        cdef Py_ssize_t key_size = -1, value_size = -1, headers_size = 0
        cdef int32_t header_count = 0
        cdef bint key_held = False, value_held = False
        cdef AppendResult result
        cdef bytearray encoded
        if headers:
            encoded, header_count = _encode_headers(headers, self._limit)
            headers_data = <const uint8_t*>PyByteArray_AS_STRING(encoded)
            headers_size = len(encoded)
        try:
            if key is not None:
                if PyBytes_CheckExact(key):
                    key_data, key_size = <const uint8_t*>PyBytes_AS_STRING(key), PyBytes_GET_SIZE(key)
                else:
                    PyObject_GetBuffer(key, &key_view, PyBUF_SIMPLE)
                    key_held = True
                    key_data, key_size = <const uint8_t*>key_view.buf, key_view.len
            if value is not None:
                if PyBytes_CheckExact(value):
                    value_data, value_size = <const uint8_t*>PyBytes_AS_STRING(value), PyBytes_GET_SIZE(value)
                else:
                    PyObject_GetBuffer(value, &value_view, PyBUF_SIMPLE)
                    value_held = True
                    value_data, value_size = <const uint8_t*>value_view.buf, value_view.len
            result = self.append_raw(
                key_data, key_size, value_data, value_size, headers_data, headers_size, header_count, timestamp_ms)
        finally:
            if key_held:
                PyBuffer_Release(&key_view)
            if value_held:
                PyBuffer_Release(&value_view)
        if result == APPEND_TOO_LARGE:
            raise BatchTooLarge(self._used + max(key_size, 0) + max(value_size, 0) + headers_size, self._limit)
        if result == APPEND_BAD_TIMESTAMP:
            raise InvalidInput(f"timestamp {timestamp_ms} is too far from that of the batch, {self._base_timestamp}")
        if result == APPEND_NO_MEMORY:
            raise MemoryError

    cdef void _write_header(
        self, uint8_t* p, Py_ssize_t size, int16_t attributes,
        int64_t producer_id, int16_t producer_epoch, int32_t base_sequence,
    ) noexcept nogil:
        put64(p + BASE_OFFSET_AT, 0)
        put32(p + LENGTH_AT, <uint32_t>(size - PREFIX_SIZE))
        put32(p + LEADER_EPOCH_AT, <uint32_t>-1)
        p[MAGIC_AT] = 2
        put16(p + ATTRIBUTES_AT, attributes)
        put32(p + LAST_OFFSET_DELTA_AT, <uint32_t>(self._count - 1))
        put64(p + BASE_TIMESTAMP_AT, self._base_timestamp)
        put64(p + MAX_TIMESTAMP_AT, self._max_timestamp)
        put64(p + PRODUCER_ID_AT, producer_id)
        put16(p + PRODUCER_EPOCH_AT, producer_epoch)
        put32(p + BASE_SEQUENCE_AT, base_sequence)
        put32(p + COUNT_AT, self._count)
        put32(p + CRC_AT, crc32c_of(p + ATTRIBUTES_AT, size - ATTRIBUTES_AT, 0))

    def finish(
        self, int codec=0, *, int64_t producer_id=-1, int16_t producer_epoch=-1, int32_t base_sequence=-1,
        bint transactional=False, bint control=False,
    ):
        """Return all appended records as one batch with base offset 0 and leader epoch -1, and empty the writer.

        The batch stays uncompressed if the codec does not make it smaller. An empty writer raises InvalidInput.
        """
        cdef int16_t attributes = 0
        cdef bytearray out
        cdef uint8_t* p
        cdef Py_ssize_t size
        cdef const uint8_t[::1] packed
        if self._count == 0:
            raise InvalidInput("a batch needs a record")
        if codec < 0 or codec > CODEC_LAST:
            raise UnknownCodec(f"unknown codec {codec}")
        if transactional:
            attributes |= TRANSACTIONAL_BIT
        if control:
            attributes |= CONTROL_BIT
        size = self._used
        if codec:
            packed = compress(codec, PyMemoryView_FromMemory(
                <char*>self._buffer + HEADER_SIZE, self._used - HEADER_SIZE, PyBUF_READ))
            if packed.shape[0] < size - HEADER_SIZE:
                attributes |= codec
                size = packed.shape[0] + HEADER_SIZE
        out = PyByteArray_FromStringAndSize(NULL, size)
        p = <uint8_t*>PyByteArray_AS_STRING(out)
        if attributes & 7:
            memcpy(p + HEADER_SIZE, &packed[0], size - HEADER_SIZE)
        else:
            memcpy(p + HEADER_SIZE, self._buffer + HEADER_SIZE, size - HEADER_SIZE)
        self._write_header(p, size, attributes, producer_id, producer_epoch, base_sequence)
        self._reset()
        return out

    def discard(self):
        """Drop all appended records."""
        self._reset()


cdef tuple _encode_headers(headers, Py_ssize_t limit):
    """(bytes, count) of encoded record headers. The bytes do not include the count."""
    cdef bytearray out
    cdef Py_ssize_t total = 0
    cdef uint8_t* p
    cdef const uint8_t* data
    cdef Py_ssize_t size
    cdef bytes name_bytes, value_bytes
    pairs = []
    for name, value in headers:
        name_bytes = name.encode() if isinstance(name, str) else bytes(name)
        value_bytes = None if value is None else (value if PyBytes_CheckExact(value) else bytes(memoryview(value)))
        total += header_size(PyBytes_GET_SIZE(name_bytes), -1 if value_bytes is None else PyBytes_GET_SIZE(value_bytes))
        if total > limit:
            raise BatchTooLarge(total, limit)
        pairs.append((name_bytes, value_bytes))
    out = PyByteArray_FromStringAndSize(NULL, total)
    p = <uint8_t*>PyByteArray_AS_STRING(out)
    for name_bytes, value_bytes in pairs:
        data, size = NULL, -1
        if value_bytes is not None:
            data, size = <const uint8_t*>PyBytes_AS_STRING(value_bytes), PyBytes_GET_SIZE(value_bytes)
        p = put_header(p, <const uint8_t*>PyBytes_AS_STRING(name_bytes), PyBytes_GET_SIZE(name_bytes), data, size)
    return out, len(pairs)


def build(
    records, *, int codec=0, int64_t timestamp_ms=-1, int64_t producer_id=-1, int16_t producer_epoch=-1,
    int32_t base_sequence=-1, bint transactional=False, bint control=False,
):
    """Build one batch from (key, value, headers, timestamp_ms) tuples. To build many batches, reuse a BatchWriter."""
    writer = BatchWriter(timestamp_ms)
    for key, value, headers, timestamp in records:
        writer.append(key, value, headers, timestamp)
    return writer.finish(
        codec, producer_id=producer_id, producer_epoch=producer_epoch, base_sequence=base_sequence,
        transactional=transactional, control=control)


def encode_headers(headers):
    """(bytes, count) of record headers, encoded once for kernels that write the same headers to many records."""
    out, count = _encode_headers(headers, INT32_MAX)
    return bytes(out), count
