"""Binding to the system's zstd library, if there is one: decompresses complete data in one call.

A streaming decoder, which every Python package offers, writes to its own window first and copies from there, because
it does not know that the whole output stays in place. For a batch of 1 MB that copy is a third of the time.
The library is looked up at import and is optional: codecs.py falls back to another decoder.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.string cimport memcmp

from headrace.errors import ChecksumMismatch, CorruptBatch

cdef extern from *:
    """
    #include <dlfcn.h>

    /* The library's stable interface, declared by hand because few machines have its headers. */
    typedef struct { const void *from; size_t size, done; } headrace_zstd_input;
    typedef struct { void *to; size_t room, done; } headrace_zstd_output;

    static struct {
        unsigned (*version)(void);
        void *(*make)(void);
        size_t (*free)(void *decoder);
        size_t (*decompress)(void *decoder, void *to, size_t room, const void *from, size_t size);
        size_t (*stream)(void *decoder, headrace_zstd_output *output, headrace_zstd_input *input);
        unsigned (*is_error)(size_t code);
        int (*error_of)(size_t code);
        const char *(*name_of)(size_t code);
    } zstd;

    static int headrace_zstd_found(const char *name) {
        void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (library == NULL) return 0;
        *(void **)&zstd.version = dlsym(library, "ZSTD_versionNumber");
        *(void **)&zstd.make = dlsym(library, "ZSTD_createDCtx");
        *(void **)&zstd.free = dlsym(library, "ZSTD_freeDCtx");
        *(void **)&zstd.decompress = dlsym(library, "ZSTD_decompressDCtx");
        *(void **)&zstd.stream = dlsym(library, "ZSTD_decompressStream");
        *(void **)&zstd.is_error = dlsym(library, "ZSTD_isError");
        *(void **)&zstd.error_of = dlsym(library, "ZSTD_getErrorCode");
        *(void **)&zstd.name_of = dlsym(library, "ZSTD_getErrorName");
        return zstd.version && zstd.make && zstd.free && zstd.decompress && zstd.stream && zstd.is_error &&
               zstd.error_of && zstd.name_of;
    }
    """
    ctypedef struct Input "headrace_zstd_input":
        const void* origin "from"
        size_t size, done
    ctypedef struct Output "headrace_zstd_output":
        void* to
        size_t room, done
    int headrace_zstd_found(const char* name)
    unsigned int zstd_version "zstd.version"()
    void* zstd_make "zstd.make"()
    size_t zstd_free "zstd.free"(void* decoder)
    size_t zstd_decompress "zstd.decompress"(void* decoder, void* to, size_t room, const void* origin, size_t size) nogil
    size_t zstd_stream "zstd.stream"(void* decoder, Output* output, Input* input) nogil
    unsigned int zstd_is_error "zstd.is_error"(size_t code) nogil
    int zstd_error_of "zstd.error_of"(size_t code)
    const char* zstd_name_of "zstd.name_of"(size_t code)

cdef enum:
    VERSION_MIN = 10400     # 1.4.0 (2019), the first release with stable error codes
    CHECKSUM_WRONG = 22     # checksum_wrong
    NO_ROOM = 70            # dstSize_tooSmall
    PIECE = 512             # below the smallest window: with output space for a whole frame, the library uses no window

cdef void* idle = NULL      # a decoder kept for reuse while no thread uses it; takes 90 KB


cdef bint _is_found() except -1:
    for name in (b"libzstd.so.1", b"libzstd.1.dylib"):
        if headrace_zstd_found(name) and zstd_version() >= VERSION_MIN:
            return True
    return False


FOUND = _is_found()


def decompress_into(data, room):
    """Decompress all frames of data into the buffer room. Returns the number of bytes written, or -1 if room is too
    small. Requires FOUND."""
    global idle
    cdef Py_buffer origin, target
    cdef size_t size
    cdef void* decoder = idle
    assert FOUND, "there is no such library"
    idle = NULL
    if decoder == NULL:
        decoder = zstd_make()
    if decoder == NULL:
        raise MemoryError
    try:
        PyObject_GetBuffer(data, &origin, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(room, &target, PyBUF_WRITABLE)
            try:
                with nogil:
                    size = zstd_decompress(decoder, target.buf, target.len, origin.buf, origin.len)
            finally:
                PyBuffer_Release(&target)
        finally:
            PyBuffer_Release(&origin)
    finally:
        if idle == NULL:
            idle = decoder
        else:
            zstd_free(decoder)  # another thread has already returned its decoder
    if not zstd_is_error(size):
        return size
    if zstd_error_of(size) == NO_ROOM:
        return -1
    kind = ChecksumMismatch if zstd_error_of(size) == CHECKSUM_WRONG else CorruptBatch
    raise kind(f"not zstd data: {zstd_name_of(size).decode()}")


def streams_the_same(data, decompressed):
    """Whether a streaming decoder, which can only refer back to its window, decompresses data to the same bytes.
    Requires FOUND."""
    cdef Py_buffer origin, target
    cdef bint same
    cdef void* decoder
    assert FOUND, "there is no such library"
    decoder = zstd_make()  # not kept for reuse: streaming makes it allocate a window
    if decoder == NULL:
        raise MemoryError
    try:
        PyObject_GetBuffer(data, &origin, PyBUF_SIMPLE)
        try:
            PyObject_GetBuffer(decompressed, &target, PyBUF_SIMPLE)
            try:
                with nogil:
                    same = _streams_the_same(decoder, &origin, &target)
            finally:
                PyBuffer_Release(&target)
        finally:
            PyBuffer_Release(&origin)
    finally:
        zstd_free(decoder)
    return same


cdef bint _streams_the_same(void* decoder, const Py_buffer* data, const Py_buffer* decompressed) noexcept nogil:
    cdef char[PIECE] piece
    cdef Input rest
    cdef Output found
    cdef size_t at = 0
    rest.origin, rest.size, rest.done = data.buf, <size_t>data.len, 0
    found.to, found.room, found.done = &piece[0], PIECE, PIECE
    while rest.done < rest.size or found.done == PIECE:  # a full piece: the decoder may hold more output
        found.done = 0
        if zstd_is_error(zstd_stream(decoder, &found, &rest)):
            return False
        if found.done > <size_t>decompressed.len - at or memcmp(piece, <const char*>decompressed.buf + at, found.done):
            return False
        at += found.done
    return at == <size_t>decompressed.len
