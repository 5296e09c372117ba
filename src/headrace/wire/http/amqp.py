"""AMQP view of a record in JSON: its exchange and its properties by name.

The record stores the properties as the client encoded them, in one header; this module decodes them.
"""

import base64
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, TypedDict

from headrace.errors import CorruptProperties
from headrace.record.amqp.properties import Timestamp, decode_properties
from headrace.record.layout import AMQP_EXCHANGE_HEADER, AMQP_PROPERTIES_HEADER


class AmqpMessage(TypedDict):
    """Exchange and properties of a message that was published over AMQP."""

    exchange: str
    properties: dict[str, Any]


def amqp_message(headers: Sequence[tuple[str, bytes | None]]) -> AmqpMessage | None:
    """None for a record that was not published over AMQP or whose properties cannot be decoded."""
    by_name = dict(headers)
    encoded = by_name.get(AMQP_PROPERTIES_HEADER)
    if encoded is None:
        return None
    try:
        properties = decode_properties(encoded)
    except CorruptProperties:
        return None
    exchange = by_name.get(AMQP_EXCHANGE_HEADER) or b""
    return {
        "exchange": exchange.decode(errors="replace"),
        "properties": {name: as_json(value) for name, value in properties.items() if value is not None},
    }


def as_json(value: Any) -> Any:
    """A field-table value as JSON; bytes that are not UTF-8 become base64."""
    if isinstance(value, Mapping):
        return {name: as_json(item) for name, item in value.items()}
    if isinstance(value, list):
        return [as_json(item) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            return base64.b64encode(value).decode("ascii")
    if isinstance(value, Timestamp):
        return int(value)
    return float(value) if isinstance(value, Decimal) else value
