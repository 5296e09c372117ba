/* The least that keeps the promise of an acknowledgement, in the plainest way: take a Produce request, check its batch,
 * write it, fdatasync, answer. No index, no offsets, no names. A mark to measure by, not a bound: its file grows, for
 * instance, where a journal that was written before is synced faster.
 *
 *   kafka_plain PORT FILE
 *
 * For kafka_raw alone (Produce v7, one batch, one partition). One thread receives; another writes what has arrived
 * meanwhile, has the disk begin with each megabyte, syncs once for all of it, and answers. Buffers are used again. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <nmmintrin.h>
#include <pthread.h>
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
#define FIRST_READ_BYTES (32 << 10)
#define PARTS_MAX 512
#define PIECE_BYTES (1 << 20)
#define CRC_AT 17
#define CHECKED_FROM 21

struct request {
    struct request *next;
    int fd;
    uint32_t size, filled;
    uint8_t *data; /* without its size */
};

struct link {
    int fd;
    struct request *half;
};

struct produced {
    const uint8_t *topic; /* with its length */
    int topic_bytes;
    uint8_t *batch;
    size_t batch_bytes;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t arrived = PTHREAD_COND_INITIALIZER;
static struct request *waiting, **last_waiting = &waiting, *unused;
static int file;
static long long position;

static uint32_t crc32c(const uint8_t *at, size_t size) {
    uint64_t crc = 0xFFFFFFFF;
    for (; size >= 8; size -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        crc = _mm_crc32_u64(crc, word);
    }
    while (size--) crc = _mm_crc32_u8(crc, *at++);
    return ~crc;
}

static struct produced parse(const struct request *request) {
    uint8_t *at = request->data + 8;
    at += 2 + get(at, 2);    /* client id */
    at += 2 + 2 + 4 + 4;     /* no transactional id, acks, time-out, number of topics */
    struct produced found = {.topic = at, .topic_bytes = 2 + get(at, 2)};
    at += found.topic_bytes + 4 + 4; /* number of partitions, partition */
    found.batch_bytes = get(at, 4);
    found.batch = at + 4;
    return found;
}

static void write_all(const struct request *all) {
    struct iovec parts[PARTS_MAX];
    int count = 0;
    ssize_t bytes = 0;
    for (const struct request *one = all; one; one = one->next) {
        struct produced produced = parse(one);
        parts[count++] = (struct iovec){produced.batch, produced.batch_bytes};
        bytes += produced.batch_bytes;
        if (one->next && count < PARTS_MAX && bytes < PIECE_BYTES) continue;
        if (pwritev(file, parts, count, position) != bytes) die("write");
        if (bytes >= PIECE_BYTES) sync_file_range(file, position & ~4095LL, bytes, SYNC_FILE_RANGE_WRITE);
        position += bytes;
        count = bytes = 0;
    }
}

static void answer(const struct request *request) {
    struct produced produced = parse(request);
    uint8_t room[512], *at = put(room, 0, 4);
    memcpy(at, request->data + 4, 4); /* correlation id */
    at = put(at + 4, 1, 4);
    memcpy(at, produced.topic, produced.topic_bytes);
    at = put(at + produced.topic_bytes, 1, 4);
    memset(at, 0, 4 + 2 + 8 + 8 + 8 + 4); /* partition, no error, offset, time, start, no throttling */
    at += 4 + 2 + 8 + 8 + 8 + 4;
    put(room, at - room - 4, 4);
    if (send(request->fd, room, at - room, MSG_NOSIGNAL) < 0 && errno != EPIPE && errno != ECONNRESET) die("send");
}

static void *write_and_answer(void *unneeded) {
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!waiting) pthread_cond_wait(&arrived, &lock);
        struct request *all = waiting, *last = all;
        waiting = NULL;
        last_waiting = &waiting;
        pthread_mutex_unlock(&lock);
        write_all(all);
        if (fdatasync(file) < 0) die("fdatasync");
        for (struct request *one = all; one; last = one, one = one->next) answer(one);
        pthread_mutex_lock(&lock);
        last->next = unused;
        unused = all;
        pthread_mutex_unlock(&lock);
    }
    return unneeded;
}

static struct request *begin(int fd, uint32_t size) {
    if (size > REQUEST_BYTES_MAX) die("a request of more than 2 MB");
    pthread_mutex_lock(&lock);
    struct request *request = unused;
    if (request) unused = request->next;
    pthread_mutex_unlock(&lock);
    if (!request) {
        request = malloc(sizeof *request);
        request->data = malloc(REQUEST_BYTES_MAX);
    }
    *request = (struct request){.fd = fd, .size = size, .data = request->data};
    return request;
}

static void end(struct request *request) {
    struct produced produced = parse(request);
    if (crc32c(produced.batch + CHECKED_FROM, produced.batch_bytes - CHECKED_FROM) != get(produced.batch + CRC_AT, 4))
        die("a batch with a wrong checksum");
    pthread_mutex_lock(&lock);
    if (!waiting) pthread_cond_signal(&arrived);
    *last_waiting = request;
    last_waiting = &request->next;
    pthread_mutex_unlock(&lock);
}

/* False at the end of the connection. */
static int receive(struct link *link) {
    static uint8_t first[FIRST_READ_BYTES + 4];
    struct request *half = link->half;
    if (half) {
        ssize_t came = recv(link->fd, half->data + half->filled, half->size - half->filled, 0);
        if (came <= 0) return came < 0 && errno == EAGAIN;
        half->filled += came;
        if (half->filled < half->size) return 1;
        link->half = NULL;
        end(half);
        return 1;
    }
    ssize_t came = recv(link->fd, first, FIRST_READ_BYTES, 0);
    if (came <= 0) return came < 0 && errno == EAGAIN;
    uint8_t *at = first, *behind = first + came;
    while (at < behind) {
        while (behind - at < 4) { /* the rest of a size comes at once */
            came = recv(link->fd, behind, 4 - (behind - at), 0);
            if (came == 0 || (came < 0 && errno != EAGAIN)) return 0;
            behind += came > 0 ? came : 0;
        }
        struct request *request = begin(link->fd, get(at, 4));
        at += 4;
        request->filled = (size_t)(behind - at) < request->size ? (uint32_t)(behind - at) : request->size;
        memcpy(request->data, at, request->filled);
        at += request->filled;
        if (request->filled == request->size)
            end(request);
        else
            link->half = request;
    }
    return 1;
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: see the head of kafka_plain.c\n");
        return 2;
    }
    file = open(argv[2], O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (file < 0) die(argv[2]);
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(listener, (struct sockaddr *)&here, sizeof here) < 0 || listen(listener, 100) < 0) die("bind");
    int events = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN};
    epoll_ctl(events, EPOLL_CTL_ADD, listener, &event);
    pthread_t writer;
    pthread_create(&writer, NULL, write_and_answer, NULL);
    for (;;) {
        struct epoll_event ready[64];
        int count = epoll_wait(events, ready, 64, -1);
        for (int i = 0; i < count; i++) {
            struct link *link = ready[i].data.ptr;
            if (link) {
                if (!receive(link)) close(link->fd);
                continue;
            }
            link = calloc(1, sizeof *link);
            link->fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK);
            setsockopt(link->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
            event.data.ptr = link;
            epoll_ctl(events, EPOLL_CTL_ADD, link->fd, &event);
        }
    }
}
