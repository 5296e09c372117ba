"""Converts AMQP arguments to JSON and back: an AMQP table has types that JSON lacks.

Such a value becomes an object with one member, whose name is the type. It must come back exactly: a binding is
identified by its arguments, and headers exchanges compare headers with them.
"""

import math
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any

from headrace.record.amqp.properties import Timestamp

_READ: dict[str, Callable[[Any], Any]] = {
    "$bytes": b64decode,
    "$timestamp": Timestamp,
    "$decimal": Decimal,
    "$float": float,
    "$table": lambda members: _table(members, from_plain),
}


def to_plain(value: Any) -> Any:
    if isinstance(value, Timestamp):
        return {"$timestamp": int(value)}
    if isinstance(value, bytes):
        return {"$bytes": b64encode(value).decode()}
    if isinstance(value, Decimal):
        return {"$decimal": str(value)}
    if isinstance(value, float) and not math.isfinite(value):
        return {"$float": str(value)}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, Mapping):
        members = _table(value, to_plain)
        # A client's own table may look like one of our type objects: it is wrapped.
        return {"$table": members} if _kind(value) is not None else members
    return value


def from_plain(value: Any) -> Any:
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if isinstance(value, Mapping):
        kind = _kind(value)
        return _READ[kind](value[kind]) if kind is not None else _table(value, from_plain)
    return value


def _kind(value: Mapping[str, Any]) -> str | None:
    return next((name for name in value if name in _READ), None) if len(value) == 1 else None


def _table(members: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: change(value) for name, value in members.items()}


def stored(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return _table(arguments, to_plain)


def loaded(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return _table(arguments, from_plain)
