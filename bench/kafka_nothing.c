/* What nobody can be faster than: takes Produce requests and answers them without a look, and answers Fetch requests
 * with the batch that was produced last, over and over, from memory by sendfile.
 *
 *   kafka_nothing PORT
 *
 * For kafka_raw alone (Produce v7, Fetch v4, one partition). A thread for each connection. What is left is what the
 * system takes to bring the bytes from one program to the other, and the load generator. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <unistd.h>

#define REQUEST_BYTES_MAX (2 << 20)
#define FETCH_BYTES (1 << 20)
#define PRODUCE 0

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int records; /* a file with as many copies of a batch as a Fetch may return */
static size_t records_bytes, batch_bytes;

static void die(const char *what) {
    perror(what);
    exit(1);
}

static uint32_t get(const uint8_t *at, int bytes) {
    uint32_t value = 0;
    for (int i = 0; i < bytes; i++) value = value << 8 | at[i];
    return value;
}

static uint8_t *put(uint8_t *at, uint64_t value, int bytes) {
    for (int i = bytes - 1; i >= 0; i--) *at++ = value >> (8 * i);
    return at;
}

static int read_all(int fd, uint8_t *to, size_t size) {
    while (size > 0) {
        ssize_t came = recv(fd, to, size, 0);
        if (came <= 0) return 0;
        to += came;
        size -= came;
    }
    return 1;
}

static int write_all(int fd, const uint8_t *from, size_t size, int flags) {
    while (size > 0) {
        ssize_t gone = send(fd, from, size, flags | MSG_NOSIGNAL);
        if (gone <= 0) return 0;
        from += gone;
        size -= gone;
    }
    return 1;
}

/* Only when batches of another size come: nobody reads meanwhile. */
static void keep(const uint8_t *batch, size_t size) {
    pthread_mutex_lock(&lock);
    if (size != batch_bytes) {
        batch_bytes = size;
        records_bytes = 0;
        if (ftruncate(records, 0) < 0) die("ftruncate");
        do {
            if (pwrite(records, batch, size, records_bytes) != (ssize_t)size) die("pwrite");
            records_bytes += size;
        } while (records_bytes + size <= FETCH_BYTES);
    }
    pthread_mutex_unlock(&lock);
}

static uint8_t *put_head(uint8_t *at, const uint8_t *correlation) {
    at = put(at, 0, 4); /* its size, filled in at the end */
    memcpy(at, correlation, 4);
    return at + 4;
}

static int answer_produce(int fd, const uint8_t *request, const uint8_t *topic, size_t topic_bytes) {
    uint8_t answer[512], *at = put(put_head(answer, request + 4), 1, 4);
    memcpy(at, topic, topic_bytes);
    at = put(put(put(at + topic_bytes, 1, 4), 0, 4), 0, 2);
    at = put(put(put(at, 0, 8), -1, 8), 0, 8); /* base offset, append time, log start */
    at = put(at, 0, 4);
    put(answer, at - answer - 4, 4);
    return write_all(fd, answer, at - answer, 0);
}

static int answer_fetch(int fd, const uint8_t *request, const uint8_t *topic, size_t topic_bytes) {
    uint8_t answer[512], *at = put(put(put_head(answer, request + 4), 0, 4), 1, 4);
    memcpy(at, topic, topic_bytes);
    at = put(put(put(at + topic_bytes, 1, 4), 0, 4), 0, 2);
    at = put(put(put(at, 1, 8), 1, 8), 0, 4); /* high watermark, last stable offset, no aborted transactions */
    at = put(at, records_bytes, 4);
    put(answer, at - answer - 4 + records_bytes, 4);
    if (!write_all(fd, answer, at - answer, MSG_MORE)) return 0;
    for (off_t sent = 0; (size_t)sent < records_bytes;)
        if (sendfile(fd, records, &sent, records_bytes - sent) <= 0) return 0;
    return 1;
}

static void *serve(void *link) {
    int fd = (int)(intptr_t)link, is_open = 1;
    uint8_t *request = malloc(REQUEST_BYTES_MAX), size[4];
    while (is_open && read_all(fd, size, 4) && get(size, 4) <= REQUEST_BYTES_MAX && read_all(fd, request, get(size, 4))) {
        const uint8_t *at = request + 10 + get(request + 8, 2); /* behind the client's name */
        int is_produce = get(request, 2) == PRODUCE;
        at += is_produce ? 2 + 2 + 4 + 4 : 4 + 4 + 4 + 4 + 1 + 4;
        size_t topic_bytes = 2 + get(at, 2);
        if (is_produce) {
            const uint8_t *batch = at + topic_bytes + 4 + 4 + 4;
            if (get(batch - 4, 4) != batch_bytes) keep(batch, get(batch - 4, 4));
        }
        is_open = (is_produce ? answer_produce : answer_fetch)(fd, request, at, topic_bytes);
    }
    free(request);
    close(fd);
    return NULL;
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: see the head of kafka_nothing.c\n");
        return 2;
    }
    records = memfd_create("records", 0);
    int listener = socket(AF_INET, SOCK_STREAM, 0), one = 1;
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_port = htons(atoi(argv[1]))};
    here.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (records < 0 || bind(listener, (struct sockaddr *)&here, sizeof here) < 0 || listen(listener, 100) < 0) die("bind");
    for (;;) {
        int fd = accept(listener, NULL, NULL);
        if (fd < 0) die("accept");
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, (void *)(intptr_t)fd)) die("pthread_create");
        pthread_detach(thread);
    }
}
