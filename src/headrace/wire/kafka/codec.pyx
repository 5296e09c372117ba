# cython: boundscheck=False, wraparound=False
"""Decodes requests and encodes responses by schema: for every API but Produce, Fetch and Metadata.

A Struct is a compiled kio dataclass (see schema.py). kio's own reader is not used for client input: version 0.6.5
aborts the process on a compact array of 2**32 - 2 elements, and refuses unknown tags, which a newer client may send.
"""

from types import SimpleNamespace

from cpython.dict cimport PyDict_GetItem, PyDict_Size
from cpython.object cimport PyObject
from libc.stdint cimport int64_t, uint32_t
from libc.string cimport memcpy

from headrace.wire.kafka.primitives cimport Reader, Writer

from headrace.errors import MalformedRequest

cdef enum Kind:
    INT8 = 1
    INT16 = 2
    INT32 = 3
    INT64 = 4
    UINT16 = 5
    BOOL = 6
    UUID = 7
    FLOAT64 = 8
    STRING = 9
    OCTETS = 10
    STRUCT = 11

KINDS = {
    "int8": INT8, "int16": INT16, "int32": INT32, "int64": INT64, "uint16": UINT16, "bool": BOOL, "uuid": UUID,
    "float64": FLOAT64, "string": STRING, "bytes": OCTETS, "records": OCTETS, "error_code": INT16,
    "timedelta_i32": INT32, "timedelta_i64": INT64, "datetime_i64": INT64, "struct": STRUCT,
}
cdef dict FIXED_BYTES = {INT8: 1, INT16: 2, INT32: 4, INT64: 8, UINT16: 2, BOOL: 1, UUID: 16, FLOAT64: 8}
cdef double ZERO = 0.0


cdef class Field:
    """One field of a struct. tag is -1 for untagged fields."""

    cdef readonly str name
    cdef readonly int kind
    cdef readonly bint nullable
    cdef readonly bint array
    cdef readonly int tag
    cdef readonly object default
    cdef readonly Struct struct
    cdef bint flexible
    cdef bint is_message
    cdef Py_ssize_t bytes_min

    def __init__(self, str name, int kind, *, bint nullable, bint array, int tag, default, Struct struct, bint flexible):
        self.name, self.kind, self.nullable, self.array = name, kind, nullable, array
        self.tag, self.default, self.struct, self.flexible = tag, default, struct, flexible
        self.is_message = name.endswith("error_message")
        if kind == STRUCT:
            self.bytes_min = struct.bytes_min
        elif kind == STRING:
            self.bytes_min = 1 if flexible else 2
        elif kind == OCTETS:
            self.bytes_min = 1 if flexible else 4
        else:
            self.bytes_min = FIXED_BYTES[kind]

    cdef object read_one(self, Reader reader, int64_t* budget):
        cdef int64_t bits
        cdef double number
        if self.kind == INT32:
            return reader.int32()
        if self.kind == STRING:
            return reader.string(self.flexible, self.nullable and not self.array)
        if self.kind == INT64:
            return reader.int64()
        if self.kind == INT16:
            return reader.int16()
        if self.kind == STRUCT:
            if self.nullable and not self.array and reader.int8() < 0:
                return None
            return self.struct.read_from(reader, budget)
        if self.kind == BOOL:
            return reader.int8() != 0
        if self.kind == INT8:
            return reader.int8()
        if self.kind == OCTETS:
            return reader.octets(self.flexible, self.nullable and not self.array)
        if self.kind == UUID:
            return reader.fixed(16)
        if self.kind == UINT16:
            return reader.int16() & 0xFFFF
        bits = reader.int64()
        memcpy(&number, &bits, 8)
        return number

    cdef object read_from(self, Reader reader, int64_t* budget):
        cdef Py_ssize_t count, i
        cdef list values
        if not self.array:
            return self.read_one(reader, budget)
        count = reader.count(self.flexible, self.nullable, self.bytes_min)
        if count < 0:
            return None
        budget[0] -= count
        if budget[0] < 0:
            raise MalformedRequest("too many elements in one request")
        values = []
        for i in range(count):
            values.append(self.read_one(reader, budget))
        return values

    cdef int write_one(self, Writer writer, object value) except -1:
        cdef int64_t bits
        cdef double number
        if self.kind == INT32:
            return writer.int32(value)
        if self.kind == STRING:
            return writer.message(value, self.flexible) if self.is_message else writer.string(value, self.flexible)
        if self.kind == INT64:
            return writer.int64(value)
        if self.kind == INT16 or self.kind == UINT16:
            return writer.int16(value)
        if self.kind == STRUCT:
            if self.nullable and not self.array:
                writer.int8(-1 if value is None else 1)
                if value is None:
                    return 0
            return self.struct.write_to(writer, {} if value is None else value)
        if self.kind == BOOL or self.kind == INT8:
            return writer.int8(value)
        if self.kind == OCTETS:
            return writer.octets(value, self.flexible)
        if self.kind == UUID:
            return writer.fixed(value)
        number = value
        memcpy(&bits, &number, 8)
        return writer.int64(bits)

    cdef int write_to(self, Writer writer, object value) except -1:
        if not self.array:
            return self.write_one(writer, value)
        if value is None:
            return writer.count(-1, self.flexible)
        writer.count(len(value), self.flexible)
        for one in value:
            self.write_one(writer, one)
        return 0


cdef class Struct:
    """A struct of one version. When decoding, fields that this version lacks have the default of later versions.

    known() returns the field names of all versions: a response may set any of them, and no others.
    """

    cdef readonly str name
    cdef readonly bint flexible
    cdef object known
    cdef list fields
    cdef list tagged
    cdef dict absent
    cdef dict defaults
    cdef Py_ssize_t bytes_min

    def __init__(self, str name, fields, *, bint flexible, dict absent, known):
        self.name, self.flexible, self.absent, self.known = name, flexible, absent, known
        self.fields = [field for field in fields if field.tag < 0]
        self.tagged = sorted((field for field in fields if field.tag >= 0), key=lambda field: field.tag)
        self.bytes_min = 1 if flexible else 0
        for field in self.fields:
            self.bytes_min += (1 if flexible else 4) if field.array else (<Field> field).bytes_min
        if self.bytes_min == 0:
            self.bytes_min = 1

    cdef object read_from(self, Reader reader, int64_t* budget):
        cdef dict values = dict(self.absent)
        cdef Field field
        cdef uint32_t left, tag, size
        cdef Py_ssize_t after, end
        for field in self.fields:
            values[field.name] = field.read_from(reader, budget)
        if not self.flexible:
            return SimpleNamespace(**values)
        for field in self.tagged:
            values[field.name] = field.default
        left = reader.unsigned_varint()
        while left:
            left -= 1
            tag = reader.unsigned_varint()
            size = reader.unsigned_varint()
            reader.need(size)
            after = reader.position + size
            for field in self.tagged:
                if field.tag == <int> tag:
                    end, reader.end = reader.end, after
                    values[field.name] = field.read_from(reader, budget)
                    reader.end = end
            reader.position = after
        return SimpleNamespace(**values)

    cdef int write_to(self, Writer writer, dict values) except -1:
        cdef Field field
        cdef PyObject* found
        cdef Py_ssize_t used = 0
        cdef uint32_t tags = 0
        cdef Writer inner
        for field in self.fields:
            found = PyDict_GetItem(values, field.name)
            if found == NULL:
                field.write_to(writer, field.default)
            else:
                used += 1
                field.write_to(writer, <object> found)
        if self.flexible:
            for field in self.tagged:
                found = PyDict_GetItem(values, field.name)
                if found != NULL:
                    used += 1
                    tags += <object> found != field.default
            writer.unsigned_varint(tags)
            if tags:
                for field in self.tagged:
                    found = PyDict_GetItem(values, field.name)
                    if found != NULL and <object> found != field.default:
                        inner = Writer()
                        field.write_to(inner, <object> found)
                        writer.unsigned_varint(field.tag)
                        writer.unsigned_varint(inner.size)
                        writer.raw(inner.data, inner.size)
        if used != PyDict_Size(values):  # a misspelt field would silently be written as its default
            unknown = set(values) - self.known()
            assert not unknown, f"{self.name} has no fields {sorted(unknown)}"
        return 0


def decode(Struct struct not None, buffer, Py_ssize_t position=0, int64_t elements_max=200_000):
    """The fields of one request as attributes. Raises MalformedRequest on any invalid input."""
    cdef Reader reader = Reader(buffer, position)
    cdef int64_t budget = elements_max
    return struct.read_from(reader, &budget)


def encode(Struct struct not None, dict values not None, int64_t correlation_id, bint header_tags):
    """One whole response: size, correlation id, header tags if it has them, fields."""
    cdef Writer writer = Writer()
    writer.int32(0)
    writer.int32(correlation_id)
    if header_tags:
        writer.int8(0)
    struct.write_to(writer, values)
    writer.put_int32_at(0, writer.size - 4)
    return writer.finish()


def encode_body(Struct struct not None, dict values not None):
    """The fields without size and header."""
    cdef Writer writer = Writer()
    struct.write_to(writer, values)
    return writer.finish()
