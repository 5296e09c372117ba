"""Output buffers for decompressors: bytes objects that are neither zeroed before nor copied after writing."""

from cpython.bytes cimport _PyBytes_Resize
from cpython.ref cimport Py_DECREF, Py_XDECREF, PyObject

from headrace.errors import InvalidInput

cdef extern from "Python.h":
    enum: PyBUF_WRITE
    PyObject* PyBytes_FromStringAndSize(const char* data, Py_ssize_t size) except NULL
    char* PyBytes_AS_STRING(PyObject* string)
    object PyMemoryView_FromMemory(char* data, Py_ssize_t size, int flags)


def filled(Py_ssize_t size, write):
    """The bytes that write(view) wrote to a view of `size` bytes; write returns how many bytes it wrote.

    Pages that are never written are never touched, so a size that turns out too large costs only address space.
    """
    cdef PyObject* room
    cdef Py_ssize_t written
    if size < 0:
        raise InvalidInput(f"no room for {size} bytes")
    if size == 0:
        # The empty bytes object is shared, so it must be neither written nor resized.
        write(memoryview(bytearray()))
        return b""
    room = PyBytes_FromStringAndSize(NULL, size)
    try:
        view = PyMemoryView_FromMemory(PyBytes_AS_STRING(room), size, PyBUF_WRITE)
        try:
            written = write(view)
        finally:
            view.release()
        if not 0 <= written <= size:
            raise AssertionError(f"{written} bytes written into room for {size}")
        if written == 0:
            return b""
        if written < size:
            _PyBytes_Resize(&room, written)
        return <object>room
    finally:
        Py_XDECREF(room)
