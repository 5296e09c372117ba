"""SipHash-1-3 with 128 bits of result: who does not know the key cannot find two inputs with the same hash."""

from libc.stdint cimport uint8_t, uint64_t

cdef extern from *:
    """
    #include <stddef.h>
    #include <stdint.h>

    static inline uint64_t hr_sip_word(const uint8_t *p, size_t size) {
        uint64_t word = 0;
        for (size_t i = 0; i < size; i++) word |= (uint64_t)p[i] << (8 * i);
        return word;
    }

    #define HR_ROTATED(x, by) (((x) << (by)) | ((x) >> (64 - (by))))

    static inline void hr_sip_round(uint64_t v[4]) {
        v[0] += v[1]; v[1] = HR_ROTATED(v[1], 13) ^ v[0]; v[0] = HR_ROTATED(v[0], 32);
        v[2] += v[3]; v[3] = HR_ROTATED(v[3], 16) ^ v[2];
        v[0] += v[3]; v[3] = HR_ROTATED(v[3], 21) ^ v[0];
        v[2] += v[1]; v[1] = HR_ROTATED(v[1], 17) ^ v[2]; v[2] = HR_ROTATED(v[2], 32);
    }

    static inline void hr_siphash128(
        const uint8_t *data, size_t size, const uint64_t key[2], uint64_t out[2]
    ) {
        uint64_t v[4] = {
            key[0] ^ 0x736f6d6570736575ULL, key[1] ^ 0x646f72616e646f6dULL ^ 0xee,
            key[0] ^ 0x6c7967656e657261ULL, key[1] ^ 0x7465646279746573ULL,
        };
        const uint8_t *end = data + (size & ~(size_t)7);
        for (; data != end; data += 8) {
            uint64_t word = hr_sip_word(data, 8);
            v[3] ^= word;
            hr_sip_round(v);
            v[0] ^= word;
        }
        uint64_t rest = ((uint64_t)size << 56) | hr_sip_word(data, size & 7);
        v[3] ^= rest;
        hr_sip_round(v);
        v[0] ^= rest;
        v[2] ^= 0xee;
        for (int i = 0; i < 3; i++) hr_sip_round(v);
        out[0] = v[0] ^ v[1] ^ v[2] ^ v[3];
        v[1] ^= 0xdd;
        for (int i = 0; i < 3; i++) hr_sip_round(v);
        out[1] = v[0] ^ v[1] ^ v[2] ^ v[3];
    }
    """
    void siphash128 "hr_siphash128"(const uint8_t* data, size_t size, const uint64_t* key, uint64_t* out) noexcept nogil
