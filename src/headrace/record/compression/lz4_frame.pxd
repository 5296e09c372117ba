"""The outline of lz4 data, without decoding it. The format is that of LZ4's frame description, version 1.6.1."""

from libc.stdint cimport uint8_t, uint32_t

cdef enum:
    LZ4_MAGIC = 0x184D2204
    LZ4_VERSION_MASK = 0xC0
    LZ4_VERSION_1 = 0x40
    LZ4_INDEPENDENT_BLOCKS = 0x20
    LZ4_BLOCK_CHECKSUMS = 0x10
    LZ4_CONTENT_SIZE = 0x08
    LZ4_CONTENT_CHECKSUM = 0x04
    LZ4_RESERVED = 0x03         # one of the two bits announces a dictionary
    LZ4_UNCOMPRESSED_BIT = 0x80000000


cdef inline uint32_t lz4_get32(const uint8_t* p) noexcept nogil:
    return p[0] | <uint32_t>p[1] << 8 | <uint32_t>p[2] << 16 | <uint32_t>p[3] << 24


cdef inline bint is_readable_lz4(const uint8_t* p, const uint8_t* end) noexcept nogil:
    """Whether the data is one frame of independent blocks and nothing else.

    LZ4's own decoder also reads several frames, skippable frames and linked blocks. Kafka's Java client reads none of
    them, and librdkafka stops after the first frame."""
    cdef uint8_t flags
    cdef uint32_t size
    cdef Py_ssize_t header
    if end - p < 7 or lz4_get32(p) != <uint32_t>LZ4_MAGIC:
        return False
    flags = p[4]
    if flags & LZ4_VERSION_MASK != LZ4_VERSION_1 or flags & LZ4_RESERVED or not flags & LZ4_INDEPENDENT_BLOCKS:
        return False
    header = 7 + (8 if flags & LZ4_CONTENT_SIZE else 0)
    if end - p < header:
        return False
    p += header
    while True:
        if end - p < 4:
            return False
        size = lz4_get32(p)
        p += 4
        if size == 0:
            break
        size &= ~<uint32_t>LZ4_UNCOMPRESSED_BIT
        if end - p < <Py_ssize_t>size + (4 if flags & LZ4_BLOCK_CHECKSUMS else 0):
            return False
        p += size + (4 if flags & LZ4_BLOCK_CHECKSUMS else 0)
    return end - p == (4 if flags & LZ4_CONTENT_CHECKSUM else 0)
