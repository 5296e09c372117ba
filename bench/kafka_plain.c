/* The least that keeps the promise of an acknowledgement, in the plainest way: take a Produce request, check its batch
 * (the checksum, and that zstd data can be decompressed, as brokers do), write it, fdatasync, answer. No look at the
 * records themselves, no index, no offsets, no names. A mark to measure by, not a bound: its file grows, for
 * instance, where a journal that was written before is synced faster.
 *
 *   kafka_plain PORT FILE
 *
 * For kafka_raw and for librdkafka that produces (ApiVersions, Metadata v1, Produce v7 of one batch); it ends where it
 * is asked for something else. One thread receives; another writes what has arrived meanwhile, has the disk begin with
 * each megabyte, syncs once for all of it, and answers. Buffers are used again. SIGHUP has it begin its file anew. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <nmmintrin.h>
#include <pthread.h>
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

#define FIRST_READ_BYTES (32 << 10)
#define PARTS_MAX 512
#define PIECE_BYTES (1 << 20)
#define CRC_AT 17
#define CHECKED_FROM 21
#define RECORDS_AT 61
#define CODEC_BITS 7
#define ZSTD 4
#define DECOMPRESSED_BYTES_MAX (16 << 20)

struct arrival {
    struct arrival *next;
    int fd;
    uint32_t size, filled;
    uint8_t *data; /* without its size */
    struct request request;
    struct produced produced; /* nothing, unless it is a Produce request */
};

struct link {
    int fd;
    struct arrival *half;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t arrived = PTHREAD_COND_INITIALIZER;
static struct arrival *waiting, **last_waiting = &waiting, *unused;
static uint16_t port;
static int file;
static long long position;
static volatile sig_atomic_t is_to_begin_anew;

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

/* Of the system's library, whose headers need not be there. */
static void *zstd_context;
static size_t (*zstd_decompress)(void *, void *, size_t, const void *, size_t);
static unsigned (*zstd_is_error)(size_t);

static void find_zstd(void) {
    void *library = dlopen("libzstd.so.1", RTLD_NOW);
    if (!library) return;
    void *(*create)(void) = (void *(*)(void))dlsym(library, "ZSTD_createDCtx");
    zstd_decompress = (size_t(*)(void *, void *, size_t, const void *, size_t))dlsym(library, "ZSTD_decompressDCtx");
    zstd_is_error = (unsigned (*)(size_t))dlsym(library, "ZSTD_isError");
    if (!create || !zstd_decompress || !zstd_is_error) die("libzstd.so.1");
    zstd_context = create();
}

static void check(const uint8_t *batch, size_t bytes) {
    static uint8_t decompressed[DECOMPRESSED_BYTES_MAX];
    if (bytes <= RECORDS_AT) die("a batch without records");
    if (crc32c(batch + CHECKED_FROM, bytes - CHECKED_FROM) != get(batch + CRC_AT, 4))
        die("a batch with a wrong checksum");
    int codec = batch[CHECKED_FROM + 1] & CODEC_BITS;
    if (codec == 0) return;
    if (codec != ZSTD || !zstd_context) die("a codec that is not to be had here");
    const uint8_t *records = batch + RECORDS_AT;
    if (zstd_is_error(zstd_decompress(zstd_context, decompressed, sizeof decompressed, records, bytes - RECORDS_AT)))
        die("a batch that cannot be decompressed");
}

static void take_apart(struct arrival *arrival) {
    struct request request = take_request(arrival->data, arrival->size);
    if (is_for(&request, PRODUCE, 7)) {
        struct produced produced = take_produced(&request);
        if (request.is_refused) die("a Produce request that is shorter than it says");
        check(produced.batch, produced.batch_bytes);
        arrival->produced = produced;
    }
    arrival->request = request;
}

static void begin_anew(int unneeded) {
    (void)unneeded;
    is_to_begin_anew = 1;
}

/* Whether there was anything to write. */
static int write_all(const struct arrival *all) {
    if (is_to_begin_anew) {
        is_to_begin_anew = 0;
        if (ftruncate(file, position = 0) < 0) die("truncate");
    }
    struct iovec parts[PARTS_MAX];
    int count = 0, has_written = 0;
    ssize_t bytes = 0;
    for (const struct arrival *one = all; one; one = one->next) {
        if (one->produced.batch) {
            parts[count++] = (struct iovec){(uint8_t *)one->produced.batch, one->produced.batch_bytes};
            bytes += one->produced.batch_bytes;
        }
        if (count == 0 || (one->next && count < PARTS_MAX && bytes < PIECE_BYTES)) continue;
        if (pwritev(file, parts, count, position) != bytes) die("write");
        if (bytes >= PIECE_BYTES) sync_file_range(file, position & ~4095LL, bytes, SYNC_FILE_RANGE_WRITE);
        position += bytes;
        count = bytes = 0;
        has_written = 1;
    }
    return has_written;
}

static void answer(struct arrival *arrival) {
    struct request *request = &arrival->request;
    if (arrival->produced.batch)
        answer_produce(arrival->fd, request, arrival->produced.topic);
    else if (request->api == API_VERSIONS && !request->is_refused)
        answer_api_versions(arrival->fd, request);
    else if (is_for(request, METADATA, 1))
        answer_metadata(arrival->fd, request, port);
    else
        request->is_refused = 1;
    if (request->is_refused) {
        say_refused(request);
        exit(1);
    }
}

static void *write_and_answer(void *unneeded) {
    for (;;) {
        pthread_mutex_lock(&lock);
        while (!waiting) pthread_cond_wait(&arrived, &lock);
        struct arrival *all = waiting, *last = all;
        waiting = NULL;
        last_waiting = &waiting;
        pthread_mutex_unlock(&lock);
        if (write_all(all) && fdatasync(file) < 0) die("fdatasync");
        for (struct arrival *one = all; one; last = one, one = one->next) answer(one);
        pthread_mutex_lock(&lock);
        last->next = unused;
        unused = all;
        pthread_mutex_unlock(&lock);
    }
    return unneeded;
}

static struct arrival *begin(int fd, uint32_t size) {
    if (size > REQUEST_BYTES_MAX) die("a request of more than 2 MB");
    pthread_mutex_lock(&lock);
    struct arrival *arrival = unused;
    if (arrival) unused = arrival->next;
    pthread_mutex_unlock(&lock);
    if (!arrival) {
        arrival = malloc(sizeof *arrival);
        arrival->data = malloc(REQUEST_BYTES_MAX);
    }
    *arrival = (struct arrival){.fd = fd, .size = size, .data = arrival->data};
    return arrival;
}

static void end(struct arrival *arrival) {
    take_apart(arrival);
    pthread_mutex_lock(&lock);
    if (!waiting) pthread_cond_signal(&arrived);
    *last_waiting = arrival;
    last_waiting = &arrival->next;
    pthread_mutex_unlock(&lock);
}

/* False at the end of the connection. */
static int receive(struct link *link) {
    static uint8_t first[FIRST_READ_BYTES + 4];
    struct arrival *half = link->half;
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
        struct arrival *arrival = begin(link->fd, get(at, 4));
        at += 4;
        arrival->filled = (size_t)(behind - at) < arrival->size ? (uint32_t)(behind - at) : arrival->size;
        memcpy(arrival->data, at, arrival->filled);
        at += arrival->filled;
        if (arrival->filled == arrival->size)
            end(arrival);
        else
            link->half = arrival;
    }
    return 1;
}

int main(int argc, char **argv) {
    if (argc != 3) {
        fprintf(stderr, "usage: see the head of kafka_plain.c\n");
        return 2;
    }
    find_zstd();
    file = open(argv[2], O_RDWR | O_CREAT | O_TRUNC, 0600);
    if (file < 0) die(argv[2]);
    port = atoi(argv[1]);
    int listener = listen_at(port), events = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN};
    epoll_ctl(events, EPOLL_CTL_ADD, listener, &event);
    signal(SIGHUP, begin_anew);
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
            link->fd = accept_from(listener, SOCK_NONBLOCK);
            event.data.ptr = link;
            epoll_ctl(events, EPOLL_CTL_ADD, link->fd, &event);
        }
    }
}
