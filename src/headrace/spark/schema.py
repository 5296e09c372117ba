"""The columns of the source: what they are called, their Spark types, and what the decoder must unpack for them."""

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

# Name: (Spark type, what the decoder unpacks). The first seven are those of Spark's Kafka source.
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
# What every record has. Spark is told so: it then generates code that asks no row whether there is a value.
NEVER_NULL = frozenset({"topic", "partition", "offset", "timestamp", "timestampType"})
DEFAULT = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType")


def columns_of(chosen: Sequence[str] | None, include_headers: bool) -> tuple[str, ...]:
    if chosen is None:
        return (*DEFAULT, "headers") if include_headers else DEFAULT
    for name in chosen:
        if name not in COLUMNS:
            raise BadOption("columns", f"there is no column {name!r}; there are {', '.join(COLUMNS)}")
    if len(set(chosen)) < len(chosen):
        raise BadOption("columns", "names a column twice")
    return tuple(chosen)


def ddl(columns: Sequence[str]) -> str:
    return ", ".join(f"`{name}` {COLUMNS[name][0]}{' NOT NULL' if name in NEVER_NULL else ''}" for name in columns)


def check_schema(schema: "StructType") -> tuple[str, ...]:
    """The columns of a schema that a user may have written: any of ours, in any order, of our types."""
    for field in schema.fields:
        known = COLUMNS.get(field.name)
        if known is None:
            raise BadOption("schema", f"there is no column {field.name!r}; there are {', '.join(COLUMNS)}")
        given = field.dataType.simpleString()
        if given != known[0]:
            raise BadOption("schema", f"column {field.name!r} is {known[0]}, not {given}: cast it after reading")
        if not field.nullable and field.name not in NEVER_NULL:
            raise BadOption("schema", f"column {field.name!r} may be null, so it cannot be NOT NULL")
    return tuple(field.name for field in schema.fields)


def wanted(columns: Sequence[str]) -> int:
    want = 0
    for name in columns:
        want |= COLUMNS[name][1]
    # Rows are counted by something that every record has.
    return want or WANT_OFFSET
