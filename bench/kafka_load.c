/* A load generator for the Kafka listener: librdkafka, driven from C so that Python is not the limit.
 *
 *   kafka_load produce ADDRESS TOPIC COUNT SIZE CODEC PRODUCERS [RATE]
 *   kafka_load consume ADDRESS TOPIC COUNT
 *
 * produce: acks=all; each producer has a handle, a thread and its share of COUNT, all to partition 0 of TOPIC.
 * With RATE (messages per second, all producers) it sends on a schedule with linger.ms=5, and the time to the
 * acknowledgement counts from the moment a message was due; the first half second is not counted. Without, as fast
 * as librdkafka's queue of 100,000 messages lets it. Bodies are JSON-like text, so that codecs have work to do.
 * consume: partition 0 from its beginning until COUNT messages came.
 * Prints one line: seconds, messages per second, p50 and p99 of the time to the acknowledgement in ms, failures.
 *
 * Declared by hand, because the library comes with confluent-kafka's wheel, which has no headers. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <time.h>

typedef struct rd_kafka_s rd_kafka_t;
typedef struct rd_kafka_topic_s rd_kafka_topic_t;
typedef struct rd_kafka_conf_s rd_kafka_conf_t;
typedef struct {
    int err;
    rd_kafka_topic_t *rkt;
    int32_t partition;
    void *payload;
    size_t len;
    void *key;
    size_t key_len;
    int64_t offset;
    void *opaque;
} rd_kafka_message_t;
extern rd_kafka_conf_t *rd_kafka_conf_new(void);
extern int rd_kafka_conf_set(rd_kafka_conf_t *, const char *, const char *, char *, size_t);
extern void rd_kafka_conf_set_opaque(rd_kafka_conf_t *, void *);
extern void rd_kafka_conf_set_dr_msg_cb(rd_kafka_conf_t *, void (*)(rd_kafka_t *, const rd_kafka_message_t *, void *));
extern rd_kafka_t *rd_kafka_new(int, rd_kafka_conf_t *, char *, size_t);
extern rd_kafka_topic_t *rd_kafka_topic_new(rd_kafka_t *, const char *, void *);
extern int rd_kafka_produce(rd_kafka_topic_t *, int32_t, int, void *, size_t, const void *, size_t, void *);
extern int rd_kafka_poll(rd_kafka_t *, int);
extern int rd_kafka_flush(rd_kafka_t *, int);
extern int64_t rd_kafka_message_latency(const rd_kafka_message_t *);
extern int rd_kafka_consume_start(rd_kafka_topic_t *, int32_t, int64_t);
extern ssize_t rd_kafka_consume_batch(rd_kafka_topic_t *, int32_t, int, rd_kafka_message_t **, size_t);
extern void rd_kafka_message_destroy(rd_kafka_message_t *);
#define BODIES 64
#define SAMPLE_EVERY 16
#define UNCOUNTED_S 0.5

struct work {
    const char *address, *topic, *codec;
    long count, size, done, failed;
    double rate;
    int64_t *latency;
    long samples;
};

static char *bodies[BODIES];

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static void set(rd_kafka_conf_t *conf, const char *name, const char *value) {
    char error[512];
    if (rd_kafka_conf_set(conf, name, value, error, sizeof error) != 0) {
        fprintf(stderr, "%s=%s: %s\n", name, value, error);
        exit(2);
    }
}

static void delivered(rd_kafka_t *rk, const rd_kafka_message_t *message, void *opaque) {
    struct work *work = opaque;
    (void)rk;
    if (message->err)
        work->failed++;
    else if (work->done++ % SAMPLE_EVERY == 0 && (long)message->opaque >= 0)
        work->latency[work->samples++] = rd_kafka_message_latency(message) + (long)message->opaque;
}

static void *produce(void *argument) {
    struct work *work = argument;
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    char error[512];
    set(conf, "bootstrap.servers", work->address);
    set(conf, "acks", "all");
    set(conf, "compression.codec", work->codec);
    set(conf, "linger.ms", "5");
    set(conf, "log_level", "3");
    set(conf, "queue.buffering.max.messages", "100000");
    rd_kafka_conf_set_opaque(conf, work);
    rd_kafka_conf_set_dr_msg_cb(conf, delivered);
    rd_kafka_t *rk = rd_kafka_new(0, conf, error, sizeof error);
    rd_kafka_topic_t *topic = rd_kafka_topic_new(rk, work->topic, NULL);
    double began = now();
    for (long i = 0; i < work->count; i++) {
        double due = began + i / work->rate; /* without a schedule never asked for */
        while (work->rate > 0 && now() < due)
            rd_kafka_poll(rk, 1);
        for (;;) {
            long late_us = work->rate <= 0 ? 0 : due - began < UNCOUNTED_S ? -1 : (now() - due) * 1e6;
            if (rd_kafka_produce(topic, 0, 0, bodies[i % BODIES], work->size, NULL, 0, (void *)late_us) != -1)
                break;
            rd_kafka_poll(rk, 5);
        }
        if (i % 256 == 0)
            rd_kafka_poll(rk, 0);
    }
    rd_kafka_flush(rk, 60000);
    return NULL;
}

static int by_value(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return x < y ? -1 : x > y;
}

static int consume(const char *address, const char *name, long count) {
    rd_kafka_conf_t *conf = rd_kafka_conf_new();
    char error[512];
    set(conf, "bootstrap.servers", address);
    set(conf, "group.id", "load");
    set(conf, "log_level", "3");
    set(conf, "check.crcs", "true");
    set(conf, "fetch.queue.backoff.ms", "0"); /* otherwise it pauses for a second when it lags behind, with any broker */
    rd_kafka_t *rk = rd_kafka_new(1, conf, error, sizeof error);
    rd_kafka_topic_t *topic = rd_kafka_topic_new(rk, name, NULL);
    rd_kafka_message_t *messages[1000];
    double began = now();
    long got = 0;
    rd_kafka_consume_start(topic, 0, 0);
    while (got < count && now() - began < 120) {
        ssize_t n = rd_kafka_consume_batch(topic, 0, 1000, messages, 1000);
        for (ssize_t i = 0; i < n; i++) {
            got += messages[i]->err == 0;
            rd_kafka_message_destroy(messages[i]);
        }
    }
    double seconds = now() - began;
    printf("%.4f %.0f 0 0 %ld\n", seconds, got / seconds, count - got);
    fflush(stdout);
    _Exit(0);
}

int main(int argc, char **argv) {
    if (argc == 5 && !strcmp(argv[1], "consume"))
        return consume(argv[2], argv[3], atol(argv[4]));
    if (argc < 8)
        return 2;
    long count = atol(argv[4]), size = atol(argv[5]), producers = atol(argv[7]);
    double rate = argc > 8 ? atof(argv[8]) : 0;
    srand(1);
    for (int i = 0; i < BODIES; i++) {
        bodies[i] = malloc(size + 64);
        long at = 0;
        while (at < size)
            at += snprintf(bodies[i] + at, 48, "{\"id\":%d,\"value\":%d},", rand() % 100000, rand() % 1000);
    }
    struct work *all = calloc(producers, sizeof *all);
    pthread_t *threads = calloc(producers, sizeof *threads);
    double began = now();
    for (long i = 0; i < producers; i++) {
        all[i] = (struct work){.address = argv[2], .topic = argv[3], .codec = argv[6], .count = count / producers,
                               .size = size, .rate = rate / producers};
        all[i].latency = malloc((all[i].count / SAMPLE_EVERY + 2) * sizeof(int64_t));
        pthread_create(&threads[i], NULL, produce, &all[i]);
    }
    long done = 0, failed = 0, samples = 0;
    for (long i = 0; i < producers; i++) {
        pthread_join(threads[i], NULL);
        done += all[i].done, failed += all[i].failed, samples += all[i].samples;
    }
    double seconds = now() - began;
    int64_t *latency = malloc((samples + 1) * sizeof(int64_t)), *to = latency;
    for (long i = 0; i < producers; i++)
        for (long j = 0; j < all[i].samples; j++)
            *to++ = all[i].latency[j];
    qsort(latency, samples, sizeof(int64_t), by_value);
    printf("%.4f %.0f %.2f %.2f %ld\n", seconds, done / seconds, samples ? latency[samples / 2] / 1e3 : 0,
           samples ? latency[samples * 99 / 100] / 1e3 : 0, failed + (count / producers * producers - done - failed));
    fflush(stdout);
    _Exit(0);
}
