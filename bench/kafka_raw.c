/* A load generator for the Kafka listener that costs next to nothing itself, so that the broker is what is measured.
 *
 *   kafka_raw produce ADDRESS TOPIC COUNT SIZE BATCH_BYTES CONNECTIONS IN_FLIGHT [RATE]
 *   kafka_raw fetch ADDRESS TOPIC COUNT CONNECTIONS
 *
 * produce: Produce v7, acks=all, to partition 0 of TOPIC. One batch of records of SIZE bytes is made, with its
 * checksum, and sent over and over; each connection keeps IN_FLIGHT requests out. No codec: a client's own work.
 * With RATE (messages per second, all connections) it sends on a schedule, and the time of a request counts from
 * the moment it was due, whether it could be sent then or not; the first half second is not counted. A second behind
 * its schedule it gives up: the broker does not take that rate.
 * fetch: Fetch v4 of partition 0 from its beginning with librdkafka's limits (1 MB of a partition, wait 500 ms);
 * each connection reads COUNT records, by the headers of their batches.
 * Prints one line: seconds, messages per second, p50 and p99 of a request in ms, failures. One thread. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include "kafka_bytes.h"

#define FETCH_PARTITION_BYTES 1048576
#define FETCH_BYTES 52428800
#define FETCH_WAIT_MS 500
#define BATCH_HEADER 61
#define IN_FLIGHT_MAX 64
#define UNCOUNTED_S 0.5 /* of a schedule: everybody's caches and connections are cold */
#define BEHIND_S_MAX 1.0

struct link {
    int fd, in_flight, oldest;
    size_t sent, request_size; /* of the request that is being sent; whole when equal */
    uint8_t *request;
    double started[IN_FLIGHT_MAX];
    uint8_t *answer;
    size_t received, answer_room;
    long to_send, to_come;
    double due, interval; /* of the next request; without a schedule always due */
    int64_t offset;
};

static double *latencies;
static long requests_done, failures;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static uint32_t crc32c(const uint8_t *data, size_t size) {
    uint32_t crc = 0xFFFFFFFF;
    for (size_t i = 0; i < size; i++) {
        crc ^= data[i];
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (0x82F63B78 & -(crc & 1));
    }
    return ~crc;
}

static uint8_t *put_text(uint8_t *at, const char *text) {
    at = put(at, strlen(text), 2);
    memcpy(at, text, strlen(text));
    return at + strlen(text);
}

static uint8_t *put_varint(uint8_t *at, int64_t value) {
    uint64_t zigzag = (uint64_t)value << 1 ^ (uint64_t)(value >> 63);
    for (; zigzag >= 128; zigzag >>= 7) *at++ = zigzag | 128;
    *at++ = zigzag;
    return at;
}

static int varint_size(int64_t value) {
    uint8_t room[10];
    return put_varint(room, value) - room;
}

static uint8_t *put_request_header(uint8_t *at, int api, int version) {
    at = put(at, 0, 4); /* its size, filled in at the end */
    at = put(at, api, 2);
    at = put(at, version, 2);
    at = put(at, 7, 4);
    return put_text(at, "kafka_raw");
}

/* A batch of as many records as fit; returns how many. */
static long make_batch(uint8_t *batch, size_t *batch_bytes, long size, size_t room) {
    struct timespec wall;
    clock_gettime(CLOCK_REALTIME, &wall);
    int64_t stamp = wall.tv_sec * 1000LL;
    uint8_t *at = batch + BATCH_HEADER;
    long count = 0;
    for (;; count++) {
        /* attributes, timestamp delta, offset delta, key (none), value, headers (none) */
        long body = 1 + 1 + varint_size(count) + 1 + varint_size(size) + size + 1;
        if (count > 0 && (size_t)(at - batch) + varint_size(body) + body > room) break;
        at = put_varint(at, body);
        *at++ = 0;
        at = put_varint(at, 0);
        at = put_varint(at, count);
        at = put_varint(at, -1);
        at = put_varint(at, size);
        for (long i = 0; i < size; i++) *at++ = 'a' + (count * 31 + i * 7) % 26;
        at = put_varint(at, 0);
    }
    *batch_bytes = at - batch;
    uint8_t *head = put(batch, 0, 8);
    head = put(head, *batch_bytes - 12, 4);
    head = put(head, -1, 4); /* leader epoch */
    *head++ = 2;
    head += 4; /* crc */
    head = put(head, 0, 2);
    head = put(head, count - 1, 4);
    head = put(head, stamp, 8);
    head = put(head, stamp, 8);
    head = put(head, -1, 8); /* no producer id */
    head = put(head, -1, 2);
    head = put(head, -1, 4);
    put(head, count, 4);
    put(batch + 17, crc32c(batch + 21, *batch_bytes - 21), 4);
    return count;
}

static uint8_t *produce_request(const char *topic, long size, size_t batch_room, size_t *request_size, long *records) {
    uint8_t *request = malloc(batch_room + size + 4096);
    uint8_t *at = put_request_header(request, 0, 7);
    at = put(at, -1, 2);    /* no transactional id */
    at = put(at, -1, 2);    /* acks=all */
    at = put(at, 30000, 4); /* time-out */
    at = put(at, 1, 4);
    at = put_text(at, topic);
    at = put(at, 1, 4);
    at = put(at, 0, 4);
    size_t batch_bytes;
    *records = make_batch(at + 4, &batch_bytes, size, batch_room);
    at = put(at, batch_bytes, 4) + batch_bytes;
    *request_size = at - request;
    put(request, *request_size - 4, 4);
    return request;
}

static void make_fetch_request(struct link *link, const char *topic) {
    uint8_t *at = put_request_header(link->request, 1, 4);
    at = put(at, -1, 4);
    at = put(at, FETCH_WAIT_MS, 4);
    at = put(at, 1, 4);
    at = put(at, FETCH_BYTES, 4);
    *at++ = 0; /* read uncommitted */
    at = put(at, 1, 4);
    at = put_text(at, topic);
    at = put(at, 1, 4);
    at = put(at, 0, 4);
    at = put(at, link->offset, 8);
    at = put(at, FETCH_PARTITION_BYTES, 4);
    link->request_size = at - link->request;
    put(link->request, link->request_size - 4, 4);
}

static int64_t take_produce(const uint8_t *answer, const char *topic, long records) {
    const uint8_t *partition = answer + 8 + 4 + 2 + strlen(topic) + 4;
    if (get(partition + 4, 2) != 0) failures += records;
    return records;
}

/* How many records came; moves the link's offset behind them. */
static int64_t take_fetch(struct link *link, const uint8_t *answer, size_t size, const char *topic) {
    const uint8_t *partition = answer + 12 + 4 + 2 + strlen(topic) + 4;
    if (get(partition + 4, 2) != 0) {
        fprintf(stderr, "fetch: error code %d\n", (int)get(partition + 4, 2));
        exit(1);
    }
    int32_t aborted = get(partition + 22, 4);
    const uint8_t *at = partition + 26 + (aborted > 0 ? aborted * 16 : 0) + 4;
    const uint8_t *end = answer + size;
    int64_t came = 0;
    while (end - at >= BATCH_HEADER) {
        size_t whole = 12 + get(at + 8, 4);
        if ((size_t)(end - at) < whole) break;
        link->offset = get(at, 8) + get(at + 23, 4) + 1;
        came += get(at + 57, 4);
        at += whole;
    }
    return came;
}

static int connect_to(const char *address) {
    char host[256];
    const char *colon = strrchr(address, ':');
    snprintf(host, sizeof host, "%.*s", (int)(colon - address), address);
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(atoi(colon + 1))};
    inet_pton(AF_INET, host, &to.sin_addr);
    int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    if (fd < 0 || connect(fd, (struct sockaddr *)&to, sizeof to) < 0) die("connect");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static int may_send(const struct link *link, int in_flight_max) {
    return link->sent == link->request_size && link->to_send > 0 && link->in_flight < in_flight_max;
}

static void send_some(struct link *link, int in_flight_max, const char *fetch_topic) {
    for (;;) {
        if (link->sent == link->request_size) {
            double time = now();
            if (!may_send(link, in_flight_max) || link->due > time) return;
            if (fetch_topic) make_fetch_request(link, fetch_topic);
            link->sent = 0;
            link->started[(link->oldest + link->in_flight++) % IN_FLIGHT_MAX] = link->interval > 0 ? link->due : time;
            link->due += link->interval;
            if (!fetch_topic) link->to_send--;
        }
        ssize_t gone = send(link->fd, link->request + link->sent, link->request_size - link->sent, MSG_DONTWAIT);
        if (gone < 0 && errno == EAGAIN) return;
        if (gone <= 0) die("send");
        link->sent += gone;
    }
}

/* Reads what there is; calls nothing back: returns how many whole answers lie at the front of link->answer. */
static void receive_some(struct link *link) {
    ssize_t came = recv(link->fd, link->answer + link->received, link->answer_room - link->received, MSG_DONTWAIT);
    if (came < 0 && errno == EAGAIN) return;
    if (came <= 0) die("the broker closed the connection");
    link->received += came;
}

/* How long until a link may send its next request; no longer than 30 s. */
static struct timespec until_next(const struct link *links, int count, int in_flight_max) {
    double time = now(), wait = 30;
    for (int i = 0; i < count; i++)
        if (may_send(&links[i], in_flight_max) && links[i].due - time < wait) wait = links[i].due - time;
    if (wait < 0) wait = 0;
    return (struct timespec){.tv_sec = (time_t)wait, .tv_nsec = (long)((wait - (time_t)wait) * 1e9)};
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

int main(int argc, char **argv) {
    int is_produce = (argc == 9 || argc == 10) && strcmp(argv[1], "produce") == 0;
    if (!is_produce && !(argc == 6 && strcmp(argv[1], "fetch") == 0)) {
        fprintf(stderr, "usage: see the head of kafka_raw.c\n");
        return 2;
    }
    const char *address = argv[2], *topic = argv[3];
    long count = atol(argv[4]), records = 0;
    int links_count = atoi(argv[is_produce ? 7 : 5]), in_flight_max = is_produce ? atoi(argv[8]) : 1;
    double rate = argc == 10 ? atof(argv[9]) : 0;
    if (in_flight_max > IN_FLIGHT_MAX) return 2;
    prctl(PR_SET_TIMERSLACK, 1UL);
    size_t request_size = 0;
    uint8_t *request = NULL;
    if (is_produce) request = produce_request(topic, atol(argv[5]), atol(argv[6]), &request_size, &records);
    struct link *links = calloc(links_count, sizeof *links);
    struct pollfd *polls = calloc(links_count, sizeof *polls);
    long requests = is_produce ? (count / links_count + records - 1) / records : 0;
    long room = is_produce ? requests * links_count : 1000000;
    latencies = malloc(room * sizeof *latencies);
    for (int i = 0; i < links_count; i++) {
        struct link *link = &links[i];
        link->fd = connect_to(address);
        link->request = is_produce ? request : malloc(4096);
        link->sent = link->request_size = request_size;
        link->answer_room = is_produce ? 65536 : FETCH_PARTITION_BYTES * 2 + 65536;
        link->answer = malloc(link->answer_room);
        link->to_send = is_produce ? requests : 1;
        link->to_come = is_produce ? requests * records : count;
        polls[i].fd = link->fd;
    }
    long total = links[0].to_come * links_count;
    double started = now(), counted_from = rate > 0 ? started + UNCOUNTED_S : 0;
    for (int i = 0; rate > 0 && i < links_count; i++) {
        links[i].interval = records * links_count / rate;
        links[i].due = started + links[i].interval * i / links_count;
    }
    int open = links_count;
    for (int i = 0; i < links_count; i++) send_some(&links[i], in_flight_max, is_produce ? NULL : topic);
    while (open > 0) {
        for (int i = 0; i < links_count; i++)
            polls[i].events = POLLIN | (links[i].sent < links[i].request_size ? POLLOUT : 0);
        struct timespec wait = until_next(links, links_count, in_flight_max);
        if (ppoll(polls, links_count, &wait, NULL) <= 0 && wait.tv_sec >= 30) {
            fprintf(stderr, "nothing came for 30 s\n");
            return 1;
        }
        for (int i = 0; i < links_count; i++) {
            struct link *link = &links[i];
            if (polls[i].revents & (POLLIN | POLLERR | POLLHUP)) receive_some(link);
            uint8_t *at = link->answer;
            while (link->received - (at - link->answer) >= 4) {
                size_t whole = 4 + get(at, 4);
                if (whole > link->answer_room) {
                    fprintf(stderr, "an answer of %zu bytes\n", whole);
                    return 1;
                }
                if (link->received - (at - link->answer) < whole) break;
                double began = link->started[link->oldest];
                double took = now() - began;
                if (requests_done < room && began >= counted_from) latencies[requests_done++] = took;
                if (rate > 0 && took > BEHIND_S_MAX) {
                    printf("%.3f 0 %.3f %.3f 0\n", now() - started, took * 1e3, took * 1e3);
                    return 0;
                }
                link->oldest = (link->oldest + 1) % IN_FLIGHT_MAX;
                link->in_flight--;
                link->to_come -= is_produce ? take_produce(at, topic, records) : take_fetch(link, at, whole, topic);
                at += whole;
                if (link->to_come <= 0) {
                    polls[i].fd = -1;
                    link->to_send = 0;
                    open--;
                    break;
                }
            }
            memmove(link->answer, at, link->received - (at - link->answer));
            link->received -= at - link->answer;
            if (polls[i].fd >= 0) send_some(link, in_flight_max, is_produce ? NULL : topic);
        }
    }
    double seconds = now() - started;
    qsort(latencies, requests_done, sizeof *latencies, by_value);
    printf("%.3f %.0f %.3f %.3f %ld\n", seconds, total / seconds, latencies[requests_done / 2] * 1e3,
           latencies[requests_done * 99 / 100] * 1e3, failures);
    return failures != 0;
}
