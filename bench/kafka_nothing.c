/* A server that does nothing: takes Produce requests and answers them without a look, and answers Fetch requests with
 * the batch that was produced last, over and over, from memory.
 *
 *   kafka_nothing PORT
 *
 * For kafka_raw alone (Produce v7, Fetch v4, one partition). One thread, as the load generator has one. What is left is
 * what the system takes to bring the bytes from one program to the other, and the load generator. */
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
#define PRODUCE 0

struct link {
    int fd;
    uint32_t filled; /* of the request; its size comes first */
    uint8_t data[4 + REQUEST_BYTES_MAX];
};

static uint8_t records[2 * FETCH_BYTES]; /* as many copies of a batch as a Fetch may return */
static size_t records_bytes, batch_bytes;

/* The client reads whatever comes, so that waiting for it here is waiting for the system. */
static void write_all(int fd, struct iovec *parts, int count) {
    while (count > 0) {
        ssize_t gone = writev(fd, parts, count);
        if (gone < 0 && errno != EINTR) return; /* it hung up: the next read says so, too */
        for (; count > 0 && gone >= (ssize_t)parts->iov_len; parts++, count--) gone -= parts->iov_len;
        if (count > 0) {
            parts->iov_base = (uint8_t *)parts->iov_base + gone;
            parts->iov_len -= gone;
        }
    }
}

static void keep(const uint8_t *batch, size_t size) {
    batch_bytes = size;
    records_bytes = 0;
    do {
        memcpy(records + records_bytes, batch, size);
        records_bytes += size;
    } while (records_bytes + size <= FETCH_BYTES);
}

static uint8_t *put_head(uint8_t *at, const uint8_t *correlation) {
    at = put(at, 0, 4); /* its size, filled in at the end */
    memcpy(at, correlation, 4);
    return at + 4;
}

static void answer_produce(int fd, const uint8_t *request, const uint8_t *topic, size_t topic_bytes) {
    uint8_t answer[512], *at = put(put_head(answer, request + 4), 1, 4);
    memcpy(at, topic, topic_bytes);
    at = put(put(put(at + topic_bytes, 1, 4), 0, 4), 0, 2);
    at = put(put(put(at, 0, 8), -1, 8), 0, 8); /* base offset, append time, log start */
    at = put(at, 0, 4);
    put(answer, at - answer - 4, 4);
    write_all(fd, &(struct iovec){answer, at - answer}, 1);
}

static void answer_fetch(int fd, const uint8_t *request, const uint8_t *topic, size_t topic_bytes) {
    uint8_t answer[512], *at = put(put(put_head(answer, request + 4), 0, 4), 1, 4);
    memcpy(at, topic, topic_bytes);
    at = put(put(put(at + topic_bytes, 1, 4), 0, 4), 0, 2);
    at = put(put(put(at, 1, 8), 1, 8), 0, 4); /* high watermark, last stable offset, no aborted transactions */
    at = put(at, records_bytes, 4);
    put(answer, at - answer - 4 + records_bytes, 4);
    struct iovec parts[] = {{answer, at - answer}, {records, records_bytes}};
    write_all(fd, parts, 2);
}

static void answer(int fd, const uint8_t *request) {
    const uint8_t *at = request + 10 + get(request + 8, 2); /* behind the client's name */
    int is_produce = get(request, 2) == PRODUCE;
    at += is_produce ? 2 + 2 + 4 + 4 : 4 + 4 + 4 + 4 + 1 + 4;
    size_t topic_bytes = 2 + get(at, 2);
    if (is_produce) {
        const uint8_t *batch = at + topic_bytes + 4 + 4 + 4;
        if (get(batch - 4, 4) != batch_bytes) keep(batch, get(batch - 4, 4));
    }
    (is_produce ? answer_produce : answer_fetch)(fd, request, at, topic_bytes);
}

/* False at the end of the connection. */
static int receive(struct link *link) {
    ssize_t came = recv(link->fd, link->data + link->filled, sizeof link->data - link->filled, MSG_DONTWAIT);
    if (came <= 0) return came < 0 && errno == EAGAIN;
    link->filled += came;
    uint8_t *at = link->data, *end = link->data + link->filled;
    while (end - at >= 4 && (size_t)(end - at) >= 4 + (size_t)get(at, 4)) {
        answer(link->fd, at + 4);
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
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
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
