"""Codec of AMQP 0-9-1 basic properties and field tables, as stored in a record's amqp.properties header.

Publishing and delivering pass these bytes through. This codec is for code that needs their content: dead letters,
expiration, priority, the headers exchange, the dashboard, Spark. `edit` changes some properties and copies the bytes
of all others, so that an int16 does not become an int32 in a dead-letter queue.
"""

import struct
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Final, TypeAlias

from headrace.errors import CorruptProperties, InvalidInput
from headrace.record.types import Buffer

DEPTH_MAX: Final = 16
OBJECTS_MAX: Final = 16_384  # fields and array items of all nested tables together
SHORT_STRING_BYTES_MAX: Final = 255


class Timestamp(int):
    """Seconds since 1970, a separate type in a field table. Clients send values that datetime cannot represent."""


class Int64(int):
    """An integer that is encoded with 64 bits even if 32 are enough, as RabbitMQ encodes some headers."""


Value: TypeAlias = "bool | int | float | Decimal | str | bytes | Timestamp | Mapping[str, Value] | list[Value] | None"
Table: TypeAlias = "dict[str, Value]"

# In the order of their flags, from bit 15 down to bit 2.
PROPERTIES: Final = (
    "content_type",
    "content_encoding",
    "headers",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
_FLAG: Final = {name: 1 << (15 - i) for i, name in enumerate(PROPERTIES)}
_OCTETS: Final = frozenset({"delivery_mode", "priority"})
_NUMBERS: Final = {
    0x62: struct.Struct(">b"),  # b
    0x42: struct.Struct(">B"),  # B
    0x73: struct.Struct(">h"),  # s, a short integer with RabbitMQ, a short string in the specification
    0x55: struct.Struct(">h"),  # U, a short integer in the specification
    0x75: struct.Struct(">H"),  # u
    0x49: struct.Struct(">i"),  # I
    0x69: struct.Struct(">I"),  # i
    0x6C: struct.Struct(">q"),  # l
    0x4C: struct.Struct(">q"),  # L, signed too: RabbitMQ and its clients agree on that
    0x66: struct.Struct(">f"),  # f
    0x64: struct.Struct(">d"),  # d
}
_INT32: Final = _NUMBERS[0x49]
_INT64: Final = _NUMBERS[0x6C]
_DOUBLE: Final = _NUMBERS[0x64]
_DECIMAL: Final = struct.Struct(">Bi")
_UINT16: Final = struct.Struct(">H")
_UINT32: Final = struct.Struct(">I")
_UINT64: Final = struct.Struct(">Q")


class _Reader:
    """Reads fields from unchecked bytes. No read passes the end it was given."""

    def __init__(self, data: Buffer) -> None:
        self.data = memoryview(data)
        self.at = 0
        self.objects = 0

    def take(self, size: int, end: int) -> memoryview:
        at = self.at
        if size > end - at:
            raise CorruptProperties(f"{size} bytes at {at} extend past {end}")
        self.at = at + size
        return self.data[at : self.at]

    def number(self, kind: struct.Struct, end: int) -> int:
        value: int = kind.unpack(self.take(kind.size, end))[0]
        return value

    def short_string(self, end: int) -> str:
        return str(self.take(self.take(1, end)[0], end), "utf-8", "replace")

    def sized_end(self, end: int) -> int:
        """The end of the value whose 32-bit size is at this position."""
        size = self.number(_UINT32, end)
        if size > end - self.at:
            raise CorruptProperties(f"a size of {size} at {self.at} extends past {end}")
        return self.at + size

    def table(self, end: int, depth: int = 0) -> Table:
        end = self.sized_end(end)
        fields: Table = {}
        while self.at < end:
            name = self.short_string(end)
            fields[name] = self.value(end, depth)
        return fields

    def value(self, end: int, depth: int) -> Value:
        self.objects += 1
        if self.objects > OBJECTS_MAX:
            raise CorruptProperties(f"more than {OBJECTS_MAX:,} fields")
        kind = self.take(1, end)[0]
        if kind in _NUMBERS:
            return self.number(_NUMBERS[kind], end)
        match chr(kind):
            case "S":
                return self._long_string(end)
            case "t":
                return self.take(1, end)[0] != 0
            case "F":
                return self.table(end, self._deeper(depth))
            case "A":
                return self._array(end, self._deeper(depth))
            case "T":
                return Timestamp(self.number(_UINT64, end))
            case "x":
                return bytes(self.take(self.number(_UINT32, end), end))
            case "D":
                scale, mantissa = _DECIMAL.unpack(self.take(_DECIMAL.size, end))
                return Decimal(mantissa).scaleb(-scale)
            case "V":
                return None
        raise CorruptProperties(f"unknown field type {chr(kind)!r} at {self.at - 1}")

    def _deeper(self, depth: int) -> int:
        if depth + 1 >= DEPTH_MAX:
            raise CorruptProperties(f"tables nested deeper than {DEPTH_MAX}")
        return depth + 1

    def _long_string(self, end: int) -> str | bytes:
        data = bytes(self.take(self.number(_UINT32, end), end))
        try:
            return data.decode()
        except UnicodeDecodeError:
            return data

    def _array(self, end: int, depth: int) -> list[Value]:
        end = self.sized_end(end)
        items = []
        while self.at < end:
            items.append(self.value(end, depth))
        return items

    def flags(self) -> int:
        flags = self.number(_UINT16, len(self.data))
        # Bit 0 announces another word of flags, bit 1 has no meaning: no property of `basic` needs them.
        if flags & 3:
            raise CorruptProperties(f"unknown property flags {flags:#06x}")
        return flags

    def property_end(self, name: str) -> None:
        """Skips a property without decoding it."""
        end = len(self.data)
        if name == "headers":
            self.at = self.sized_end(end)
        elif name in _OCTETS:
            self.take(1, end)
        elif name == "timestamp":
            self.take(8, end)
        else:
            self.take(self.take(1, end)[0], end)

    def property_value(self, name: str) -> Value:
        end = len(self.data)
        if name == "headers":
            return self.table(end)
        if name in _OCTETS:
            return self.take(1, end)[0]
        if name == "timestamp":
            return Timestamp(self.number(_UINT64, end))
        return self.short_string(end)

    def finish(self) -> None:
        if self.at != len(self.data):
            raise CorruptProperties(f"{len(self.data) - self.at} bytes follow the last property")


def decode_properties(raw: Buffer) -> Table:
    """The properties that are present, by name."""
    reader = _Reader(raw)
    flags = reader.flags()
    found = {name: reader.property_value(name) for name, flag in _FLAG.items() if flags & flag}
    reader.finish()
    return found


def property_of(raw: Buffer, wanted: str) -> Value:
    """One property, or None if it is absent. Cheaper than decoding all: the properties before it are skipped."""
    if wanted not in _FLAG:
        raise InvalidInput(f"unknown property {wanted!r}")
    reader = _Reader(raw)
    flags = reader.flags()
    if not flags & _FLAG[wanted]:
        return None
    for name, flag in _FLAG.items():
        if name == wanted:
            break
        if flags & flag:
            reader.property_end(name)
    return reader.property_value(wanted)


def encode_properties(properties: Mapping[str, Value]) -> bytes:
    """Encodes flags and property list. Properties that are None are omitted."""
    return edit(b"\x00\x00", properties)


def decode_table(raw: Buffer) -> Table:
    """Decodes a field table that starts with its 32-bit size and fills the data."""
    reader = _Reader(raw)
    fields = reader.table(len(reader.data))
    reader.finish()
    return fields


def encode_table(fields: Mapping[str, Value]) -> bytes:
    """Encodes a field table, starting with its 32-bit size. Fields keep the order of the mapping."""
    return _sized(b"".join(_encode_field(name, value, 0) for name, value in fields.items()))


def edit(
    raw: Buffer,
    properties: Mapping[str, Value] | None = None,
    *,
    headers: Mapping[str, Value] | None = None,
    headers_removed: Iterable[str] = (),
) -> bytes:
    """Sets or removes (None) properties, and sets or removes fields of the headers.

    The bytes of all other properties and fields are copied, not decoded and encoded again.
    """
    changes = dict(properties or {})
    unknown = changes.keys() - _FLAG.keys()
    if unknown:
        raise InvalidInput(f"unknown property {min(unknown)!r}")
    reader = _Reader(raw)
    old_flags = reader.flags()
    flags = 0
    parts = []
    removed = frozenset(headers_removed)
    for name, flag in _FLAG.items():
        part = b""
        if old_flags & flag:
            start = reader.at
            reader.property_end(name)
            part = bytes(reader.data[start : reader.at])
        if name in changes:
            value = changes[name]
            part = b"" if value is None else _encode_property(name, value)
        if name == "headers" and (headers or removed):
            part = _edit_table(part or _sized(b""), headers or {}, removed)
        if part:
            flags |= flag
            parts.append(part)
    reader.finish()
    return _UINT16.pack(flags) + b"".join(parts)


def _edit_table(raw: bytes, changes: Mapping[str, Value], removed: frozenset[str]) -> bytes:
    reader = _Reader(raw)
    end = reader.sized_end(len(raw))
    parts = []
    while reader.at < end:
        start = reader.at
        name = reader.short_string(end)
        reader.value(end, 0)
        if name not in changes and name not in removed:
            parts.append(raw[start : reader.at])
    parts.extend(_encode_field(name, value, 0) for name, value in changes.items())
    return _sized(b"".join(parts))


def _encode_property(name: str, value: Value) -> bytes:
    if name == "headers":
        if isinstance(value, Mapping):
            return encode_table(value)
    elif name in _OCTETS:
        if isinstance(value, int) and 0 <= value <= 255:
            return bytes((value,))
    elif name == "timestamp":
        if isinstance(value, int) and 0 <= value < 2**64:
            return _UINT64.pack(value)
    elif isinstance(value, str):
        return _short_string(value)
    raise InvalidInput(f"{name} cannot be {value!r:.100}")


def _sized(data: bytes) -> bytes:
    if len(data) >= 2**32:
        raise InvalidInput(f"a field of {len(data):,} bytes does not fit 32 bits")
    return _UINT32.pack(len(data)) + data


def _text(text: str) -> bytes:
    """Restores bytes that were not UTF-8: clients send routing keys as bytes, and here they are text."""
    return text.encode("utf-8", "surrogateescape")


def _short_string(text: str) -> bytes:
    data = _text(text)
    if len(data) > SHORT_STRING_BYTES_MAX:
        raise InvalidInput(f"{text!r:.40}... is longer than {SHORT_STRING_BYTES_MAX} bytes")
    return bytes((len(data),)) + data


def _encode_field(name: str, value: Value, depth: int) -> bytes:
    return _short_string(name) + _encode_value(value, depth)


def _encode_value(value: Value, depth: int) -> bytes:
    # The types that all clients can read: I or l for integers, d for floats, S for text.
    if isinstance(value, str):
        return b"S" + _sized(_text(value))
    if isinstance(value, bool):
        return b"t\x01" if value else b"t\x00"
    if isinstance(value, Timestamp):
        return b"T" + _packed(_UINT64, value)
    if isinstance(value, int):
        small = -(2**31) <= value < 2**31 and not isinstance(value, Int64)
        return b"I" + _INT32.pack(value) if small else b"l" + _packed(_INT64, value)
    if isinstance(value, float):
        return b"d" + _DOUBLE.pack(value)
    if isinstance(value, bytes | bytearray):
        return b"x" + _sized(value)
    if isinstance(value, Decimal):
        return b"D" + _decimal(value)
    if value is None:
        return b"V"
    if depth + 1 >= DEPTH_MAX:
        raise InvalidInput(f"tables nested deeper than {DEPTH_MAX}")
    if isinstance(value, Mapping):
        return b"F" + _sized(b"".join(_encode_field(name, item, depth + 1) for name, item in value.items()))
    if isinstance(value, list | tuple):
        return b"A" + _sized(b"".join(_encode_value(item, depth + 1) for item in value))
    raise InvalidInput(f"a field table cannot hold {type(value).__name__}")


def _packed(kind: struct.Struct, value: int) -> bytes:
    try:
        return kind.pack(value)
    except struct.error:
        raise InvalidInput(f"{value} does not fit 64 bits") from None


def _decimal(value: Decimal) -> bytes:
    exponent = value.as_tuple().exponent
    if not isinstance(exponent, int) or exponent > 9:
        raise InvalidInput(f"{value} is not a number that a field table can hold")
    scale = max(0, -exponent)
    try:
        return _DECIMAL.pack(scale, int(value.scaleb(scale)))
    except (struct.error, ArithmeticError):
        raise InvalidInput(f"{value} does not fit a decimal of 32 bits") from None
