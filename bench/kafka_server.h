/* What the servers here that are no brokers have in common: how a request is taken apart, and the answers to what
 * librdkafka asks before it produces. One partition, and every topic that is asked for is there. */
#ifndef HEADRACE_BENCH_KAFKA_SERVER_H
#define HEADRACE_BENCH_KAFKA_SERVER_H

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "kafka_bytes.h"

#define REQUEST_BYTES_MAX (2 << 20)
#define TOPIC_BYTES_MAX 249
#define TOPICS_MAX 8
#define ANSWER_BYTES_MAX 4096 /* without records: TOPICS_MAX names, and less than 64 bytes with each */

enum { PRODUCE = 0, FETCH = 1, METADATA = 3, API_VERSIONS = 18 };
enum { OK = 0, UNSUPPORTED_VERSION = 35 };

/* By key. A client takes the highest that it knows, and only those are answered. librdkafka sends the current format of
 * batches where it sees Produce v3 and Fetch v4, and zstd where it sees Produce v7 and Fetch v10, so these are in. */
static const uint16_t offered[][3] = {{PRODUCE, 3, 7}, {FETCH, 4, 10}, {METADATA, 1, 1}, {API_VERSIONS, 0, 0}};
#define OFFERED (sizeof offered / sizeof *offered)

struct request {
    const uint8_t *at, *end; /* what is left of it */
    const uint8_t *correlation;
    int api, version;
    int is_refused; /* shorter than it says, or more than is answered here */
};

struct text { /* with its size before it, as it is sent */
    const uint8_t *at;
    size_t bytes;
};

struct produced {
    struct text topic;
    const uint8_t *batch;
    size_t batch_bytes;
};

static inline const uint8_t *take(struct request *request, size_t bytes) {
    static const uint8_t zeros[16];
    if ((size_t)(request->end - request->at) < bytes) {
        request->is_refused = 1;
        return zeros;
    }
    request->at += bytes;
    return request->at - bytes;
}

static inline uint64_t take_number(struct request *request, int bytes) { return get(take(request, bytes), bytes); }

static inline struct text take_topic(struct request *request) {
    const uint8_t *at = request->at;
    size_t bytes = take_number(request, 2);
    take(request, bytes);
    if (bytes > TOPIC_BYTES_MAX) request->is_refused = 1;
    return (struct text){at, 2 + bytes};
}

/* Its head, up to what is of its kind alone. */
static inline struct request take_request(const uint8_t *data, size_t size) {
    struct request request = {.at = data, .end = data + size};
    request.api = take_number(&request, 2);
    request.version = take_number(&request, 2);
    request.correlation = take(&request, 4);
    uint16_t name_bytes = take_number(&request, 2);
    take(&request, name_bytes == UINT16_MAX ? 0 : name_bytes); /* of the client */
    return request;
}

static inline int is_for(const struct request *request, int api, int version) {
    return !request->is_refused && request->api == api && request->version == version;
}

static inline void say_refused(const struct request *request) {
    fprintf(stderr, "refused: request %d v%d\n", request->api, request->version);
}

static inline struct produced take_produced(struct request *request) {
    take(request, 2 + 2 + 4 + 4); /* transactional id, acks, time-out, topics */
    struct produced found = {.topic = take_topic(request)};
    take(request, 4 + 4); /* partitions, partition */
    found.batch_bytes = take_number(request, 4);
    found.batch = take(request, found.batch_bytes);
    return found;
}

static inline uint8_t *put_head(uint8_t *at, const struct request *request) {
    at = put(at, 0, 4); /* its size, filled in at the end */
    memcpy(at, request->correlation, 4);
    return at + 4;
}

static inline uint8_t *put_topic(uint8_t *at, struct text topic) {
    memcpy(at, topic.at, topic.bytes);
    return at + topic.bytes;
}

/* A closed connection is noticed at the next read. */
static inline void send_answer(int fd, uint8_t *answer, const uint8_t *end) {
    put(answer, end - answer - 4, 4);
    if (send(fd, answer, end - answer, MSG_NOSIGNAL) < 0 && errno != EPIPE && errno != ECONNRESET) die("send");
}

static inline void answer_api_versions(int fd, const struct request *request) {
    uint8_t answer[ANSWER_BYTES_MAX], *at = put_head(answer, request);
    at = put(at, request->version == 0 ? OK : UNSUPPORTED_VERSION, 2); /* it asks again, then, with v0 */
    at = put(at, OFFERED, 4);
    for (size_t i = 0; i < OFFERED; i++)
        for (int j = 0; j < 3; j++) at = put(at, offered[i][j], 2);
    send_answer(fd, answer, at);
}

static inline void answer_metadata(int fd, struct request *request, uint16_t port) {
    static const char host[] = "127.0.0.1";
    uint8_t answer[ANSWER_BYTES_MAX], *at = put(put_head(answer, request), 1, 4);
    at = put(put(at, 1, 4), sizeof host - 1, 2); /* node id */
    memcpy(at, host, sizeof host - 1);
    at = put(put(at + sizeof host - 1, port, 4), -1, 2); /* no rack */
    at = put(at, 1, 4);                                  /* controller */
    uint32_t topics = take_number(request, 4);
    if (topics == UINT32_MAX) topics = 0; /* all that there are */
    if (topics > TOPICS_MAX) request->is_refused = 1;
    if (request->is_refused) return;
    at = put(at, topics, 4);
    for (uint32_t i = 0; i < topics; i++) {
        struct text topic = take_topic(request);
        if (request->is_refused) return;
        at = put_topic(put(at, OK, 2), topic);
        at = put(put(at, 0, 1), 1, 4);             /* not internal; partitions */
        at = put(put(put(at, OK, 2), 0, 4), 1, 4); /* partition, leader */
        at = put(put(at, 1, 4), 1, 4);             /* replicas */
        at = put(put(at, 1, 4), 1, 4);             /* those in sync */
    }
    send_answer(fd, answer, at);
}

static inline void answer_produce(int fd, const struct request *request, struct text topic) {
    uint8_t answer[ANSWER_BYTES_MAX], *at = put_topic(put(put_head(answer, request), 1, 4), topic);
    at = put(put(put(at, 1, 4), 0, 4), OK, 2);
    at = put(put(put(at, 0, 8), -1, 8), 0, 8); /* base offset, append time, log start */
    send_answer(fd, answer, put(at, 0, 4));    /* not throttled */
}

static inline int listen_at(uint16_t port) {
    int listener = socket(AF_INET, SOCK_STREAM, 0);
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(port)};
    here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&here, sizeof here) < 0 || listen(listener, 100) < 0) die("bind");
    return listener;
}

static inline int accept_from(int listener, int flags) {
    int fd = accept4(listener, NULL, NULL, flags), one = 1;
    if (fd < 0) die("accept");
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

#endif
