"""A message in the words of the API: payload as text where it is text, properties by name."""

import base64
import binascii
from collections.abc import Mapping
from typing import Any

from headrace.broker.types.message import NO_PROPERTIES, Message, expiration_fault
from headrace.errors import CorruptProperties, InvalidInput
from headrace.listeners.http.management.parameters import Shape
from headrace.listeners.http.server.requests import whole_number
from headrace.record.amqp.properties import PROPERTIES, Timestamp, decode_properties, encode_properties
from headrace.wire.http.amqp import as_json


def payload_shape(body: bytes, *, base64_always: bool = False) -> tuple[str, str]:
    if not base64_always:
        try:
            return body.decode(), "string"
        except UnicodeDecodeError:
            pass
    return base64.b64encode(body).decode("ascii"), "base64"


def message_shape(message: Message, *, redelivered: bool, left: int, base64_always: bool, cut: int) -> Shape:
    payload, encoding = payload_shape(message.body[:cut], base64_always=base64_always)
    return {
        "payload_bytes": len(message.body),
        "redelivered": redelivered,
        "exchange": message.exchange,
        "routing_key": message.routing_key,
        "message_count": left,
        "properties": properties_shape(message.properties),
        "payload": payload,
        "payload_encoding": encoding,
    }


def properties_shape(properties: bytes) -> Shape:
    if properties == NO_PROPERTIES:
        return {}
    try:
        return {name: as_json(value) for name, value in decode_properties(properties).items() if value is not None}
    except CorruptProperties:
        return {}


def parse_message(exchange: str, fields: Mapping[str, Any]) -> Message:
    """What `publish` sends: routing_key, payload, payload_encoding, properties."""
    key = fields.get("routing_key", "")
    payload = fields.get("payload", "")
    if not isinstance(key, str) or not isinstance(payload, str):
        raise InvalidInput("routing_key and payload are strings")
    if len(key.encode()) > 255:
        raise InvalidInput("a routing key has at most 255 bytes")
    encoding = fields.get("payload_encoding") or "string"
    if encoding == "base64":
        try:
            body = base64.b64decode(payload, validate=True)
        except (binascii.Error, ValueError):
            raise InvalidInput("payload is not base64") from None
    elif encoding == "string":
        body = payload.encode()
    else:
        raise InvalidInput("payload_encoding is string or base64")
    properties = fields.get("properties") or {}
    if not isinstance(properties, Mapping):
        raise InvalidInput("properties is a JSON object")
    return Message(exchange, key, parse_properties(properties), body)


def parse_properties(given: Mapping[str, Any]) -> bytes:
    known: dict[str, Any] = {}
    for name, value in given.items():
        if name not in PROPERTIES or value is None:
            continue
        if name == "timestamp":
            value = Timestamp(_number(name, value))
        elif name in ("delivery_mode", "priority"):
            value = _number(name, value)
        elif name == "headers":
            if not isinstance(value, Mapping):
                raise InvalidInput("headers is a JSON object")
        else:
            value = str(value)
        if name == "expiration" and expiration_fault(value):
            raise InvalidInput(f"invalid expiration {value!r:.60}")
        known[name] = value
    return encode_properties(known) if known else NO_PROPERTIES


def _number(name: str, value: Any) -> int:
    if isinstance(value, str):
        value = whole_number(value)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise InvalidInput(f"{name} is a whole number")
    return value
