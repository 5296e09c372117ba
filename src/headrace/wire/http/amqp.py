"""What a message that came in by the AMQP listener looks like in JSON: its exchange, and its properties by name.

The record keeps the properties as the client sent them, in one header; here they are taken apart for people.
"""

import base64
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from headrace.errors import CorruptProperties
from headrace.record.amqp.properties import Timestamp, decode_properties
from headrace.record.layout import AMQP_EXCHANGE_HEADER, AMQP_PROPERTIES_HEADER


def amqp_shape(headers: Sequence[tuple[str, bytes | None]]) -> dict[str, Any] | None:
    """None for a record that is no AMQP message, and for one whose properties cannot be read."""
    held = dict(headers)
    raw = held.get(AMQP_PROPERTIES_HEADER)
    if raw is None:
        return None
    try:
        properties = decode_properties(raw)
    except CorruptProperties:
        return None
    exchange = held.get(AMQP_EXCHANGE_HEADER) or b""
    return {
        "exchange": exchange.decode(errors="replace"),
        "properties": {name: plain(value) for name, value in properties.items() if value is not None},
    }


def plain(value: Any) -> Any:
    """A field table's value as JSON has it; bytes that are no text become their base64."""
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode("ascii")
    if isinstance(value, Timestamp):
        return int(value)
    return float(value) if isinstance(value, Decimal) else value
