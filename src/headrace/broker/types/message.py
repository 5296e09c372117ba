"""A message taken out of its batch, for the few that need a decision: the rest never become objects."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import CorruptProperties, InvalidInput
from headrace.record.amqp.properties import Table, decode_properties, edit, encode_properties, property_of
from headrace.record.amqp.trace_headers import traces_of
from headrace.record.layout import AMQP_EXCHANGE_HEADER, AMQP_PROPERTIES_HEADER
from headrace.record.types import Record

NO_PROPERTIES = b"\x00\x00"
TTL_MS_MAX = 315_360_000_000  # ten years: what RabbitMQ takes of a client
DIGITS_MAX = 255  # more do not fit the property
KEY_BYTES_MAX = 255
_NUMBER = re.compile(r"[+-]?[0-9]+")
HASHED = ("message_id", "correlation_id", "timestamp")


def to_bytes(text: str) -> bytes:
    """Names travel as text here and as bytes on the wire; what is not UTF-8 comes back as it was."""
    return text.encode("utf-8", "surrogateescape")


def to_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def keys_in(found: Iterable[object]) -> list[str]:
    """The routing keys in a list of a header. One that is no UTF-8 is read as bytes; what is no text is none, as in
    RabbitMQ."""
    return [to_text(key) if isinstance(key, bytes) else key for key in found if isinstance(key, str | bytes)]


def expiration_fault(text: object) -> str | None:
    """Why the property cannot be an expiration, in RabbitMQ's words: it is milliseconds, in digits."""
    found = _NUMBER.match(text) if isinstance(text, str) else None
    if found is None:
        return "no_integer"
    if rest := found.string[found.end() :]:
        return f'{{leftover_string,"{rest}"}}'
    if len(found[0]) > DIGITS_MAX or int(found[0]) > TTL_MS_MAX:
        return f"{{value_too_large,{found[0]}}}"
    return f"{{value_negative,{found[0]}}}" if int(found[0]) < 0 else None


@dataclass(slots=True)
class Message:
    exchange: str
    routing_key: str
    properties: bytes  # flags and list, as on the wire
    body: bytes
    timestamp: int = -1
    # It comes from a log. Other listeners append to logs, too, and nobody has looked at the properties a record brings:
    # those that cannot be read are as good as none, or one such message would keep a queue from dropping any.
    is_stored: bool = False

    def decoded(self) -> Table:
        return decode_properties(self.properties)

    def headers(self) -> dict[str, Any]:
        found = self._property("headers") if self.has_headers else None
        return found if isinstance(found, dict) else {}

    def with_headers(self, **headers: Any) -> "Message":
        try:
            properties = edit(self.properties, headers=headers)
        except CorruptProperties:
            if not self.is_stored:
                raise
            properties = edit(NO_PROPERTIES, headers=headers)
        return replace(self, properties=properties)

    def _property(self, name: str) -> Any:
        try:
            return property_of(self.properties, name)
        except CorruptProperties:
            if not self.is_stored:
                raise
            return None

    @property
    def has_expiration(self) -> bool:
        return bool(self.properties[0] & 0x01)

    @property
    def has_headers(self) -> bool:
        return bool(self.properties[0] & 0x20)

    @property
    def has_priority(self) -> bool:
        return bool(self.properties[0] & 0x08)

    @property
    def has_user_id(self) -> bool:
        return bool(self.properties[1] & 0x10)

    def priority(self) -> int:
        found = self._property("priority") if self.has_priority else None
        return found if isinstance(found, int) else 0

    def expiration(self) -> Any:
        return self._property("expiration") if self.has_expiration else None

    def expiration_ms(self) -> int | None:
        text = self.expiration()
        return int(text) if expiration_fault(text) is None else None

    def hashable(self, name: str) -> str:
        """A property that a consistent hash may be asked to use."""
        return str(self._property(name) or "") if name in HASHED else ""

    def take_receivers(self) -> list[str]:
        """Its routing key and those of its CC and BCC headers; BCC is removed from what is delivered."""
        keys = [self.routing_key]
        headers = self.headers()
        for name in ("CC", "BCC"):
            if name not in headers:
                continue
            if not isinstance(headers[name], list):
                raise InvalidInput(f"invalid '{name}' header: not a list of routing keys")
            keys += keys_in(headers[name])
        if "BCC" in headers:
            self.properties = edit(self.properties, headers_removed=("BCC",))
        return keys

    def record_headers(self) -> tuple[tuple[str, bytes], ...]:
        ours = (AMQP_PROPERTIES_HEADER, self.properties), (AMQP_EXCHANGE_HEADER, to_bytes(self.exchange))
        return *ours, *traces_of(self.properties)

    @property
    def key(self) -> bytes:
        return to_bytes(self.routing_key)


def properties_of(record: Record) -> bytes | None:
    """Of a record as AMQP writes it; None for one that came in by another listener."""
    headers = record.headers
    if len(headers) < 2 or headers[0][0] != AMQP_PROPERTIES_HEADER or headers[1][0] != AMQP_EXCHANGE_HEADER:
        return None
    properties = headers[0][1]
    if properties is None or len(properties) < len(NO_PROPERTIES):
        return None
    # A header that says something else came in by another listener, and counts.
    is_copied = len(headers) == 2 or tuple(headers[2:]) == traces_of(properties)
    return properties if is_copied else None


def from_record(record: Record) -> Message:
    """The message a record is. One that came in by another listener brings its headers as AMQP headers."""
    properties = properties_of(record)
    if properties is None:
        return _foreign(record, record.headers)
    return Message(
        to_text(record.headers[1][1] or b""),
        to_text(record.key or b""),
        properties,
        record.value or b"",
        record.timestamp,
        is_stored=True,
    )


def _foreign(record: Record, headers: Iterable[tuple[str, bytes | None]]) -> Message:
    table: dict[str, Any] = {}
    properties: bytes | None = None
    exchange = ""
    for name, value in headers:
        if name == AMQP_PROPERTIES_HEADER and value is not None and len(value) >= len(NO_PROPERTIES):
            properties = value
        elif name == AMQP_EXCHANGE_HEADER:
            exchange = to_text(value or b"")
        elif len(to_bytes(name)) <= KEY_BYTES_MAX:
            table[name] = _text_or_bytes(value)
    key = record.key or b""
    if len(key) > KEY_BYTES_MAX:
        table["x-record-key"] = _text_or_bytes(key)
        key = b""
    if properties is None or table:
        base = properties if properties is not None else encode_properties({"delivery_mode": 2})
        try:
            properties = edit(base, headers=table)
        except CorruptProperties:
            properties = edit(NO_PROPERTIES, headers=table)
    return Message(exchange, to_text(key), properties, record.value or b"", record.timestamp, is_stored=True)


def _text_or_bytes(value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value
