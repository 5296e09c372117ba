/* A load generator for AMQP 0-9-1 that is not the limit: one thread, epoll, frames made once.
 *
 *   amqp_load publish HOST PORT QUEUE COUNT SIZE CONNECTIONS WINDOW QUEUES [RATE [SECONDS]]
 *   amqp_load consume HOST PORT QUEUE COUNT SIZE CONNECTIONS PREFETCH QUEUES
 *
 * publish: persistent messages with confirms, at most WINDOW unconfirmed per connection; QUEUES > 1 spreads
 * them round robin over QUEUE-0, QUEUE-1, ... With RATE (messages per second, all connections; 0 is as fast as it
 * goes) it sends on a schedule and prints confirm latencies measured from the scheduled time: a broker that
 * stalls is not asked less often. With SECONDS it ends after that time instead of after COUNT.
 * consume: one consumer per connection with an ack for each message; ends after COUNT messages in all, or, if COUNT
 * is 0, two seconds after the last one. Latencies are those of deliveries, from when a message was written
 * (or was due) to when it was read; SIZE must be at least 8 for that.
 * Queues must exist. Prints one line: seconds, messages per second, p50, p99 latency in milliseconds, messages, the
 * smallest and the largest latency. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

typedef uint8_t u8;
#define IN_MAX (1 << 20)
#define OUT_MAX (1 << 20)
#define SAMPLES_MAX (1 << 22)
#define TAGS (1 << 16) /* more than any window */
#define QUIET_S 2.0
#define PACE_NS_MIN 50000 /* a timer faster than this only takes time away from the broker */

struct conn {
    int fd;
    u8 *in, *out;
    size_t in_used, out_used, out_sent;
    uint64_t sent, confirmed, received, acked;
    double *due; /* when each of the last window messages was scheduled */
    u8 *answered; /* by tag: RabbitMQ confirms out of order */
    uint64_t lowest; /* tag that has no answer yet */
    int writing;
};

static int publishing, size, windows, queues, connections;
static uint64_t count, started, done_count;
static double rate, began, seconds_max, last_at;
static const char *queue;
static u8 **frames;
static size_t *frame_sizes, *body_at;
static double *samples;
static size_t sample_count;
static int epoll_fd, timer;

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}
static void die(const char *what) { perror(what); exit(1); }
static void put16(u8 *p, unsigned v) { p[0] = v >> 8; p[1] = v; }
static void put32(u8 *p, uint32_t v) { put16(p, v >> 16); put16(p + 2, v); }
static void put64(u8 *p, uint64_t v) { put32(p, v >> 32); put32(p + 4, v); }
static uint32_t get32(const u8 *p) { return (uint32_t)p[0] << 24 | p[1] << 16 | p[2] << 8 | p[3]; }
static uint64_t get64(const u8 *p) { return (uint64_t)get32(p) << 32 | get32(p + 4); }

static u8 *short_string(u8 *p, const char *s) {
    size_t n = strlen(s);
    *p++ = n;
    memcpy(p, s, n);
    return p + n;
}
static u8 *frame_begin(u8 *p, int kind, int channel) { p[0] = kind; put16(p + 1, channel); return p + 7; }
static u8 *frame_end(u8 *start, u8 *p) { put32(start + 3, p - start - 7); *p = 0xCE; return p + 1; }
static u8 *method(u8 *start, int channel, int class_id, int method_id) {
    u8 *p = frame_begin(start, 1, channel);
    put16(p, class_id);
    put16(p + 2, method_id);
    return p + 4;
}

static void send_all(int fd, const u8 *data, size_t n) {
    while (n) {
        ssize_t k = write(fd, data, n);
        if (k <= 0) die("write");
        data += k;
        n -= k;
    }
}
/* Reads frames until the method wanted has come. */
static void expect(struct conn *c, int class_id, int method_id) {
    for (;;) {
        while (c->in_used < 7 || c->in_used < 8 + get32(c->in + 3)) {
            ssize_t k = read(c->fd, c->in + c->in_used, IN_MAX - c->in_used);
            if (k <= 0) die("read in handshake");
            c->in_used += k;
        }
        size_t whole = 8 + get32(c->in + 3);
        int is = c->in[0] == 1 && (c->in[7] << 8 | c->in[8]) == class_id && (c->in[9] << 8 | c->in[10]) == method_id;
        if (!is && c->in[0] == 1 && (c->in[10] == 50 || c->in[10] == 40) && c->in[8] != 60) {
            fprintf(stderr, "closed by the server: %.*s\n", (int)c->in[13], c->in + 14);
            exit(1);
        }
        memmove(c->in, c->in + whole, c->in_used - whole);
        c->in_used -= whole;
        if (is) return;
    }
}

static void open_connection(struct conn *c, const char *host, const char *port, int number) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    u8 buffer[4096], *p;
    int one = 1;
    if (getaddrinfo(host, port, &hints, &found)) die("getaddrinfo");
    c->fd = socket(found->ai_family, SOCK_STREAM, 0);
    if (connect(c->fd, found->ai_addr, found->ai_addrlen)) die("connect");
    freeaddrinfo(found);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    c->in = malloc(IN_MAX);
    c->out = malloc(OUT_MAX);
    send_all(c->fd, (const u8 *)"AMQP\0\0\x09\x01", 8);
    expect(c, 10, 10);
    p = method(buffer, 0, 10, 11);
    put32(p, 0);
    p = short_string(p + 4, "PLAIN");
    put32(p, 12);
    memcpy(p + 4, "\0guest\0guest", 12);
    p = frame_end(buffer, short_string(p + 16, "en_US"));
    send_all(c->fd, buffer, p - buffer);
    expect(c, 10, 30);
    p = method(buffer, 0, 10, 31);
    put16(p, 2047);
    put32(p + 2, 131072);
    put16(p + 6, 0);
    p = frame_end(buffer, p + 8);
    u8 *open = p;
    p = short_string(method(open, 0, 10, 40), "/");
    *p++ = 0;
    *p++ = 0;
    p = frame_end(open, p);
    send_all(c->fd, buffer, p - buffer);
    expect(c, 10, 41);
    p = method(buffer, 1, 20, 10);
    *p++ = 0;
    p = frame_end(buffer, p);
    send_all(c->fd, buffer, p - buffer);
    expect(c, 20, 11);
    if (publishing) {
        p = method(buffer, 1, 85, 10);
        *p++ = 0;
        p = frame_end(buffer, p);
        send_all(c->fd, buffer, p - buffer);
        expect(c, 85, 11);
    } else {
        char name[256];
        p = method(buffer, 1, 60, 10);
        put32(p, 0);
        put16(p + 4, windows);
        p[6] = 0;
        p = frame_end(buffer, p + 7);
        send_all(c->fd, buffer, p - buffer);
        expect(c, 60, 11);
        if (queues > 1) snprintf(name, sizeof name, "%s-%d", queue, number % queues);
        else snprintf(name, sizeof name, "%s", queue);
        p = method(buffer, 1, 60, 20);
        put16(p, 0);
        p = short_string(p + 2, name);
        p = short_string(p, "c");
        *p++ = 0;
        put32(p, 0);
        p = frame_end(buffer, p + 4);
        send_all(c->fd, buffer, p - buffer);
        expect(c, 60, 21);
    }
    fcntl(c->fd, F_SETFL, O_NONBLOCK);
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, c->fd, &event);
}

static void make_frames(void) {
    frames = calloc(queues, sizeof *frames);
    frame_sizes = calloc(queues, sizeof *frame_sizes);
    body_at = calloc(queues, sizeof *body_at);
    for (int q = 0; q < queues; q++) {
        u8 *start = frames[q] = malloc(size + 512), *p;
        char name[256];
        if (queues > 1) snprintf(name, sizeof name, "%s-%d", queue, q);
        else snprintf(name, sizeof name, "%s", queue);
        p = method(start, 1, 60, 40);
        put16(p, 0);
        p = short_string(p + 2, "");
        p = short_string(p, name);
        *p++ = 0;
        u8 *header = frame_end(start, p);
        p = frame_begin(header, 2, 1);
        put16(p, 60);
        put16(p + 2, 0);
        put64(p + 4, size);
        put16(p + 12, 0x1000);
        p[14] = 2;
        u8 *body = frame_end(header, p + 15);
        p = frame_begin(body, 3, 1);
        memset(p, 'x', size);
        body_at[q] = p - start;
        frame_sizes[q] = frame_end(body, p + size) - start;
    }
}

static void want_write(struct conn *c, int on) {
    if (c->writing == on) return;
    c->writing = on;
    struct epoll_event event = {.events = EPOLLIN | (on ? EPOLLOUT : 0), .data.ptr = c};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
}
static void flush_out(struct conn *c) {
    while (c->out_sent < c->out_used) {
        ssize_t k = write(c->fd, c->out + c->out_sent, c->out_used - c->out_sent);
        if (k < 0) {
            if (errno == EAGAIN) { want_write(c, 1); return; }
            die("write");
        }
        c->out_sent += k;
    }
    c->out_sent = c->out_used = 0;
    want_write(c, 0);
}

static void fill(struct conn *c) {
    double at = now();
    if (seconds_max > 0 && at - began > seconds_max) {
        if (count != started) count = started; /* what is out is waited for, nothing else is sent */
    }
    for (;;) {
        while (started < count && c->sent - c->confirmed < (uint64_t)windows) {
            double due = at;
            if (rate > 0) {
                due = began + started / rate;
                if (due > at) break;
            }
            int q = queues > 1 ? started % queues : 0;
            if (c->out_used + frame_sizes[q] > OUT_MAX) break;
            memcpy(c->out + c->out_used, frames[q], frame_sizes[q]);
            if (size >= 8) memcpy(c->out + c->out_used + body_at[q], &due, 8);
            c->out_used += frame_sizes[q];
            c->sent++;
            if (c->due) c->due[c->sent % TAGS] = due;
            started++;
        }
        if (!c->out_used) return;
        flush_out(c);
        if (c->out_used) return;
        if (rate > 0 || c->sent - c->confirmed >= (uint64_t)windows || started >= count) return;
        at = now();
    }
}

static void sample(double latency) {
    static uint64_t seen;
    /* past the first few million every so-and-so-manyth: the quantiles do not need more */
    if (sample_count < SAMPLES_MAX) samples[sample_count++] = latency;
    else if (seen % 16 == 0) samples[(seen / 16 * 7919) % SAMPLES_MAX] = latency;
    seen++;
}

static void on_frame(struct conn *c, const u8 *frame) {
    const u8 *p = frame + 7;
    if (frame[0] == 3 && !publishing && size >= 8) {
        double due;
        memcpy(&due, p, 8);
        sample(last_at - due); /* bodies are smaller than a frame */
    }
    if (frame[0] != 1) return;
    int class_id = p[0] << 8 | p[1], method_id = p[2] << 8 | p[3];
    if (class_id == 60 && publishing && (method_id == 80 || method_id == 120)) {
        uint64_t tag = get64(p + 4);
        double at = c->due ? now() : 0;
        if (method_id == 120) { fprintf(stderr, "nack of %llu\n", (unsigned long long)tag); exit(1); }
        for (uint64_t t = p[12] & 1 ? c->lowest : tag; t <= tag; t++) {
            if (c->answered[t % TAGS]) continue;
            c->answered[t % TAGS] = 1;
            c->confirmed++;
            done_count++;
            if (c->due) sample(at - c->due[t % TAGS]);
        }
        while (c->answered[c->lowest % TAGS]) c->answered[c->lowest++ % TAGS] = 0;
    } else if (class_id == 60 && method_id == 60) {
        const u8 *tag = p + 5 + p[4];
        u8 *out = c->out + c->out_used;
        c->received++;
        done_count++;
        put16(out + 1, 1);
        out[0] = 1;
        put32(out + 3, 13);
        put16(out + 7, 60);
        put16(out + 9, 80);
        memcpy(out + 11, tag, 8);
        out[19] = 0;
        out[20] = 0xCE;
        c->out_used += 21;
        if (c->out_used > OUT_MAX - 64) flush_out(c);
    } else if (method_id == 40 || method_id == 50) {
        fprintf(stderr, "closed by the server: %.*s\n", (int)p[6], p + 7);
        exit(1);
    }
}

static void take_frames(struct conn *c) {
    size_t at = 0;
    while (c->in_used - at >= 7) {
        size_t whole = 8 + get32(c->in + at + 3);
        if (c->in_used - at < whole) break;
        on_frame(c, c->in + at);
        at += whole;
    }
    memmove(c->in, c->in + at, c->in_used - at);
    c->in_used -= at;
    if (!publishing) flush_out(c);
}

static void on_readable(struct conn *c) {
    ssize_t k = read(c->fd, c->in + c->in_used, IN_MAX - c->in_used);
    if (k == 0) { fprintf(stderr, "connection lost\n"); exit(1); }
    if (k < 0) { if (errno == EAGAIN) return; die("read"); }
    c->in_used += k;
    if (!publishing) last_at = now();
    take_frames(c);
}

/* A timer in the epoll set: epoll's own time-outs are whole milliseconds, more than a confirm takes. */
static void start_pacing(void) {
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    long every = 1e9 / rate < PACE_NS_MIN ? PACE_NS_MIN : (long)(1e9 / rate);
    struct itimerspec when = {.it_interval = {every / 1000000000, every % 1000000000}, .it_value = {0, 1}};
    struct epoll_event event = {.events = EPOLLIN, .data.ptr = &timer};
    timerfd_settime(timer, 0, &when, NULL);
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, timer, &event);
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

int main(int argc, char **argv) {
    if (argc < 10) { fprintf(stderr, "see the top of the source\n"); return 2; }
    publishing = !strcmp(argv[1], "publish");
    queue = argv[4];
    count = strtoull(argv[5], 0, 10);
    size = atoi(argv[6]);
    connections = atoi(argv[7]);
    windows = atoi(argv[8]);
    queues = atoi(argv[9]);
    if (windows >= TAGS) { fprintf(stderr, "the window must be below %d\n", TAGS); return 2; }
    rate = argc > 10 ? atof(argv[10]) : 0;
    seconds_max = argc > 11 ? atof(argv[11]) : 0;
    int until_quiet = !publishing && count == 0;
    if (until_quiet || seconds_max > 0) count = UINT64_MAX;
    epoll_fd = epoll_create1(0);
    struct conn *conns = calloc(connections, sizeof *conns);
    if (publishing) make_frames();
    samples = malloc(SAMPLES_MAX * sizeof *samples);
    for (int i = 0; i < connections; i++) {
        if (rate > 0) conns[i].due = calloc(TAGS, sizeof(double));
        conns[i].answered = calloc(TAGS, 1);
        conns[i].lowest = 1;
        open_connection(&conns[i], argv[2], argv[3], i);
    }
    began = last_at = now();
    if (rate > 0) start_pacing();
    if (publishing)
        for (int i = 0; i < connections; i++) fill(&conns[i]);
    else
        for (int i = 0; i < connections; i++) take_frames(&conns[i]); /* what came with consume-ok */
    int turn = 0;
    while (done_count < count) {
        struct epoll_event events[256];
        int n = epoll_wait(epoll_fd, events, 256, 200);
        if (until_quiet && done_count && now() - last_at > QUIET_S) break;
        if (until_quiet && done_count == 0) began = now();
        for (int i = 0; i < n; i++) {
            struct conn *c = events[i].data.ptr;
            if (events[i].data.ptr == &timer) {
                uint64_t ticks;
                if (read(timer, &ticks, sizeof ticks) < 0 && errno != EAGAIN) die("timer");
                continue;
            }
            if (events[i].events & EPOLLOUT) flush_out(c);
            if (events[i].events & (EPOLLIN | EPOLLHUP | EPOLLERR)) on_readable(c);
            if (publishing && !c->out_used && rate == 0) fill(c);
        }
        if (rate > 0)
            for (int i = 0; i < connections; i++) {
                struct conn *c = &conns[turn++ % connections];
                if (!c->out_used) fill(c);
            }
    }
    double seconds = (until_quiet ? last_at : now()) - began, p50 = 0, p99 = 0, least = 0, most = 0;
    if (sample_count) {
        qsort(samples, sample_count, sizeof *samples, by_value);
        p50 = samples[sample_count / 2] * 1e3;
        p99 = samples[sample_count * 99 / 100] * 1e3;
        least = samples[0] * 1e3;
        most = samples[sample_count - 1] * 1e3;
    }
    if (!publishing) {
        /* the last acks must have been read before the connection goes */
        for (int i = 0; i < connections; i++) flush_out(&conns[i]);
        usleep(200000);
    }
    printf("%.4f %.0f %.3f %.3f %llu %.3f %.3f\n", seconds, done_count / seconds, p50, p99,
           (unsigned long long)done_count, least, most);
    return 0;
}
