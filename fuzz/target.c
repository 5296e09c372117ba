/* libFuzzer's side: a Python with our kernels in it, and one call of fuzz_target.one for each input.
 *
 * The first byte of an input says how the rest is put right, so that the fuzzer need not guess a checksum:
 * bit 0 writes the length, bit 1 the magic, bit 2 the CRC32C. The batch is handed over in memory of exactly its
 * size: a read of one byte past it is an error to AddressSanitizer.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static PyObject *one;

static void die(const char *what) {
    fprintf(stderr, "fuzz: %s\n", what);
    if (PyErr_Occurred()) PyErr_Print();
    abort();
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc;
    (void)argv;
    PyConfig config;
    PyConfig_InitPythonConfig(&config);
    config.install_signal_handlers = 0;
    if (PyStatus_Exception(PyConfig_SetBytesString(&config, &config.executable, getenv("FUZZ_PYTHON"))) ||
        PyStatus_Exception(Py_InitializeFromConfig(&config)))
        die("Python does not start");
    PyObject *module = PyImport_ImportModule("fuzz_target");
    if (module == NULL || (one = PyObject_GetAttrString(module, "one")) == NULL) die("no fuzz_target.one");
    return 0;
}

static uint32_t crc32c(const uint8_t *p, size_t n) {
    uint32_t crc = ~0u;
    while (n--) {
        crc ^= *p++;
        for (int i = 0; i < 8; i++) crc = (crc >> 1) ^ ((crc & 1) ? 0x82f63b78u : 0);
    }
    return ~crc;
}

static void put32(uint8_t *p, uint32_t v) {
    p[0] = (uint8_t)(v >> 24), p[1] = (uint8_t)(v >> 16), p[2] = (uint8_t)(v >> 8), p[3] = (uint8_t)v;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < 2) return 0;
    size_t n = size - 1;
    uint8_t *batch = malloc(n);
    memcpy(batch, data + 1, n);
    if (n > 21) {
        if (data[0] & 1) put32(batch + 8, (uint32_t)(n - 12));
        if (data[0] & 2) batch[16] = 2;
        if (data[0] & 4) put32(batch + 17, crc32c(batch + 21, n - 21));
    }
    PyObject *view = PyMemoryView_FromMemory((char *)batch, (Py_ssize_t)n, PyBUF_READ);
    PyObject *done = view == NULL ? NULL : PyObject_CallOneArg(one, view);
    if (done == NULL) die("what follows is the finding");
    Py_DECREF(done);
    Py_DECREF(view);
    free(batch);
    return 0;
}
