"""I/O chains: a list of writes and syncs that runs to its end, or to the first error, without the GIL.

A round is a handful of short system calls. Made one by one from a Python thread, each would release the GIL and wait to
get it back from the event loop, which costs more than the call. Only disk.py and workers.py use this module.
"""

import os

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.mem cimport PyMem_Calloc, PyMem_Free

cdef extern from *:
    """
    #include <errno.h>
    #include <fcntl.h>
    #include <poll.h>
    #include <pthread.h>
    #include <semaphore.h>
    #include <signal.h>
    #include <stdint.h>
    #include <sys/eventfd.h>
    #include <sys/uio.h>
    #include <time.h>
    #include <unistd.h>

    #define HEADRACE_PARTS_MAX 512 /* buffers per call; Linux allows 1,024 */
    #define HEADRACE_PIECE_BYTES (1 << 20) /* bytes per call */
    #define HEADRACE_PAGE_MASK 4095LL

    static void headrace_start_writing_back(int file, long long position, long long bytes) {
    #ifdef SYNC_FILE_RANGE_WRITE
        /* Errors do not matter: the sync that follows reports them. */
        (void)sync_file_range(file, position, bytes, SYNC_FILE_RANGE_WRITE);
    #else
        (void)file, (void)position, (void)bytes;
    #endif
    }

    typedef struct {
        int file;
        int count;           /* number of parts; -1: a sync */
        struct iovec *parts; /* changed as they are written */
        long long position;
    } headrace_step;

    typedef struct {
        int done;  /* number of steps carried out in full */
        int error; /* errno of the step after them; 0: none */
        double sync_s;
    } headrace_ran;

    /* The parts for one call, the last one cut short if necessary; returns their bytes. */
    static size_t headrace_piece(const struct iovec *parts, int left, struct iovec *piece, int *count) {
        size_t bytes = 0;
        for (*count = 0; *count < left && *count < HEADRACE_PARTS_MAX && bytes < HEADRACE_PIECE_BYTES; ++*count) {
            size_t room = HEADRACE_PIECE_BYTES - bytes;
            piece[*count] = parts[*count];
            if (piece[*count].iov_len > room) piece[*count].iov_len = room;
            bytes += piece[*count].iov_len;
        }
        return bytes;
    }

    static int headrace_write(headrace_step *step) {
        struct iovec *parts = step->parts, piece[HEADRACE_PARTS_MAX];
        int left = step->count;
        long long position = step->position;
        while (left > 0) {
            int count;
            size_t wanted = headrace_piece(parts, left, piece, &count);
            ssize_t gone = pwritev(step->file, piece, count, position);
            if (gone < 0) {
                if (errno == EINTR) continue;
                return errno;
            }
            if (gone == 0 && wanted > 0) return EIO; /* no progress */
            /* Start the write-back of a large write while the rest is still being copied. Only whole pages: a page that
               still grows would be written twice. */
            if ((size_t)gone >= HEADRACE_PIECE_BYTES) {
                long long from = position & ~HEADRACE_PAGE_MASK, to = (position + gone) & ~HEADRACE_PAGE_MASK;
                headrace_start_writing_back(step->file, from, to - from);
            }
            position += gone;
            while (left > 0 && (size_t)gone >= parts->iov_len) {
                gone -= parts->iov_len;
                parts++;
                left--;
            }
            if (left > 0) {
                parts->iov_base = (char *)parts->iov_base + gone;
                parts->iov_len -= gone;
            }
        }
        return 0;
    }

    static double headrace_now(void) {
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return t.tv_sec + t.tv_nsec / 1e9;
    }

    /* A failed sync is noted in `failed`, at once and without the GIL, for other threads that sync the same file: the
       kernel reports an error to one of them only. Never retried, not even after EINTR: the next sync would report
       success without writing anything. */
    static int headrace_sync(int file, int *failed) {
        int error = fdatasync(file) < 0 ? errno : 0;
        if (error) __atomic_store_n(failed, error, __ATOMIC_SEQ_CST);
        return error;
    }

    static headrace_ran headrace_run(headrace_step *steps, int count, int *failed) {
        headrace_ran ran = {0, 0, 0.0};
        for (; ran.done < count; ran.done++) {
            headrace_step *step = &steps[ran.done];
            if (step->count < 0) {
                double began = headrace_now();
                ran.error = headrace_sync(step->file, failed);
                /* Another thread may have got this file's error: the steps that follow must not rely on it. */
                if (!ran.error) ran.error = __atomic_load_n(failed, __ATOMIC_SEQ_CST);
                ran.sync_s += headrace_now() - began;
            } else {
                ran.error = headrace_write(step);
            }
            if (ran.error) break;
        }
        return ran;
    }

    /* One chain at a time: `work` passes it to the thread, `event` passes it back. Both are memory barriers. */
    typedef struct {
        pthread_t thread;
        sem_t work;
        headrace_step *steps; /* NULL: the thread ends */
        int count, event, *failed;
        headrace_ran ran;
    } headrace_engine;

    static void *headrace_engine_main(void *argument) {
        headrace_engine *engine = argument;
        uint64_t one = 1;
        pthread_setname_np(pthread_self(), "headrace-disk");
        for (;;) {
            while (sem_wait(&engine->work) < 0) {} /* EINTR */
            if (engine->steps == NULL) return NULL;
            engine->ran = headrace_run(engine->steps, engine->count, engine->failed);
            while (write(engine->event, &one, sizeof one) < 0 && errno == EINTR) {}
        }
    }

    static int headrace_engine_begin(headrace_engine *engine) {
        sigset_t all, before;
        int error;
        engine->event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (engine->event < 0) return errno;
        sem_init(&engine->work, 0, 0);
        sigfillset(&all); /* signals are handled by Python's threads */
        pthread_sigmask(SIG_SETMASK, &all, &before);
        error = pthread_create(&engine->thread, NULL, headrace_engine_main, engine);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (error) close(engine->event);
        return error;
    }

    static void headrace_engine_start(headrace_engine *engine, headrace_step *steps, int count) {
        engine->steps = steps;
        engine->count = count;
        sem_post(&engine->work);
    }

    /* 1 if a chain has ended since the last call. */
    static int headrace_engine_collect(headrace_engine *engine, headrace_ran *ran) {
        uint64_t ended;
        if (read(engine->event, &ended, sizeof ended) < 0) return 0;
        *ran = engine->ran;
        return 1;
    }

    static void headrace_engine_end(headrace_engine *engine, int is_running) {
        struct pollfd ended = {engine->event, POLLIN, 0};
        while (is_running && poll(&ended, 1, -1) < 0) {} /* EINTR */
        headrace_engine_start(engine, NULL, 0);
        pthread_join(engine->thread, NULL);
        sem_destroy(&engine->work);
        close(engine->event);
    }
    """
    cdef struct iovec:
        void* iov_base
        size_t iov_len

    ctypedef struct headrace_step:
        int file
        int count
        iovec* parts
        long long position

    ctypedef struct headrace_ran:
        int done
        int error
        double sync_s

    ctypedef struct headrace_engine:
        int event
        int* failed

    void headrace_start_writing_back(int file, long long position, long long bytes) noexcept nogil
    headrace_ran headrace_run(headrace_step* steps, int count, int* failed) noexcept nogil
    int headrace_sync(int file, int* failed) noexcept nogil
    int headrace_engine_begin(headrace_engine* engine)
    void headrace_engine_start(headrace_engine* engine, headrace_step* steps, int count) noexcept nogil
    int headrace_engine_collect(headrace_engine* engine, headrace_ran* ran) noexcept nogil
    void headrace_engine_end(headrace_engine* engine, int is_running) noexcept nogil


cdef class Step:
    """One step of a chain: a write of all buffers, or, if buffers is None, a sync."""

    def __init__(self, int file, buffers, long long position=0):
        self.file = file
        self.buffers = buffers
        self.position = position


cdef class _Chain:
    """The steps as C structures. Holds the buffers until it is deallocated."""
    cdef headrace_step* steps
    cdef iovec* parts
    cdef Py_buffer* views
    cdef int step_count
    cdef Py_ssize_t held

    def __cinit__(self, steps):
        cdef Py_ssize_t buffers = 0, at = 0
        cdef headrace_step* step
        cdef Step given
        for given in steps:
            buffers += 0 if given.buffers is None else len(given.buffers)
        self.steps = <headrace_step*>PyMem_Calloc(max(len(steps), 1), sizeof(headrace_step))
        self.parts = <iovec*>PyMem_Calloc(max(buffers, 1), sizeof(iovec))
        self.views = <Py_buffer*>PyMem_Calloc(max(buffers, 1), sizeof(Py_buffer))
        if self.steps == NULL or self.parts == NULL or self.views == NULL:
            raise MemoryError
        for given in steps:
            step = &self.steps[self.step_count]
            step.file = given.file
            step.position = given.position
            step.count = -1
            if given.buffers is not None:
                step.parts = &self.parts[at]
                step.count = len(given.buffers)
                for buffer in given.buffers:
                    PyObject_GetBuffer(buffer, &self.views[at], PyBUF_SIMPLE)
                    self.held = at + 1
                    self.parts[at].iov_base = self.views[at].buf
                    self.parts[at].iov_len = self.views[at].len
                    at += 1
            self.step_count += 1

    def __dealloc__(self):
        cdef Py_ssize_t at
        for at in range(self.held):
            PyBuffer_Release(&self.views[at])
        PyMem_Free(self.views)
        PyMem_Free(self.parts)
        PyMem_Free(self.steps)


def start_writing_back(int file):
    """Ask the kernel to start the write-back of a file. Does not wait, and guarantees nothing.

    Not of the last page: an append would wait for it, and it would be written again."""
    cdef long long whole_pages = os.fstat(file).st_size & ~4095
    if whole_pages:
        with nogil:
            headrace_start_writing_back(file, 0, whole_pages)


cdef class SyncFailure:
    """Whether a sync of a set of files has failed; visible to all threads from that moment."""
    cdef int error

    @property
    def errno(self):
        """0: no sync has failed."""
        return self.error

    def note(self, int error):
        self.error = error


def sync(int file, SyncFailure failure not None):
    cdef int error
    with nogil:
        error = headrace_sync(file, &failure.error)
    if error:
        raise OSError(error, os.strerror(error))


def run(steps, SyncFailure failure not None):
    """Run a chain on this thread. Returns (steps done, errno of the next one or 0, seconds in syncs)."""
    cdef _Chain chain = _Chain(steps)
    cdef headrace_ran ran
    with nogil:
        ran = headrace_run(chain.steps, chain.step_count, &failure.error)
    return ran.done, ran.error, ran.sync_s


@cython.no_gc_clear  # the memory that the thread writes to must outlive the thread
cdef class IoThread:
    """A thread that runs one chain at a time and never takes the GIL. `fileno` becomes readable when a chain ends."""
    cdef headrace_engine engine
    cdef _Chain running
    cdef SyncFailure failure
    cdef bint is_open

    def __cinit__(self, SyncFailure failure not None):
        cdef int error
        self.failure = failure
        self.engine.failed = &failure.error
        error = headrace_engine_begin(&self.engine)
        if error:
            raise OSError(error, os.strerror(error))
        self.is_open = True

    def fileno(self):
        return self.engine.event

    def start(self, steps):
        assert self.is_open and self.running is None, "one chain at a time"
        self.running = _Chain(steps)
        headrace_engine_start(&self.engine, self.running.steps, self.running.step_count)

    def collect(self):
        """The chain's result, as `run` returns it; None while it runs."""
        cdef headrace_ran ran
        if self.running is None or not headrace_engine_collect(&self.engine, &ran):
            return None
        self.running = None
        return ran.done, ran.error, ran.sync_s

    def close(self):
        """Wait for the running chain and discard its result."""
        cdef int is_running
        if self.is_open:
            self.is_open = False
            is_running = self.running is not None
            with nogil:
                headrace_engine_end(&self.engine, is_running)
            self.running = None

    def __dealloc__(self):
        cdef int is_running = self.running is not None
        if self.is_open:
            with nogil:
                headrace_engine_end(&self.engine, is_running)
