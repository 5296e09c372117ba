"""Avro schemas: parsing, and compatibility by the specification's schema resolution, with the results of Java's
SchemaCompatibility."""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import InvalidInput
from headrace.schemas import avro_text

TEXT_BYTES_MAX = 1 << 20
DEPTH_MAX = 100
STEPS_MAX = 600_000  # per comparison: about two seconds
REASONS_MAX = 50  # per type: a record that uses a type twice repeats all of its reasons
PRIMITIVES = frozenset({"null", "boolean", "int", "long", "float", "double", "bytes", "string"})
# Reader type -> writer types whose values it can read.
PROMOTED = {
    "long": {"int"},
    "float": {"int", "long"},
    "double": {"int", "long", "float"},
    "bytes": {"string"},
    "string": {"bytes"},
}
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(slots=True, eq=False)
class Node:
    """One type. Attributes that its kind does not use stay empty."""

    kind: str
    name: str = ""  # the full name
    aliases: tuple[str, ...] = ()
    fields: "dict[str, Field]" = field(default_factory=dict)
    symbols: tuple[str, ...] = ()
    default: str | None = None  # for an enum
    size: int = 0
    inner: "tuple[Node, ...]" = ()  # items, values, or the branches of a union

    def __str__(self) -> str:
        return self.name or self.kind


@dataclass(slots=True)
class Field:
    type: Node
    aliases: tuple[str, ...]
    has_default: bool


class Avro:
    def __init__(self, text: str, root: Node, known: frozenset[str], references: tuple[str, ...]) -> None:
        self.text = text
        self.references = references
        self._root = root
        self._known = known  # full names of the types that references define

    @classmethod
    def parse(cls, text: str, references: Mapping[str, str]) -> "Avro":
        """Parse a schema. `references` are ordered so that each comes after those it needs. Raises InvalidInput."""
        parser = _Parser()
        for name, referred in references.items():
            parser.whole(referred, f"reference {name[:80]!r}: ")
        known = frozenset(parser.names)
        root, value = parser.whole(text)
        return cls(avro_text.write(value, known), root, known, tuple(sorted(known & parser.used)))

    def normalized(self) -> str:
        return avro_text.write(avro_text.load(self.text), self._known, normalized=True)

    def breaks(self, writer: "Avro") -> list[str]:
        """Why a reader with this schema cannot read all data of the writer's schema; empty if it can."""
        try:
            return _Comparison().differences(self._root, writer._root)
        except RecursionError:  # a chain of named types is not nested, so its length is unbounded
            return ["TOO_DEEP at /: the types refer to each other too deeply to be compared"]
        except _TooManySteps:
            return ["TOO_MANY at /: there are too many pairs of types to compare"]


class _TooManySteps(Exception):
    pass


class _Parser:
    def __init__(self) -> None:
        self.names: dict[str, Node] = {}
        self.used: set[str] = set()
        # Caches whether a part of a default fits a type: unions of records would check the same pair many times.
        self._fitting: dict[tuple[int, int], bool] = {}  # for one default only: ids of objects are reused

    def whole(self, text: str, where: str = "") -> tuple[Node, Any]:
        if len(text) > TEXT_BYTES_MAX:
            raise InvalidInput(f"{where}a schema has at most {TEXT_BYTES_MAX:,} characters")
        try:
            value = avro_text.load(text)
        except RecursionError:
            raise InvalidInput(f"{where}the schema is nested too deeply") from None
        except ValueError as error:
            raise InvalidInput(f"{where}an Avro schema must be JSON: {error}") from None
        try:
            return self._node(value, "", 0), value
        except InvalidInput as error:
            raise InvalidInput(f"{where}{error}") from None

    def _node(self, value: Any, namespace: str, depth: int) -> Node:
        if depth > DEPTH_MAX:
            raise InvalidInput("the schema is nested too deeply")
        if isinstance(value, str):
            return self._named(value, namespace)
        if isinstance(value, list):
            return self._union(value, namespace, depth)
        if not isinstance(value, dict) or "type" not in value:
            raise InvalidInput(f"not a type: {json.dumps(value)[:80]}")
        kind = value["type"]
        match kind:
            case "record" | "error":
                return self._record(value, namespace, depth)
            case "enum":
                return self._enum(value, namespace)
            case "fixed":
                return self._fixed(value, namespace)
            case "array" | "map":
                part = "items" if kind == "array" else "values"
                if part not in value:
                    raise InvalidInput(f"a type {kind} must have {part}")
                return Node(kind, inner=(self._node(value[part], namespace, depth + 1),))
        return self._node(kind, namespace, depth + 1)  # {"type": "long", "logicalType": ...}, {"type": {...}}

    def _named(self, name: str, namespace: str) -> Node:
        if name in PRIMITIVES:
            return Node(name)
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        for one in (full, name):
            if one in self.names:
                self.used.add(one)
                return self.names[one]
        raise InvalidInput(f"unknown type {name[:80]!r}")

    def _union(self, branches: list[Any], namespace: str, depth: int) -> Node:
        found = tuple(self._node(branch, namespace, depth + 1) for branch in branches)
        kinds = [str(node) for node in found]
        if "union" in kinds:
            raise InvalidInput("a union must not contain a union")
        if len(set(kinds)) < len(kinds):
            raise InvalidInput(f"a union contains {next(k for k in kinds if kinds.count(k) > 1)} twice")
        return Node("union", inner=found)

    def _record(self, value: dict[str, Any], namespace: str, depth: int) -> Node:
        node, namespace = self._define("record", value, namespace)
        fields = value.get("fields")
        if not isinstance(fields, list):
            raise InvalidInput(f"record {node.name} has no list of fields")
        for one in fields:
            if not isinstance(one, dict) or "type" not in one:
                raise InvalidInput(f"a field of {node.name} needs a name and a type")
            name = _name(one.get("name"), f"a field of {node.name}")
            if name in node.fields:
                raise InvalidInput(f"record {node.name} has the field {name} twice")
            made = Field(self._node(one["type"], namespace, depth + 1), _strings(one, "aliases"), "default" in one)
            if made.has_default:
                self._check_default(one["default"], made.type, f"{node.name}.{name}", 0)
            node.fields[name] = made
        return node

    def _enum(self, value: dict[str, Any], namespace: str) -> Node:
        node, _ = self._define("enum", value, namespace)
        node.symbols = tuple(_name(symbol, f"a symbol of {node.name}") for symbol in _strings(value, "symbols"))
        if not node.symbols or len(set(node.symbols)) < len(node.symbols):
            raise InvalidInput(f"enum {node.name} needs symbols, each of them once")
        node.default = value.get("default")
        if "default" in value and node.default not in node.symbols:
            raise InvalidInput(f"the default of enum {node.name} is not one of its symbols")
        return node

    def _fixed(self, value: dict[str, Any], namespace: str) -> Node:
        node, _ = self._define("fixed", value, namespace)
        size = value.get("size")
        if type(size) is not int or size < 0:
            raise InvalidInput(f"fixed {node.name} needs a size")
        node.size = size
        return node

    def _define(self, kind: str, value: dict[str, Any], namespace: str) -> tuple[Node, str]:
        """Register a named type before its fields are parsed, because they may refer to it. Returns the node and the
        namespace inside it."""
        name = value.get("name")
        own = value.get("namespace")
        if isinstance(name, str) and "." in name:
            own, _, name = name.rpartition(".")
        elif own is None:
            own = namespace
        if not isinstance(own, str) or (own and not all(NAME.fullmatch(part) for part in own.split("."))):
            raise InvalidInput(f"not a namespace: {str(own)[:80]!r}")
        name = _name(name, f"a type {kind}")
        if name in PRIMITIVES:
            raise InvalidInput(f"{name} is the name of a primitive type")
        full = f"{own}.{name}" if own else name
        if full in self.names:
            raise InvalidInput(f"type {full} is defined twice")
        aliases = tuple(alias if "." in alias or not own else f"{own}.{alias}" for alias in _strings(value, "aliases"))
        node = self.names[full] = Node(kind, full, aliases)
        return node, own

    def _check_default(self, value: Any, node: Node, where: str, depth: int) -> None:
        """Raise unless the default fits the type; for a union, any branch will do (since Avro 1.12)."""
        self._fitting.clear()
        if not self._fits(value, node, depth):
            raise InvalidInput(f"the default of {where} is not a valid {node}")

    def _fits(self, value: Any, node: Node, depth: int) -> bool:
        """Whether a default is a value of the type."""
        if depth > DEPTH_MAX:
            return False
        pair = (id(value), id(node))
        if pair not in self._fitting:
            self._fitting[pair] = self._fits_uncached(value, node, depth + 1)
        return self._fitting[pair]

    def _fits_uncached(self, value: Any, node: Node, depth: int) -> bool:
        match node.kind:
            case "fixed":
                return isinstance(value, str) and len(value) == node.size
            case "enum":
                return value in node.symbols
            case "array":
                return isinstance(value, list) and all(self._fits(one, node.inner[0], depth) for one in value)
            case "map":
                return isinstance(value, dict) and all(self._fits(one, node.inner[0], depth) for one in value.values())
            case "union":
                return any(self._fits(value, branch, depth) for branch in node.inner)
            case "record":
                return isinstance(value, dict) and all(
                    self._fits(value[name], one.type, depth) if name in value else one.has_default
                    for name, one in node.fields.items()
                )
        return FITS[node.kind](value)


def _is_integer(value: Any, bits: int) -> bool:
    return type(value) is int and -(1 << bits - 1) <= value < 1 << bits - 1


def _is_float(value: Any) -> bool:
    return type(value) in (int, float) or value in ("NaN", "Infinity", "-Infinity")


FITS: dict[str, Callable[[Any], bool]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "int": lambda value: _is_integer(value, 32),
    "long": lambda value: _is_integer(value, 64),
    "float": _is_float,
    "double": _is_float,
    "string": lambda value: isinstance(value, str),
    "bytes": lambda value: isinstance(value, str),
}


class _Comparison:
    """Compares each pair of named types once, because types may contain themselves."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, int], list[str]] = {}
        self._steps = 0

    def differences(self, reader: Node, writer: Node, at: str = "/") -> list[str]:
        self._steps += 1
        if self._steps > STEPS_MAX:
            raise _TooManySteps
        if writer.kind == "union" and reader.kind == "union":
            found = []
            for number, branch in enumerate(writer.inner):
                if self.differences(reader, branch):
                    found.append(f"MISSING_UNION_BRANCH at {at}{number}: the reader has no {branch}")
            return found
        if writer.kind == "union":
            return [one for branch in writer.inner for one in self.differences(reader, branch, at)]
        if reader.kind == "union":
            if any(not self.differences(branch, writer) for branch in reader.inner):
                return []
            return [f"MISSING_UNION_BRANCH at {at}: the reader has no {writer}"]
        if reader.kind != writer.kind:
            if writer.kind in PROMOTED.get(reader.kind, ()):
                return []
            return [f"TYPE_MISMATCH at {at}: the reader has {reader.kind}, the writer {writer.kind}"]
        if reader.inner:
            part = "items" if reader.kind == "array" else "values"
            return self.differences(reader.inner[0], writer.inner[0], f"{at}{part}/")
        return self._named(reader, writer, at) if reader.name else []

    def _named(self, reader: Node, writer: Node, at: str) -> list[str]:
        pair = (id(reader), id(writer))
        if pair in self._seen:
            return self._seen[pair]
        self._seen[pair] = []  # while in progress: a recursive occurrence adds no reason of its own
        found = list(_names(reader, writer, at))
        if reader.kind == "fixed" and reader.size != writer.size:
            found.append(f"FIXED_SIZE_MISMATCH at {at}size: the reader has {reader.size}, the writer {writer.size}")
        if reader.kind == "enum" and reader.default is None and (gone := set(writer.symbols) - set(reader.symbols)):
            found.append(f"MISSING_ENUM_SYMBOLS at {at}symbols: the reader has no {', '.join(sorted(gone))}")
        for number, (name, one) in enumerate(reader.fields.items()):
            place = f"{at}fields/{number}/"
            other = next((writer.fields[called] for called in (name, *one.aliases) if called in writer.fields), None)
            if other is not None:
                found += self.differences(one.type, other.type, f"{place}type/")
            elif not one.has_default:
                found.append(f"READER_FIELD_MISSING_DEFAULT_VALUE at {place}: {name}")
        self._seen[pair] = found = found[:REASONS_MAX]
        return found


def _names(reader: Node, writer: Node, at: str) -> "list[str]":
    """The namespaces may differ, as in Java."""
    if reader.name.rpartition(".")[2] == writer.name.rpartition(".")[2] or writer.name in reader.aliases:
        return []
    return [f"NAME_MISMATCH at {at}name: the reader has {reader.name}, the writer {writer.name}"]


def _name(value: Any, what: str) -> str:
    if not isinstance(value, str) or NAME.fullmatch(value) is None:
        raise InvalidInput(f"{what} needs a name of letters, digits and underscores, not {str(value)[:80]!r}")
    return value


def _strings(value: dict[str, Any], key: str) -> tuple[str, ...]:
    found = value.get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise InvalidInput(f"{key} must be a list of strings")
    return tuple(found)
