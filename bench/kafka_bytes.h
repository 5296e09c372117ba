/* What the programs that speak Kafka here have in common: numbers in Kafka's byte order, and the end of a program. */
#ifndef HEADRACE_BENCH_KAFKA_BYTES_H
#define HEADRACE_BENCH_KAFKA_BYTES_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static inline void die(const char *what) {
    perror(what);
    exit(1);
}

static inline uint64_t get(const uint8_t *at, int bytes) {
    uint64_t value = 0;
    for (int i = 0; i < bytes; i++) value = value << 8 | at[i];
    return value;
}

static inline uint8_t *put(uint8_t *at, uint64_t value, int bytes) {
    for (int i = bytes - 1; i >= 0; i--) *at++ = (uint8_t)(value >> (8 * i));
    return at;
}

#endif
