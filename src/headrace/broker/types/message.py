"""A message as an object. Only messages that need to be examined become one; others are handled as whole batches."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.errors import CorruptProperties, InvalidInput
from headrace.record.amqp.properties import Table, decode_properties, edit, encode_properties, property_of
from headrace.record.amqp.trace_headers import traces_of
from headrace.record.layout import (
    AMQP_CLIENT_DEATHS_HEADER,
    AMQP_EXCHANGE_HEADER,
    AMQP_PROPERTIES_HEADER,
    AMQP_RETRIES_HEADER,
)
from headrace.record.types import Record

NO_PROPERTIES = b"\x00\x00"
TTL_MS_MAX = 315_360_000_000  # ten years: RabbitMQ's limit for clients
DIGITS_MAX = 255  # the property is a short string
KEY_BYTES_MAX = 255
RETRIES_MAX = 2**62 - 1
_NUMBER = re.compile(r"[+-]?[0-9]+")
HASHED = ("message_id", "correlation_id", "timestamp")


def to_bytes(text: str) -> bytes:
    """Names are text in the broker and bytes on the wire. Bytes that are not UTF-8 survive the round trip."""
    return text.encode("utf-8", "surrogateescape")


def to_text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def keys_in(found: Iterable[object]) -> list[str]:
    """The routing keys in a list of a header. A key that is not UTF-8 is decoded as bytes; items of other types are
    ignored, as in RabbitMQ."""
    return [to_text(key) if isinstance(key, bytes) else key for key in found if isinstance(key, str | bytes)]


def cc_keys(headers: Mapping[str, Any]) -> list[str]:
    """The routing keys in the CC header; clients may send anything in it."""
    found = headers.get("CC")
    return keys_in(found) if isinstance(found, list) else []


def expiration_fault(text: object) -> str | None:
    """Why the property is not an expiration (milliseconds, as digits), in RabbitMQ's words; None if it is one."""
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
    # Read from a log. Other listeners append to logs without checking AMQP properties: unreadable ones count as absent,
    # or one such message would keep its queue from dropping messages.
    is_stored: bool = False
    claims_deaths: bool = False  # its header x-death is the publisher's, not the broker's
    retries: int = 0  # how often the retry policy of its queue has returned it

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
        """A property as the text that a consistent-hash exchange hashes."""
        return str(self._property(name) or "") if name in HASHED else ""

    def take_receivers(self) -> list[str]:
        """The routing key and those of the CC and BCC headers of a message that a client publishes. Removes BCC from
        the message, and notes whether the client sent x-death."""
        keys = [self.routing_key]
        headers = self.headers()
        self.claims_deaths = "x-death" in headers
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
        claim = ((AMQP_CLIENT_DEATHS_HEADER, b""),) if self.claims_deaths else ()
        retries = ((AMQP_RETRIES_HEADER, self.retries.to_bytes(8, "big")),) if self.retries else ()
        return *ours, *traces_of(self.properties), *retries, *claim

    @property
    def key(self) -> bytes:
        return to_bytes(self.routing_key)


def properties_of(record: Record) -> bytes | None:
    """The AMQP properties of a record that the AMQP listener wrote; None for records of other listeners, and for the
    rare ones that need more than their properties."""
    headers = record.headers
    if len(headers) < 2 or headers[0][0] != AMQP_PROPERTIES_HEADER or headers[1][0] != AMQP_EXCHANGE_HEADER:
        return None
    properties = headers[0][1]
    if properties is None or len(properties) < len(NO_PROPERTIES):
        return None
    # Further headers must be copies of the trace headers; others were added by another listener and must be kept.
    is_copied = len(headers) == 2 or tuple(headers[2:]) == traces_of(properties)
    return properties if is_copied else None


def from_record(record: Record) -> Message:
    """The message of a record. The headers of a record from another listener become AMQP headers."""
    if record.headers and record.headers[-1][0] in (AMQP_CLIENT_DEATHS_HEADER, AMQP_RETRIES_HEADER):
        return _annotated(record)
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


def _annotated(record: Record) -> Message:
    """A message with the broker's own headers behind those of all messages. Other listeners can append such headers,
    too, with any content."""
    headers = list(record.headers)
    claims_deaths, retries = False, 0
    while headers and headers[-1][0] in (AMQP_CLIENT_DEATHS_HEADER, AMQP_RETRIES_HEADER):
        name, value = headers.pop()
        if name == AMQP_CLIENT_DEATHS_HEADER:
            claims_deaths = True
        else:
            retries = int.from_bytes((value or b"")[:8], "big") & RETRIES_MAX
    rest = Record(record.offset, record.timestamp, record.key, record.value, tuple(headers))
    return replace(from_record(rest), claims_deaths=claims_deaths, retries=retries)


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
