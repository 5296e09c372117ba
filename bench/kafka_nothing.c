/* A server that does nothing: takes Produce requests and answers them without a look, and answers Fetch requests with
 * the first batch of the last producer, repeatedly, from memory.
 *
 *   kafka_nothing PORT
 *
 * For kafka_raw (Produce v7, Fetch v4) and for librdkafka that produces (ApiVersions, Metadata v1, Produce v7). Any
 * other request is reported and closes the connection. One thread, as kafka_raw has one. What is left is what the system
 * takes to bring the bytes from one program to the other, and the load generator. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include "kafka_server.h"

#define FETCH_BYTES (1 << 20)

struct link {
    int fd;
    int has_produced;
    uint32_t filled; /* of the request; its size comes first */
    uint8_t data[4 + REQUEST_BYTES_MAX];
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

static void take_batch(struct link *link, struct request *request) {
    struct produced produced = take_produced(request);
    if (produced.batch_bytes == 0) request->is_refused = 1;
    if (request->is_refused) return;
    if (!link->has_produced) keep(produced.batch, produced.batch_bytes);
    link->has_produced = 1;
    answer_produce(link->fd, request, produced.topic);
}

static void answer_fetch(int fd, struct request *request) {
    take(request, 4 + 4 + 4 + 4 + 1 + 4); /* replica, wait, bytes at least and at most, isolation, topics */
    struct text topic = take_topic(request);
    if (request->is_refused) return;
    uint8_t answer[ANSWER_BYTES_MAX], *at = put_topic(put(put(put_head(answer, request), 0, 4), 1, 4), topic);
    at = put(put(put(at, 1, 4), 0, 4), OK, 2);
    at = put(put(put(at, 1, 8), 1, 8), 0, 4); /* high watermark, last stable offset, no aborted transactions */
    at = put(at, records_bytes, 4);
    put(answer, at - answer - 4 + records_bytes, 4);
    struct iovec parts[] = {{answer, at - answer}, {records, records_bytes}};
    write_all(fd, parts, 2);
}

/* False for a request that is not understood. */
static int answer(struct link *link, const uint8_t *data, size_t size) {
    struct request request = take_request(data, size);
    if (request.api == API_VERSIONS && !request.is_refused)
        answer_api_versions(link->fd, &request);
    else if (is_for(&request, METADATA, 1))
        answer_metadata(link->fd, &request, port);
    else if (is_for(&request, PRODUCE, 7))
        take_batch(link, &request);
    else if (is_for(&request, FETCH, 4))
        answer_fetch(link->fd, &request);
    else
        request.is_refused = 1;
    if (request.is_refused) say_refused(&request);
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
    port = atoi(argv[1]);
    int listener = listen_at(port), events = epoll_create1(0);
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
            link->fd = accept_from(listener, 0);
            event.data.ptr = link;
            epoll_ctl(events, EPOLL_CTL_ADD, link->fd, &event);
        }
    }
}
