"""Numbers as bytes: big-endian ones, little-endian ones (our own files) and zigzag varints. Every read has an end pointer; NULL means it would pass it."""

from libc.stdint cimport int16_t, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t

cdef extern from *:
    """
    #include <stdint.h>
    #include <string.h>

    /* Shifts, not casts: right on any byte order and alignment, and compilers make one bswap of them. */
    static inline uint16_t hr_get16(const uint8_t *p) { return (uint16_t)((p[0] << 8) | p[1]); }
    static inline uint32_t hr_get32(const uint8_t *p) {
        return ((uint32_t)p[0] << 24) | ((uint32_t)p[1] << 16) | ((uint32_t)p[2] << 8) | p[3];
    }
    static inline uint64_t hr_get64(const uint8_t *p) {
        return ((uint64_t)hr_get32(p) << 32) | hr_get32(p + 4);
    }
    static inline void hr_put16(uint8_t *p, uint16_t v) { p[0] = (uint8_t)(v >> 8); p[1] = (uint8_t)v; }
    static inline void hr_put32(uint8_t *p, uint32_t v) {
        p[0] = (uint8_t)(v >> 24); p[1] = (uint8_t)(v >> 16); p[2] = (uint8_t)(v >> 8); p[3] = (uint8_t)v;
    }
    static inline void hr_put64(uint8_t *p, uint64_t v) {
        hr_put32(p, (uint32_t)(v >> 32)); hr_put32(p + 4, (uint32_t)v);
    }

    static inline void hr_put_le(uint8_t *p, uint64_t v, int size) {
        for (int i = 0; i < size; i++) p[i] = (uint8_t)(v >> (8 * i));
    }

    static inline uint64_t hr_zigzag(int64_t v) { return ((uint64_t)v << 1) ^ (uint64_t)(v >> 63); }
    static inline int64_t hr_unzigzag(uint64_t v) { return (int64_t)(v >> 1) ^ -(int64_t)(v & 1); }

    /* Bytes that a varint takes: one for each seven bits that are used. */
    static inline int hr_varint_size(int64_t value) {
        int bits = 64 - __builtin_clzll(hr_zigzag(value) | 1);
        return (bits * 9 + 64) >> 6;
    }

    static inline uint8_t *hr_put_varint(uint8_t *p, int64_t value) {
        uint64_t v = hr_zigzag(value);
        while (v >= 0x80) { *p++ = (uint8_t)(v | 0x80); v >>= 7; }
        *p++ = (uint8_t)v;
        return p;
    }

    static inline const uint8_t *hr_get_varint_long(const uint8_t *p, const uint8_t *end, int64_t *out) {
        uint64_t value = 0;
        int shift = 0;
        while (p < end && shift < 64) {
            uint8_t byte = *p++;
            if (shift == 63 && byte > 1) return 0;      /* would not fit 64 bits */
            value |= (uint64_t)(byte & 0x7f) << shift;
            if (byte < 0x80) { *out = hr_unzigzag(value); return p; }
            shift += 7;
        }
        return 0;                                       /* cut short, or longer than ten bytes */
    }

    /* The position after the varint, or NULL. Nearly all are one byte or two. */
    static inline const uint8_t *hr_get_varint(const uint8_t *p, const uint8_t *end, int64_t *out) {
        if (p < end && p[0] < 0x80) { *out = hr_unzigzag(p[0]); return p + 1; }
        if (end - p >= 2 && p[1] < 0x80) {
            *out = hr_unzigzag((uint64_t)(p[0] & 0x7f) | ((uint64_t)p[1] << 7));
            return p + 2;
        }
        return hr_get_varint_long(p, end, out);
    }

    static inline int hr_add_overflows(int64_t a, int64_t b, int64_t *out) {
        return __builtin_add_overflow(a, b, out);
    }
    static inline int hr_sub_overflows(int64_t a, int64_t b, int64_t *out) {
        return __builtin_sub_overflow(a, b, out);
    }
    """
    uint16_t get16 "hr_get16"(const uint8_t* p) noexcept nogil
    uint32_t get32 "hr_get32"(const uint8_t* p) noexcept nogil
    uint64_t get64 "hr_get64"(const uint8_t* p) noexcept nogil
    void put16 "hr_put16"(uint8_t* p, uint16_t value) noexcept nogil
    void put32 "hr_put32"(uint8_t* p, uint32_t value) noexcept nogil
    void put64 "hr_put64"(uint8_t* p, uint64_t value) noexcept nogil
    void put_le "hr_put_le"(uint8_t* p, uint64_t value, int size) noexcept nogil
    int varint_size "hr_varint_size"(int64_t value) noexcept nogil
    uint8_t* put_varint "hr_put_varint"(uint8_t* p, int64_t value) noexcept nogil
    const uint8_t* get_varint "hr_get_varint"(const uint8_t* p, const uint8_t* end, int64_t* out) noexcept nogil
    bint add_overflows "hr_add_overflows"(int64_t a, int64_t b, int64_t* out) noexcept nogil
    bint sub_overflows "hr_sub_overflows"(int64_t a, int64_t b, int64_t* out) noexcept nogil
