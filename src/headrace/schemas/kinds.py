"""The three schema types, and the checks that each compatibility level demands."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headrace.errors import InvalidInput
from headrace.schemas import refusals

AVRO, JSON, PROTOBUF = "AVRO", "JSON", "PROTOBUF"


class Schema(Protocol):
    @property
    def text(self) -> str:
        """The canonical text: equal for equal schemas, however they were typed."""

    def normalized(self) -> str:
        """Like `text`, but also equal for schemas that differ only in an order without meaning."""

    def breaks(self, writer: Any) -> list[str]:
        """Why a reader with this schema cannot read all data of the writer's schema, which has the same type."""


KINDS = (AVRO, JSON, PROTOBUF)

NONE = "NONE"
DEFAULT_LEVEL = "BACKWARD"
LEVELS = (NONE, *(kind + rest for kind in ("BACKWARD", "FORWARD", "FULL") for rest in ("", "_TRANSITIVE")))


def _language(kind: str) -> Any:
    """Imported with the first schema: a broker without schemas starts 5 % faster."""
    if kind == AVRO:
        from headrace.schemas.avro import Avro

        return Avro
    if kind == JSON:
        from headrace.schemas.json_schema import JsonSchema

        return JsonSchema
    from headrace.schemas.protobuf import Protobuf

    return Protobuf


def parse(kind: str, text: str, references: Mapping[str, str]) -> Schema:
    if kind not in KINDS:
        raise refusals.invalid_schema(f"unknown schema type {kind[:40]!r}; the types are {', '.join(KINDS)}")
    try:
        schema: Schema = _language(kind).parse(text, references)
    except InvalidInput as error:
        raise refusals.invalid_schema(str(error)) from None
    except RecursionError:  # in a part that is stored unparsed, such as the default of a field
        raise refusals.invalid_schema("the schema is nested too deeply") from None
    return schema


def normalized(schema: Schema) -> str:
    try:
        return schema.normalized()
    except RecursionError:  # normalizing needs slightly more stack than parsing
        raise refusals.invalid_schema("the schema is nested too deeply to be normalized") from None


def earlier_ones(level: str, versions: Sequence[int]) -> Sequence[int]:
    """The versions that a new schema is compared with: the last one, or all."""
    if level == NONE:
        return ()
    return versions if level.endswith("_TRANSITIVE") else versions[-1:]


def differences(level: str, new: Schema, old: Schema) -> list[str]:
    """Why the compatibility level does not allow the new schema after the old one; empty if it does."""
    if level == NONE:
        return []
    if type(new) is not type(old):
        return ["the schema type differs from that of the previous version"]
    found = []
    if level.startswith(("BACKWARD", "FULL")):
        found += new.breaks(old)
    if level.startswith(("FORWARD", "FULL")):
        found += [f"{reason} (with the older schema as the reader)" for reason in old.breaks(new)]
    return found
