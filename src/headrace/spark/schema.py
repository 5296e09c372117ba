"""The columns of the source: names, Spark types, and the fields that the decoder must decode for them."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.record.layout import (
    WANT_HEADERS,
    WANT_KEY,
    WANT_OFFSET,
    WANT_TIMESTAMP,
    WANT_TIMESTAMP_TYPE,
    WANT_VALUE,
)
from headrace.spark.options import BadOption

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

# Name: (Spark type, fields to decode). The first seven are the columns of Spark's Kafka source.
COLUMNS: dict[str, tuple[str, int]] = {
    "key": ("binary", WANT_KEY),
    "value": ("binary", WANT_VALUE),
    "topic": ("string", 0),
    "partition": ("int", 0),
    "offset": ("bigint", WANT_OFFSET),
    "timestamp": ("timestamp", WANT_TIMESTAMP),
    "timestampType": ("int", WANT_TIMESTAMP_TYPE),
    "headers": ("array<struct<key:string,value:binary>>", WANT_HEADERS),
    "exchange": ("string", WANT_HEADERS),
    "routing_key": ("string", WANT_KEY | WANT_HEADERS),
    "properties": ("map<string,string>", WANT_HEADERS),
}
# Declared NOT NULL, so that Spark generates code without null checks for these columns.
NEVER_NULL = frozenset({"topic", "partition", "offset", "timestamp", "timestampType"})
DEFAULT = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")


def columns_of(chosen: Sequence[str] | None, include_headers: bool) -> tuple[str, ...]:
    if chosen is None:
        return (*DEFAULT, "headers") if include_headers else DEFAULT
    for name in chosen:
        if name not in COLUMNS:
            raise BadOption("columns", f"no such column: {name!r}; valid columns: {', '.join(COLUMNS)}")
    if len(set(chosen)) < len(chosen):
        raise BadOption("columns", "contains a column twice")
    return tuple(chosen)


def ddl(columns: Sequence[str]) -> str:
    return ", ".join(f"`{name}` {COLUMNS[name][0]}{' NOT NULL' if name in NEVER_NULL else ''}" for name in columns)


def check_schema(schema: "StructType") -> tuple[str, ...]:
    """The column names of a schema given by the user. Any of COLUMNS in any order is valid, with its type."""
    for field in schema.fields:
        known = COLUMNS.get(field.name)
        if known is None:
            raise BadOption("schema", f"no such column: {field.name!r}; valid columns: {', '.join(COLUMNS)}")
        given = field.dataType.simpleString()
        if given != known[0]:
            raise BadOption("schema", f"column {field.name!r} is {known[0]}, not {given}: cast it after reading")
        if not field.nullable and field.name not in NEVER_NULL:
            raise BadOption("schema", f"column {field.name!r} must be nullable")
    return tuple(field.name for field in schema.fields)


def fields_to_decode(columns: Sequence[str]) -> int:
    """Flags for the decoder."""
    want = 0
    for name in columns:
        want |= COLUMNS[name][1]
    # The decoder counts rows by a field that every record has.
    return want or WANT_OFFSET
