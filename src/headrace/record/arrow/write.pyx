# cython: boundscheck=False, wraparound=False, cdivision=True
"""Encodes columns in Arrow's memory layout as record batches, one list of batches per partition.

The reverse of read.pyx, for writers of tables such as the Spark sink. Creates no Python object per row.
"""

from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from headrace.record.batch.build cimport APPEND_BAD_TIMESTAMP, APPEND_NO_MEMORY, APPEND_TOO_LARGE, APPENDED, AppendResult, BatchWriter
from headrace.record.batch.murmur2 cimport murmur2_of

from headrace.errors import BatchTooLarge, InvalidInput


cdef class BinaryRows:
    """An Arrow binary or text column: int32 offsets, bytes and a validity bitmap. Skips the first `first` rows."""
    cdef const int32_t[::1] offsets
    cdef const uint8_t[::1] data
    cdef const uint8_t[::1] validity
    cdef bint has_nulls
    cdef readonly Py_ssize_t first
    cdef readonly Py_ssize_t count

    def __init__(self, offsets, data, validity, Py_ssize_t first, Py_ssize_t count):
        self.offsets = memoryview(offsets).cast("B").cast("i")
        self.data = memoryview(data).cast("B") if data is not None else b""
        self.has_nulls = validity is not None
        if validity is not None:
            self.validity = memoryview(validity).cast("B")
            if self.validity.shape[0] * 8 < first + count:
                raise InvalidInput("a column's bitmap is shorter than its rows")
        if first < 0 or count < 0 or (count and self.offsets.shape[0] < first + count + 1):
            raise InvalidInput("a column's offsets are fewer than its rows")
        self.first, self.count = first, count

    cdef Py_ssize_t at(self, Py_ssize_t row, const uint8_t** data) except -3:
        """The size of a row's value, -1 for null. Sets data to its position."""
        cdef Py_ssize_t index = self.first + row
        cdef int32_t begin, end
        if self.has_nulls and not (self.validity[index >> 3] >> (index & 7)) & 1:
            data[0] = NULL
            return -1
        begin, end = self.offsets[index], self.offsets[index + 1]
        if begin < 0 or end < begin or end > self.data.shape[0]:
            raise InvalidInput(f"row {row} of a column lies outside its data")
        data[0] = &self.data[begin] if end > begin else NULL
        return end - begin


cdef class PartitionedWriter:
    """Builds batches for the partitions of one topic. Rows with a key go to the partition that every Kafka client
    would choose. Rows without a key go to one partition until its batch is full, then to the next."""
    cdef list _writers
    cdef list _done
    cdef int32_t _partitions
    cdef int32_t _turn
    cdef Py_ssize_t _batch_bytes
    cdef int _codec
    cdef readonly Py_ssize_t bytes_done
    cdef readonly int64_t rows

    def __init__(self, int32_t partitions, *, int64_t timestamp_ms, Py_ssize_t batch_bytes, int codec=0,
                 Py_ssize_t bytes_max=16 << 20, int32_t turn=0):
        if partitions < 1:
            raise InvalidInput("a topic has at least one partition")
        self._partitions, self._turn = partitions, turn % partitions
        self._batch_bytes, self._codec = batch_bytes, codec
        self._writers = [BatchWriter(timestamp_ms, bytes_max=bytes_max) for _ in range(partitions)]
        self._done = [[] for _ in range(partitions)]

    def add(self, BinaryRows keys, BinaryRows values not None, *, partitions=None, timestamps=None, headers=None):
        """Append every row. partitions: int32, -1 lets the writer choose; timestamps: int64 ms, -1 uses the writer's;
        headers: for each row None or (encoded, count) as returned by encode_headers."""
        cdef const int32_t[::1] chosen = None
        cdef const int64_t[::1] stamps = None
        cdef Py_ssize_t row, key_size = -1, value_size, headers_size
        cdef const uint8_t* key = NULL
        cdef const uint8_t* value = NULL
        cdef const uint8_t* header_data
        cdef bytes encoded
        cdef int32_t header_count, partition
        cdef int64_t stamp
        cdef Py_ssize_t count = values.count
        cdef BatchWriter writer
        cdef AppendResult result
        if partitions is not None:
            chosen = memoryview(partitions).cast("B").cast("i")
            if chosen.shape[0] != count:
                raise InvalidInput("as many partitions as rows are needed")
        if timestamps is not None:
            stamps = memoryview(timestamps).cast("B").cast("q")
            if stamps.shape[0] != count:
                raise InvalidInput("as many timestamps as rows are needed")
        if keys is not None and keys.count != count:
            raise InvalidInput("as many keys as values are needed")
        for row in range(count):
            if keys is not None:
                key_size = keys.at(row, &key)
            value_size = values.at(row, &value)
            partition = chosen[row] if partitions is not None else -1
            if partition < 0:
                if key_size >= 0:
                    partition = <int32_t>((<uint32_t>murmur2_of(key, key_size) & 0x7FFFFFFF) % <uint32_t>self._partitions)
                else:
                    partition = self._turn
            elif partition >= self._partitions:
                raise InvalidInput(f"there is no partition {partition}: the topic has {self._partitions}")
            stamp = stamps[row] if timestamps is not None else -1
            header_data, headers_size, header_count = NULL, 0, 0
            if headers is not None and headers[row] is not None:
                encoded, header_count = headers[row]
                header_data, headers_size = <const uint8_t*><char*>encoded, len(encoded)
            writer = <BatchWriter>self._writers[partition]
            result = writer.append_raw(
                key, key_size, value, value_size, header_data, headers_size, header_count, stamp)
            if result == APPEND_TOO_LARGE and writer._count:
                self._flush(partition)
                result = writer.append_raw(
                    key, key_size, value, value_size, header_data, headers_size, header_count, stamp)
            if result != APPENDED:
                self._refuse(result, max(key_size, 0) + max(value_size, 0) + headers_size, writer)
            self.rows += 1
            if writer._used >= self._batch_bytes:
                self._flush(partition)

    cdef _flush(self, int32_t partition):
        batch = self._writers[partition].finish(self._codec)
        self._done[partition].append(batch)
        self.bytes_done += len(batch)
        if partition == self._turn:
            self._turn = (self._turn + 1) % self._partitions

    cdef _refuse(self, AppendResult result, Py_ssize_t size, BatchWriter writer):
        if result == APPEND_TOO_LARGE:
            raise BatchTooLarge(size, writer._limit)
        if result == APPEND_BAD_TIMESTAMP:
            raise InvalidInput("a timestamp is too far from the others of its batch")
        assert result == APPEND_NO_MEMORY
        raise MemoryError

    def take(self, *, bint all=True):
        """Remove and return the finished batches as [(partition, batches)]. With `all`, finishes open batches first."""
        cdef int32_t partition
        found = []
        for partition in range(self._partitions):
            if all and (<BatchWriter>self._writers[partition])._count:
                self._flush(partition)
            if self._done[partition]:
                found.append((partition, self._done[partition]))
                self._done[partition] = []
        self.bytes_done = 0
        return found
