"""Encodes and decodes all methods except publish, deliver and ack, which scan.pyx and deliver.pyx handle.

Names, order and types of the arguments come from pamqp's classes. The bytes are read and written here, with every
length checked, because pamqp refuses names that RabbitMQ allows and does not limit the size of tables.
"""

import struct
from typing import Any, ClassVar, Final, Generic, NamedTuple, TypeVar

from pamqp import commands
from pamqp.base import Frame

from headrace.errors import InvalidInput
from headrace.record.amqp.properties import decode_table, encode_table
from headrace.wire.amqp.protocol import (
    FRAME_END,
    FRAME_ERROR,
    FRAME_HEADER,
    FRAME_METHOD,
    SYNTAX_ERROR,
    ProtocolError,
)

_UNSIGNED: Final = {"octet": (1, ">B"), "short": (2, ">H"), "long": (4, ">I"), "longlong": (8, ">Q")}
_FRAME: Final = struct.Struct(">BHI")
_CONTENT: Final = struct.Struct(">HHQ")
_CLASS_BASIC: Final = 60
FRAME_BODY: Final = 3

F = TypeVar("F", bound=Frame)


class AccessRequest(Frame):
    """A method of AMQP 0-8 that old clients still send. RabbitMQ answers it; pamqp does not define it."""

    __slots__: ClassVar[list[str]] = ["realm", "exclusive", "passive", "active", "write", "read"]  # noqa: RUF023 - the order on the wire
    index = 0x001E000A
    name = "Access.Request"
    _realm = "shortstr"
    _exclusive = _passive = _active = _write = _read = "bit"


class AccessRequestOk(Frame):
    __slots__: ClassVar[list[str]] = ["ticket"]
    index = 0x001E000B
    name = "Access.RequestOk"
    _ticket = "short"


_METHODS: Final[dict[int, type[Frame]]] = {
    **commands.INDEX_MAPPING,
    AccessRequest.index: AccessRequest,
    AccessRequestOk.index: AccessRequestOk,
}
_FIELDS: Final[dict[type[Frame], tuple[tuple[str, str], ...]]] = {
    method: tuple((name, method.amqp_type(name)) for name in method.__slots__) for method in _METHODS.values()
}


def decode(class_id: int, method_id: int, arguments: bytes) -> Frame:
    """Raises, as RabbitMQ does, FRAME_ERROR for truncated or overlong arguments, SYNTAX_ERROR for a malformed table or
    name, and COMMAND_INVALID for an unknown method."""
    method = _METHODS.get(class_id << 16 | method_id)
    if method is None:
        raise ProtocolError(503, f"unknown method {class_id}.{method_id}", class_id, method_id)
    try:
        return _decode(method, arguments)
    except (InvalidInput, ValueError, IndexError, struct.error) as error:
        text = f"malformed arguments of {method.name}: {error}"
        code = SYNTAX_ERROR if isinstance(error, InvalidInput | UnicodeDecodeError) else FRAME_ERROR
        raise ProtocolError(code, text[:200], class_id, method_id) from None


class ReadMethod(NamedTuple, Generic[F]):
    method: F
    end: int  # of its frame


def read_leading(data: bytes, channel: int, kind: type[F], *, count_max: int, frame_max: int) -> list[ReadMethod[F]]:
    """The methods of one kind at the start of data, if they are complete, valid and of this channel."""
    head = _FRAME.pack(FRAME_METHOD, channel, 0)[:3]
    index = kind.index.to_bytes(4, "big")
    found: list[ReadMethod[F]] = []
    start = 0
    while len(found) < count_max and data.startswith(head, start) and data.startswith(index, start + _FRAME.size):
        end = start + _FRAME.size + int.from_bytes(data[start + 3 : start + 7], "big") + 1
        if end > len(data) or end - start > frame_max or data[end - 1] != FRAME_END:
            break
        try:
            method = _decode(kind, data[start + _FRAME.size + len(index) : end - 1])
        except (InvalidInput, ValueError, IndexError, struct.error):  # reported when the scanner comes to it
            break
        found.append(ReadMethod(method, end))
        start = end
    return found


def _decode(method: type[F], data: bytes) -> F:
    made = method.__new__(method)
    at, bits, bit = 0, 0, 8
    for name, kind in _FIELDS[method]:
        if kind == "bit":
            if bit == 8:
                bits, bit, at = data[at], 0, at + 1
            setattr(made, name, bool(bits >> bit & 1))
            bit += 1
            continue
        bit = 8
        if kind in _UNSIGNED:
            size, code = _UNSIGNED[kind]
            value: Any = struct.unpack_from(code, data, at)[0]
        else:
            value, size = _sized(kind, data, at)
        setattr(made, name, value)
        at += size
    if at != len(data):
        raise ValueError(f"{len(data) - at} trailing bytes")
    return made


def _sized(kind: str, data: bytes, at: int) -> tuple[Any, int]:
    """(value, bytes used) of a string or table, which starts with its size."""
    head = 1 if kind == "shortstr" else 4
    size = int.from_bytes(data[at : at + head], "big")
    raw = data[at + head : at + head + size]
    if len(data) < at + head or len(raw) != size:
        raise ValueError(f"{kind} of {size} bytes exceeds the frame")
    if kind == "shortstr":
        return raw.decode(), head + size
    if kind == "longstr":
        return raw, head + size
    assert kind == "table", kind
    return decode_table(data[at : at + head + size]), head + size


def frame(channel: int, method: type[Frame], **values: Any) -> bytes:
    """A method frame. Missing arguments are empty, zero or false."""
    payload = arguments(method, **values)
    return b"".join(
        (
            _FRAME.pack(FRAME_METHOD, channel, 4 + len(payload)),
            method.index.to_bytes(4, "big"),
            payload,
            bytes((FRAME_END,)),
        )
    )


def arguments(method: type[Frame], **values: Any) -> bytes:
    parts: list[bytes] = []
    bits, bit = 0, -1
    for name, kind in _FIELDS[method]:
        value = values.pop(name, None)
        if kind == "bit":
            bit += 1
            bits |= bool(value) << bit
            continue
        if bit >= 0:
            parts.append(bytes((bits,)))
            bits, bit = 0, -1
        parts.append(_encode(kind, value))
    if bit >= 0:
        parts.append(bytes((bits,)))
    assert not values, f"{method.name} has no {sorted(values)}"
    return b"".join(parts)


def _encode(kind: str, value: Any) -> bytes:
    if kind in _UNSIGNED:
        return struct.pack(_UNSIGNED[kind][1], value or 0)
    if kind == "table":
        return encode_table(value or {})
    data = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else bytes(value or b"")
    if kind == "shortstr":
        if len(data) > 255:  # the broker's texts may quote long names
            data = data[:255].decode("utf-8", "ignore").encode()
        return bytes((len(data),)) + data
    return len(data).to_bytes(4, "big") + data


def content_frames(
    channel: int, method: type[Frame], properties: bytes, body: bytes, frame_max: int, **values: Any
) -> bytes:
    """The frames of a method with a message: deliver, get-ok or return."""
    return b"".join(content_pieces(channel, method, properties, body, frame_max, **values))


def content_pieces(
    channel: int, method: type[Frame], properties: bytes, body: bytes, frame_max: int, **values: Any
) -> list[bytes | memoryview]:
    """The same frames in pieces that refer to the body, so that a large one is not copied."""
    end = bytes((FRAME_END,))
    pieces: list[bytes | memoryview] = [
        frame(channel, method, **values),
        _FRAME.pack(FRAME_HEADER, channel, _CONTENT.size + len(properties)),
        _CONTENT.pack(_CLASS_BASIC, 0, len(body)),
        properties,
        end,
    ]
    piece_max = frame_max - 8
    view = memoryview(body)
    for at in range(0, len(body), piece_max):
        piece = view[at : at + piece_max]
        pieces += [_FRAME.pack(FRAME_BODY, channel, len(piece)), piece, end]
    return pieces


def confirm(channel: int, tag: int, *, multiple: bool, positive: bool = True) -> bytes:
    """basic.ack or basic.nack to a publisher. Packed directly, because it is the most frequent frame."""
    return _CONFIRM.pack(1, channel, 13, 60, 80 if positive else 120, tag, multiple, FRAME_END)


_CONFIRM: Final = struct.Struct(">BHIHHQBB")
