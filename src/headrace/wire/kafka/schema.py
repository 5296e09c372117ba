"""Compiles kio's dataclasses to the Structs of codec.pyx.

Each API and version is loaded when first used: all of them would take seconds and 200 MB, and a broker without Kafka
clients needs none.
"""

import dataclasses
import sys
import types
import typing
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

from headrace.wire.kafka.codec import KINDS, Field, Struct
from headrace.wire.kafka.older import OLDER, Difference

NO_UUID = bytes(16)
ZEROS: dict[str, object] = {
    "string": "",
    "bytes": b"",
    "records": b"",
    "uuid": NO_UUID,
    "bool": False,
    "float64": 0.0,
}
OF_AN_ENTITY = {"__module__", "__type__", "__version__", "__flexible__", "__api_key__", "__header_schema__"}
TIMES = {"timedelta_i32", "timedelta_i64", "datetime_i64"}  # held as plain milliseconds


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The type of a field, from its annotation."""

    kafka_type: str
    array: bool
    nullable: bool
    nested: type | None


@cache
def _kio() -> types.SimpleNamespace:
    """Import kio without hypothesis, which it imports if installed and a broker does not need."""
    hidden = "hypothesis" not in sys.modules
    if hidden:
        sys.modules["hypothesis"] = None  # type: ignore[assignment]  # makes Python refuse the import
    try:
        from kio.index import load_request_schema, load_response_schema
        from kio.schema.index import api_key_map, schema_name_map
    finally:
        if hidden:
            del sys.modules["hypothesis"]
    return types.SimpleNamespace(
        request=load_request_schema, response=load_response_schema, versions=schema_name_map, names=api_key_map
    )


@cache
def request_struct(api_key: int, version: int) -> Struct:
    return compile_struct(request_entity(api_key, version), request_entity(api_key, newest(api_key)))


@cache
def response_struct(api_key: int, version: int) -> Struct:
    return compile_struct(response_entity(api_key, version), response_entity(api_key, newest(api_key)))


def request_entity(api_key: int, version: int) -> type[Any]:
    return _entity(_kio().request, api_key, version)


def response_entity(api_key: int, version: int) -> type[Any]:
    return _entity(_kio().response, api_key, version)


@cache
def _entity(load: Callable[[int, int], type], api_key: int, version: int) -> type:
    difference = OLDER.get((api_key, version))
    return load(api_key, version) if difference is None else older(load(api_key, difference.version), difference)


def older(entity: type, difference: Difference) -> type:
    """The dataclass that kio would have for the older version."""
    fields = []
    known = shapes(entity)
    for field in dataclasses.fields(entity):
        place = f"{entity.__name__}.{field.name}"
        if place not in difference.without:
            shape, hint = known[field.name], typing.get_type_hints(entity)[field.name]
            if shape.nested is not None:
                assert shape.array and not shape.nullable, "older versions have no other nesting"
                hint = tuple[older(shape.nested, difference), ...]  # type: ignore[misc]
            fields.append((field.name, hint, dataclasses.field(default=field.default, metadata=field.metadata)))
        if place in difference.after:
            name, kind, hint = difference.after[place]
            fields.append((name, hint, dataclasses.field(metadata={"kafka_type": kind})))
    same = {name: value for name, value in vars(entity).items() if name in OF_AN_ENTITY}
    return dataclasses.make_dataclass(entity.__name__, fields, namespace=same, kw_only=True, frozen=True)


def newest(api_key: int) -> int:
    return int(max(_kio().versions[_kio().names[api_key]]))


def compile_struct(entity: type, latest: type | None) -> Struct:
    """latest is the same struct in the newest version: its fields that this version lacks get their defaults."""
    flexible: bool = entity.__flexible__  # type: ignore[attr-defined]
    later = shapes(latest) if latest is not None else {}
    fields = []
    mine = shapes(entity)
    for field in dataclasses.fields(entity):
        shape = mine[field.name]
        struct = None
        if shape.nested is not None:
            twin = later.get(field.name)
            struct = compile_struct(shape.nested, twin.nested if twin else None)
        fields.append(
            Field(
                field.name,
                KINDS[shape.kafka_type],
                nullable=shape.nullable,
                array=shape.array,
                tag=field.metadata.get("tag", -1),
                default=default_of(field, shape),
                struct=struct,
                flexible=flexible,
            )
        )
    absent = {}
    if latest is not None:
        absent = {
            field.name: default_of(field, later[field.name])
            for field in dataclasses.fields(latest)
            if field.name not in mine
        }
    return Struct(
        entity.__name__, fields, flexible=flexible, absent=absent, known=lambda: names_in_all_versions(entity)
    )


@cache
def names_in_all_versions(entity: type) -> frozenset[str]:
    """The names of all fields that a struct of this name has in any version of its API."""
    api_key: int = entity.__api_key__  # type: ignore[attr-defined]
    path = entity.__module__.split(".")  # kio.schema.<name>.v<version>.<request or response>
    load = _kio().request if path[-1] == "request" else _kio().response
    mine = f"{entity.__name__}."
    names = {one[0] for other in OLDER.values() for place, one in other.after.items() if place.startswith(mine)}
    for version in _kio().versions[_kio().names[api_key]]:
        twin = getattr(import_module(load(api_key, version).__module__), entity.__name__, None)
        if twin is not None:
            names |= {field.name for field in dataclasses.fields(twin)}
    return frozenset(names)


def shapes(entity: type) -> dict[str, Shape]:
    hints = typing.get_type_hints(entity)
    return {field.name: shape_of(field, hints[field.name]) for field in dataclasses.fields(entity)}


def shape_of(field: "dataclasses.Field[Any]", hint: Any) -> Shape:
    nullable = False
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        nullable = True
        hint = next(one for one in typing.get_args(hint) if one is not types.NoneType)
    array = typing.get_origin(hint) is tuple
    if array:
        hint = typing.get_args(hint)[0]
    nested: type | None = hint if isinstance(hint, type) and dataclasses.is_dataclass(hint) else None
    kafka_type = "struct" if nested is not None else field.metadata["kafka_type"]
    if kafka_type == "uuid" or kafka_type in TIMES:
        nullable = nullable and array  # no null on the wire: zeros or -1 stand for it
    if "tag" in field.metadata and not array and kafka_type == "struct":
        nullable = False  # a tagged struct is absent, never null
    return Shape(kafka_type, array, nullable, nested)


def default_of(field: "dataclasses.Field[Any]", shape: Shape) -> object:
    value = field.default
    if value is dataclasses.MISSING or dataclasses.is_dataclass(value):
        if shape.array:
            return []
        return None if shape.nullable or shape.kafka_type == "struct" else ZEROS.get(shape.kafka_type, 0)
    if shape.array:
        return list(value) if value is not None else None
    if shape.kafka_type in TIMES:
        return -1 if value is None else int(value.total_seconds() * 1000)
    if shape.kafka_type == "uuid":
        return NO_UUID
    if shape.kafka_type == "string" or isinstance(value, bytes | bool | float) or value is None:
        return value
    return int(value)
