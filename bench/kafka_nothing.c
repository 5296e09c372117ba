/* A server that does nothing: takes Produce requests and answers them without a look, and answers Fetch requests with
 * the first batch of whoever produced last, over and over, from memory.
 *
 *   kafka_nothing PORT
 *
 * For kafka_raw (Produce v7, Fetch v4) and for librdkafka that produces (ApiVersions, Metadata v1, Produce v7); one
 * partition, and every topic that is asked for is there. Who asks for something else is hung up on, and it is said. One
 * thread, as kafka_raw has one. What is left is what the system takes to bring the bytes from one program to the other,
 * and the load generator. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "kafka_bytes.h"

#define REQUEST_BYTES_MAX (2 << 20)
#define FETCH_BYTES (1 << 20)
#define TOPIC_BYTES_MAX 249
#define TOPICS_MAX 8
#define ANSWER_BYTES_MAX 4096 /* without the records: TOPICS_MAX names, and less than 64 bytes with each */

enum { PRODUCE = 0, FETCH = 1, METADATA = 3, API_VERSIONS = 18 };
enum { OK = 0, UNSUPPORTED_VERSION = 35 };

/* By key. A client takes the highest that it knows, and only those are answered. librdkafka sends the current format of
 * batches where it sees Produce v3 and Fetch v4, and zstd where it sees Produce v7 and Fetch v10, so these are in. */
static const uint16_t offered[][3] = {{PRODUCE, 3, 7}, {FETCH, 4, 10}, {METADATA, 1, 1}, {API_VERSIONS, 0, 0}};
#define OFFERED (sizeof offered / sizeof *offered)

struct link {
    int fd;
    int has_produced;
    uint32_t filled; /* of the request; its size comes first */
    uint8_t data[4 + REQUEST_BYTES_MAX];
};

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

static uint16_t port;

static uint8_t records[2 * FETCH_BYTES]; /* as many copies of a batch as a Fetch may return */
static size_t records_bytes;

/* The client reads whatever comes, so that waiting for it here is waiting for the system. */
static void write_all(int fd, struct iovec *parts, int count) {
    while (count > 0) {
        ssize_t gone = writev(fd, parts, count);
        if (gone < 0 && errno == EINTR) continue;
        if (gone < 0) return; /* it hung up: the next read says so, too */
        for (; count > 0 && gone >= (ssize_t)parts->iov_len; parts++, count--) gone -= parts->iov_len;
        if (count > 0) {
            parts->iov_base = (uint8_t *)parts->iov_base + gone;
            parts->iov_len -= gone;
        }
    }
}

static void keep(const uint8_t *batch, size_t size) {
    records_bytes = 0;
    do {
        memcpy(records + records_bytes, batch, size);
        records_bytes += size;
    } while (records_bytes + size <= FETCH_BYTES);
}

static const uint8_t *take(struct request *request, size_t bytes) {
    static const uint8_t zeros[16];
    if ((size_t)(request->end - request->at) < bytes) {
        request->is_refused = 1;
        return zeros;
    }
    request->at += bytes;
    return request->at - bytes;
}

static uint64_t take_number(struct request *request, int bytes) { return get(take(request, bytes), bytes); }

static struct text take_topic(struct request *request) {
    const uint8_t *at = request->at;
    size_t bytes = take_number(request, 2);
    take(request, bytes);
    if (bytes > TOPIC_BYTES_MAX) request->is_refused = 1;
    return (struct text){at, 2 + bytes};
}

static uint8_t *put_head(uint8_t *at, const struct request *request) {
    at = put(at, 0, 4); /* its size, filled in at the end */
    memcpy(at, request->correlation, 4);
    return at + 4;
}

static uint8_t *put_topic(uint8_t *at, struct text topic) {
    memcpy(at, topic.at, topic.bytes);
    return at + topic.bytes;
}

/* And the records behind it, if there are any. */
static void send_answer(int fd, uint8_t *answer, const uint8_t *end, size_t records_sent) {
    put(answer, end - answer - 4 + records_sent, 4);
    struct iovec parts[] = {{answer, end - answer}, {records, records_sent}};
    write_all(fd, parts, 2);
}

static void answer_api_versions(int fd, const struct request *request) {
    uint8_t answer[ANSWER_BYTES_MAX], *at = put_head(answer, request);
    at = put(at, request->version == 0 ? OK : UNSUPPORTED_VERSION, 2); /* it asks again, then, with v0 */
    at = put(at, OFFERED, 4);
    for (size_t i = 0; i < OFFERED; i++)
        for (int j = 0; j < 3; j++) at = put(at, offered[i][j], 2);
    send_answer(fd, answer, at, 0);
}

static void answer_metadata(int fd, struct request *request) {
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
    send_answer(fd, answer, at, 0);
}

static void answer_produce(struct link *link, struct request *request) {
    take(request, 2 + 2 + 4 + 4); /* transactional id, acks, time-out, topics */
    struct text topic = take_topic(request);
    take(request, 4 + 4); /* partitions, partition */
    size_t size = take_number(request, 4);
    const uint8_t *batch = take(request, size);
    if (size == 0) request->is_refused = 1;
    if (request->is_refused) return;
    if (!link->has_produced) keep(batch, size);
    link->has_produced = 1;
    uint8_t answer[ANSWER_BYTES_MAX], *at = put_topic(put(put_head(answer, request), 1, 4), topic);
    at = put(put(put(at, 1, 4), 0, 4), OK, 2);
    at = put(put(put(at, 0, 8), -1, 8), 0, 8); /* base offset, append time, log start */
    send_answer(link->fd, answer, put(at, 0, 4), 0);
}

static void answer_fetch(int fd, struct request *request) {
    take(request, 4 + 4 + 4 + 4 + 1 + 4); /* replica, wait, bytes at least and at most, isolation, topics */
    struct text topic = take_topic(request);
    if (request->is_refused) return;
    uint8_t answer[ANSWER_BYTES_MAX], *at = put_topic(put(put(put_head(answer, request), 0, 4), 1, 4), topic);
    at = put(put(put(at, 1, 4), 0, 4), OK, 2);
    at = put(put(put(at, 1, 8), 1, 8), 0, 4); /* high watermark, last stable offset, no aborted transactions */
    send_answer(fd, answer, put(at, records_bytes, 4), records_bytes);
}

/* False for a request that is not understood. */
static int answer(struct link *link, const uint8_t *data, size_t size) {
    struct request request = {.at = data, .end = data + size};
    request.api = take_number(&request, 2);
    request.version = take_number(&request, 2);
    request.correlation = take(&request, 4);
    uint16_t name_bytes = take_number(&request, 2);
    take(&request, name_bytes == UINT16_MAX ? 0 : name_bytes); /* of the client */
    int api = request.is_refused ? -1 : request.api, version = request.version;
    if (api == API_VERSIONS)
        answer_api_versions(link->fd, &request);
    else if (api == METADATA && version == 1)
        answer_metadata(link->fd, &request);
    else if (api == PRODUCE && version == 7)
        answer_produce(link, &request);
    else if (api == FETCH && version == 4)
        answer_fetch(link->fd, &request);
    else
        request.is_refused = 1;
    if (request.is_refused) fprintf(stderr, "refused: request %d v%d, %zu bytes\n", request.api, request.version, size);
    return !request.is_refused;
}

/* False at the end of the connection. */
static int receive(struct link *link) {
    ssize_t came = recv(link->fd, link->data + link->filled, sizeof link->data - link->filled, MSG_DONTWAIT);
    if (came <= 0) return came < 0 && errno == EAGAIN;
    link->filled += came;
    uint8_t *at = link->data, *end = link->data + link->filled;
    while (end - at >= 4 && (size_t)(end - at) >= 4 + (size_t)get(at, 4)) {
        if (!answer(link, at + 4, get(at, 4))) return 0;
        at += 4 + get(at, 4);
    }
    if (at > link->data) memmove(link->data, at, end - at);
    link->filled = end - at;
    return link->filled < 4 || get(link->data, 4) <= REQUEST_BYTES_MAX;
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: see the head of kafka_nothing.c\n");
        return 2;
    }
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1, events = epoll_create1(0);
    port = atoi(argv[1]);
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(port)};
    here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&here, sizeof here) < 0 || listen(listener, 100) < 0) die("bind");
    struct epoll_event event = {.events = EPOLLIN};
    epoll_ctl(events, EPOLL_CTL_ADD, listener, &event);
    signal(SIGPIPE, SIG_IGN);
    for (;;) {
        struct epoll_event ready[64];
        int count = epoll_wait(events, ready, 64, -1);
        for (int i = 0; i < count; i++) {
            struct link *link = ready[i].data.ptr;
            if (link) {
                if (!receive(link)) {
                    close(link->fd);
                    free(link);
                }
                continue;
            }
            link = calloc(1, sizeof *link);
            link->fd = accept(listener, NULL, NULL);
            if (link->fd < 0) die("accept");
            setsockopt(link->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            event.data.ptr = link;
            epoll_ctl(events, EPOLL_CTL_ADD, link->fd, &event);
        }
    }
}
