"""A slow reference encoder of RecordBatch v2: struct, loops and the crc32c package. Shares no code with the kernels."""

import struct
from dataclasses import dataclass, field

import crc32c

HEADER = struct.Struct(">qiibIhiqqqhii")


@dataclass
class Message:
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    timestamp: int


@dataclass
class Fields:
    """The header fields of a batch that a test can choose."""

    base_offset: int = 0
    leader_epoch: int = -1
    attributes: int = 0
    producer_id: int = -1
    producer_epoch: int = -1
    base_sequence: int = -1
    deltas: list[int] = field(default_factory=list)  # offset deltas, if they are not 0 to n-1


def varint(value: int) -> bytes:
    unsigned = value << 1 if value >= 0 else (-value << 1) - 1
    out = bytearray()
    while unsigned > 0x7F:
        out.append(unsigned & 0x7F | 0x80)
        unsigned >>= 7
    out.append(unsigned)
    return bytes(out)


def sized(data: bytes | None) -> bytes:
    return varint(-1) if data is None else varint(len(data)) + data


def record(message: Message, delta: int, base_timestamp: int) -> bytes:
    body = b"\x00" + varint(message.timestamp - base_timestamp) + varint(delta)
    body += sized(message.key) + sized(message.value) + varint(len(message.headers))
    for name, value in message.headers:
        body += sized(name.encode()) + sized(value)
    return varint(len(body)) + body


def payload(messages: list[Message], deltas: list[int] | None = None) -> bytes:
    base = messages[0].timestamp if messages else -1
    return b"".join(
        record(message, delta, base) for message, delta in zip(messages, deltas or range(len(messages)), strict=True)
    )


def batch(messages: list[Message], fields: Fields | None = None, *, body: bytes | None = None, **header: int) -> bytes:
    """Encode a batch of these messages. body replaces the encoded records; header overrides any field."""
    fields = fields or Fields()
    if body is None:
        body = payload(messages, fields.deltas)
    deltas = fields.deltas or list(range(len(messages)))
    values = {
        "base_offset": fields.base_offset,
        "length": HEADER.size - 12 + len(body),
        "leader_epoch": fields.leader_epoch,
        "magic": 2,
        "crc": 0,
        "attributes": fields.attributes,
        "last_offset_delta": deltas[-1] if deltas else 0,
        "base_timestamp": messages[0].timestamp if messages else -1,
        "max_timestamp": max((m.timestamp for m in messages), default=-1),
        "producer_id": fields.producer_id,
        "producer_epoch": fields.producer_epoch,
        "base_sequence": fields.base_sequence,
        "count": len(messages),
    }
    values.update(header)
    out = bytearray(HEADER.pack(*values.values()) + body)
    if "crc" not in header:
        out[17:21] = struct.pack(">I", crc32c.crc32c(out[21:]))
    return bytes(out)


def sign(data: bytes | bytearray) -> bytes:
    """Return the same bytes with a correct checksum, for damage that another check must detect."""
    out = bytearray(data)
    out[17:21] = struct.pack(">I", crc32c.crc32c(out[21:]))
    return bytes(out)
