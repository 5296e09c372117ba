# cython: boundscheck=False, wraparound=False
"""How a wire kernel uses the record layer: records appended from C, without a Python call for each."""

from libc.stdint cimport uint8_t

from headrace.record.codec cimport APPENDED, AppendResult, BatchWriter, Part


def append_many(BatchWriter writer, const uint8_t[::1] key, const uint8_t[::1] value, Py_ssize_t count):
    """Append the same record so many times."""
    cdef Py_ssize_t i
    cdef AppendResult result = APPENDED
    with nogil:
        for i in range(count):
            result = writer.append_raw(
                &key[0], key.shape[0], &value[0], value.shape[0], NULL, 0, 0, -1)
            if result != APPENDED:
                break
    return result


def append_pieces(BatchWriter writer, key, list pieces, bytes headers, int header_count, timestamp_ms):
    """One record whose value comes in pieces, as an AMQP body does."""
    cdef Part parts[64]
    cdef const uint8_t[::1] view
    cdef const uint8_t* key_data = NULL
    cdef Py_ssize_t key_size = -1, i
    cdef list held = [bytes(piece) for piece in pieces]
    assert len(held) <= 64
    if key is not None:
        key_data, key_size = <const uint8_t*><const char*><bytes>key, len(key)
    for i in range(len(held)):
        parts[i].data = <const uint8_t*><const char*><bytes>held[i]
        parts[i].size = len(held[i])
    return writer.append_parts(
        key_data, key_size, parts, len(held), <const uint8_t*><const char*>headers, len(headers), header_count,
        timestamp_ms)
