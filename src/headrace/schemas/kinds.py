"""The three languages, and what each level of compatibility asks of a schema and the ones before it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from headrace.errors import InvalidInput
from headrace.schemas import refusals

AVRO, JSON, PROTOBUF = "AVRO", "JSON", "PROTOBUF"


class Schema(Protocol):
    @property
    def text(self) -> str:
        """The same for the same schema, however it was written."""

    def normalized(self) -> str:
        """The same also for those that differ only in the order of what has none."""

    def breaks(self, writer: Any) -> list[str]:
        """Why a reader with this one could not read all that is written with the other, of the same language."""


KINDS = (AVRO, JSON, PROTOBUF)

NONE = "NONE"
DEFAULT_LEVEL = "BACKWARD"
LEVELS = (NONE, *(kind + rest for kind in ("BACKWARD", "FORWARD", "FULL") for rest in ("", "_TRANSITIVE")))


def _language(kind: str) -> Any:
    """Imported when there is a first schema: a broker without any starts a twentieth sooner."""
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
        raise refusals.invalid_schema(f"there is no schema type {kind[:40]!r}: it is one of {', '.join(KINDS)}")
    try:
        schema: Schema = _language(kind).parse(text, references)
    except InvalidInput as error:
        raise refusals.invalid_schema(str(error)) from None
    except RecursionError:  # in a part that is only kept, as the default of a field
        raise refusals.invalid_schema("the schema is nested too deep") from None
    return schema


def normalized(schema: Schema) -> str:
    try:
        return schema.normalized()
    except RecursionError:  # it takes a little more than to parse it
        raise refusals.invalid_schema("the schema is nested too deep to be normalized") from None


def earlier_ones(level: str, versions: Sequence[int]) -> Sequence[int]:
    """Those that a new schema is compared with: the last, or all."""
    if level == NONE:
        return ()
    return versions if level.endswith("_TRANSITIVE") else versions[-1:]


def differences(level: str, new: Schema, old: Schema) -> list[str]:
    """Why the level does not allow the new schema after the old one."""
    if level == NONE:
        return []
    if type(new) is not type(old):
        return ["the schema is of another type than the one before it"]
    found = []
    if level.startswith(("BACKWARD", "FULL")):
        found += new.breaks(old)
    if level.startswith(("FORWARD", "FULL")):
        found += [f"{reason} (the older one as the reader)" for reason in old.breaks(new)]
    return found
