"""CRC32C (Castagnoli) for the kernels, without a Python call per batch.

With SSE4.2, three independent streams of the crc32 instruction hide its latency of three cycles, and shift tables
combine their results. Other machines use eight lookup tables and process eight bytes per step. The implementation is
chosen once, at import.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer

cdef extern from *:
    r"""
    #include <stddef.h>
    #include <stdint.h>
    #include <string.h>

    #define HR_CRC_POLY 0x82f63b78u
    #define HR_CRC_LONG 4096
    #define HR_CRC_SHORT 256

    static uint32_t hr_crc_table[8][256];
    static uint32_t hr_crc_long[4][256];
    static uint32_t hr_crc_short[4][256];
    static int hr_crc_hardware = 0;

    static uint32_t hr_crc_software(uint32_t crc, const uint8_t *p, size_t n) {
        while (n >= 8) {
            uint32_t lo = crc ^ ((uint32_t)p[0] | (uint32_t)p[1] << 8 | (uint32_t)p[2] << 16 | (uint32_t)p[3] << 24);
            crc = hr_crc_table[7][lo & 0xff] ^ hr_crc_table[6][(lo >> 8) & 0xff] ^
                  hr_crc_table[5][(lo >> 16) & 0xff] ^ hr_crc_table[4][lo >> 24] ^
                  hr_crc_table[3][p[4]] ^ hr_crc_table[2][p[5]] ^ hr_crc_table[1][p[6]] ^ hr_crc_table[0][p[7]];
            p += 8; n -= 8;
        }
        while (n--) crc = hr_crc_table[0][(crc ^ *p++) & 0xff] ^ (crc >> 8);
        return crc;
    }

    /* shift[k][b]: contribution of byte k of a checksum, with value b, after `length` more zero bytes. */
    static void hr_crc_shift_table(uint32_t shift[4][256], size_t length) {
        uint32_t bit[32];
        for (int i = 0; i < 32; i++) {
            uint32_t crc = 1u << i;
            for (size_t n = 0; n < length; n++) crc = hr_crc_table[0][crc & 0xff] ^ (crc >> 8);
            bit[i] = crc;
        }
        for (int k = 0; k < 4; k++)
            for (int b = 0; b < 256; b++) {
                uint32_t crc = 0;
                for (int i = 0; i < 8; i++) if (b & (1 << i)) crc ^= bit[8 * k + i];
                shift[k][b] = crc;
            }
    }

    static inline uint32_t hr_crc_shift(uint32_t shift[4][256], uint32_t crc) {
        return shift[0][crc & 0xff] ^ shift[1][(crc >> 8) & 0xff] ^
               shift[2][(crc >> 16) & 0xff] ^ shift[3][crc >> 24];
    }

    #if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
    #define HR_CRC_SSE 1
    #define HR_STEP(crc, at) crc = __builtin_ia32_crc32di(crc, hr_crc_load(at))

    static inline uint64_t hr_crc_load(const uint8_t *p) { uint64_t v; memcpy(&v, p, 8); return v; }

    __attribute__((target("sse4.2")))
    static uint32_t hr_crc_sse(uint32_t start, const uint8_t *p, size_t n) {
        uint64_t a = start, b, c;
        while (n >= 3 * HR_CRC_LONG) {
            b = c = 0;
            for (size_t i = 0; i < HR_CRC_LONG; i += 8) {
                HR_STEP(a, p + i); HR_STEP(b, p + HR_CRC_LONG + i); HR_STEP(c, p + 2 * HR_CRC_LONG + i);
            }
            a = hr_crc_shift(hr_crc_long, (uint32_t)a) ^ b;
            a = hr_crc_shift(hr_crc_long, (uint32_t)a) ^ c;
            p += 3 * HR_CRC_LONG; n -= 3 * HR_CRC_LONG;
        }
        while (n >= 3 * HR_CRC_SHORT) {
            b = c = 0;
            for (size_t i = 0; i < HR_CRC_SHORT; i += 8) {
                HR_STEP(a, p + i); HR_STEP(b, p + HR_CRC_SHORT + i); HR_STEP(c, p + 2 * HR_CRC_SHORT + i);
            }
            a = hr_crc_shift(hr_crc_short, (uint32_t)a) ^ b;
            a = hr_crc_shift(hr_crc_short, (uint32_t)a) ^ c;
            p += 3 * HR_CRC_SHORT; n -= 3 * HR_CRC_SHORT;
        }
        while (n >= 8) { HR_STEP(a, p); p += 8; n -= 8; }
        uint32_t crc = (uint32_t)a;
        while (n--) crc = __builtin_ia32_crc32qi(crc, *p++);
        return crc;
    }
    #endif

    static void hr_crc_prepare(void) {
        for (int b = 0; b < 256; b++) {
            uint32_t crc = (uint32_t)b;
            for (int i = 0; i < 8; i++) crc = (crc >> 1) ^ ((crc & 1) ? HR_CRC_POLY : 0);
            hr_crc_table[0][b] = crc;
        }
        for (int k = 1; k < 8; k++)
            for (int b = 0; b < 256; b++)
                hr_crc_table[k][b] = hr_crc_table[0][hr_crc_table[k - 1][b] & 0xff] ^ (hr_crc_table[k - 1][b] >> 8);
    #ifdef HR_CRC_SSE
        __builtin_cpu_init();
        hr_crc_hardware = __builtin_cpu_supports("sse4.2") ? 1 : 0;
        if (hr_crc_hardware) {
            hr_crc_shift_table(hr_crc_long, HR_CRC_LONG);
            hr_crc_shift_table(hr_crc_short, HR_CRC_SHORT);
        }
    #endif
    }

    static uint32_t hr_crc32c(uint32_t crc, const uint8_t *p, size_t n, int hardware) {
    #ifdef HR_CRC_SSE
        if (hardware) return ~hr_crc_sse(~crc, p, n);
    #endif
        return ~hr_crc_software(~crc, p, n);
    }
    """
    int _hardware "hr_crc_hardware"
    void _prepare "hr_crc_prepare"() noexcept nogil
    uint32_t _crc32c "hr_crc32c"(uint32_t crc, const uint8_t* data, size_t length, int hardware) noexcept nogil

_prepare()

hardware = bool(_hardware)


cdef uint32_t crc32c_of(const uint8_t* data, size_t length, uint32_t crc) noexcept nogil:
    return _crc32c(crc, data, length, _hardware)


cdef uint32_t _of_buffer(data, uint32_t crc, int hardware) except? 0:
    # Not a typed memoryview: acquiring one costs more than the checksum of a small batch.
    cdef Py_buffer view
    PyObject_GetBuffer(data, &view, PyBUF_SIMPLE)
    crc = _crc32c(crc, <const uint8_t*>view.buf, view.len, hardware)
    PyBuffer_Release(&view)
    return crc


def crc32c(data, uint32_t crc=0):
    """The CRC32C of data. Pass the checksum of the preceding bytes as crc to continue it."""
    return _of_buffer(data, crc, _hardware)


def crc32c_software(data, uint32_t crc=0):
    """Like crc32c, but with the table implementation for machines without SSE4.2, so that every machine can test it."""
    return _of_buffer(data, crc, 0)
