"""Gives the kernels the records of a batch as uncompressed bytes, independent of the batch's codec."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t

from headrace.record.batch_layout cimport CODEC_MASK, HEADER_SIZE, RECORD_SIZE_MIN, Batch

from headrace.errors import CorruptBatch
from headrace.record.compression.codecs import decompress


cdef class Payload:
    def __dealloc__(self):
        self.close()

    cdef int open(self, object buf, const uint8_t* base, Py_ssize_t at, const Batch* batch, Py_ssize_t limit) except -1:
        """Point start and end at the records of the batch at buf[at:], which begins at base + at and which read_batch
        has checked. Closes the batch that was open before."""
        self.close()
        if not batch.attributes & CODEC_MASK:
            self.start = base + at + HEADER_SIZE
            self.end = base + at + batch.size
            return 0
        try:
            data = decompress(batch.attributes & CODEC_MASK, memoryview(buf)[at + HEADER_SIZE:at + batch.size], limit)
        except CorruptBatch as error:
            raise type(error)(error.reason, at) from None
        PyObject_GetBuffer(data, &self._view, PyBUF_SIMPLE)
        self._held = True
        self.start = <const uint8_t*>self._view.buf
        self.end = self.start + self._view.len
        # Check the record count against the decompressed size before anything is allocated by it.
        if self._view.len // RECORD_SIZE_MIN < batch.count:
            raise CorruptBatch("the record count cannot be true", at)
        return 0

    cdef void close(self) noexcept:
        if self._held:
            PyBuffer_Release(&self._view)
            self._held = False
