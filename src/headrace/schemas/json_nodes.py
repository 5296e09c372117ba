"""A JSON Schema as a graph of nodes with one kind each, validated and with every `$ref` resolved.

The compatibility rules compare kinds, so a schema is split first: the keywords of one type form a node of that type,
with or without a `type`; several kinds side by side form an `allOf`; a list of types forms an `anyOf`. No `$ref` is
followed recursively, so the nesting of the text bounds the stack.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urljoin

from headrace.errors import InvalidInput

SIZE_MAX = 1_000_000
DEPTH_MAX = 100
NAME_SHOWN_MAX = 100

META_SCHEMAS = ("http://json-schema.org/", "https://json-schema.org/")  # well-known, compared by address
COMBINED = ("allOf", "anyOf", "oneOf")
REFS = ("$ref", "$dynamicRef", "$recursiveRef")

# Keywords with schemas as values.
ONE = (
    *("additionalItems", "additionalProperties", "contains", "else", "if", "items", "not", "propertyNames", "then"),
    *("unevaluatedItems", "unevaluatedProperties"),
)
NAMED = ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")

KINDS = {  # keywords that imply the type of a schema without one
    kind: frozenset(keywords.split())
    for kind, keywords in {
        "array": "additionalItems contains items maxContains maxItems minContains minItems prefixItems "
        "unevaluatedItems uniqueItems",
        "object": "additionalProperties dependencies dependentRequired dependentSchemas maxProperties minProperties "
        "patternProperties properties propertyNames required unevaluatedProperties",
        "number": "exclusiveMaximum exclusiveMinimum maximum minimum multipleOf",
        "string": "format maxLength minLength pattern",
    }.items()
}
TYPES = {kind: kind for kind in (*KINDS, "boolean", "null")} | {"integer": "number"}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def are_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


SHAPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    keyword: (what, fits)
    for keywords, what, fits in (
        (
            "$anchor $comment $dynamicAnchor $dynamicRef $id $recursiveRef $ref $schema description format "
            "pattern title",
            "a string",
            lambda v: isinstance(v, str),
        ),
        (
            "maxContains maxItems maxLength maxProperties minContains minItems minLength minProperties",
            "a whole number of at least 0",
            lambda v: _is_number(v) and isinstance(v, int) and v >= 0,
        ),
        ("maximum minimum", "a number", _is_number),
        ("exclusiveMaximum exclusiveMinimum", "a number", lambda v: isinstance(v, int | float)),  # draft 4: a boolean
        ("multipleOf", "a number over 0", lambda v: _is_number(v) and v > 0),
        ("uniqueItems", "a boolean", lambda v: isinstance(v, bool)),
        ("required", "an array of strings", are_names),
        ("enum", "an array", lambda v: isinstance(v, list)),
        ("allOf anyOf oneOf prefixItems", "an array that is not empty", lambda v: isinstance(v, list) and v != []),
        (" ".join(NAMED), "an object", lambda v: isinstance(v, dict)),
        (
            "dependentRequired",
            "an object of arrays of strings",
            lambda v: isinstance(v, dict) and all(map(are_names, v.values())),
        ),
        (
            "type",
            "one or several of array, boolean, integer, null, number, object, string",
            lambda v: v in TYPES if isinstance(v, str) else are_names(v) and v != [] and TYPES.keys() >= set(v),
        ),
    )
    for keyword in keywords.split()
}


@dataclass(slots=True, eq=False)
class Node:
    """A schema of one kind: a type, one of COMBINED, true, false, enum, const, not, if, ref, or a meta-schema's URL."""

    kind: str
    says: Mapping[str, Any] = field(default_factory=dict)
    one: Mapping[str, "Node"] = field(default_factory=dict)
    named: Mapping[str, Mapping[str, "Node"]] = field(default_factory=dict)
    parts: list["Node"] = field(default_factory=list)  # of a combination, or the positional items of an array
    values: frozenset[str] = frozenset()  # canonical texts of an enum, or the required names of an object
    integer: bool = False
    target: "Node | None" = None  # the target of a ref; never itself a ref


@dataclass(slots=True)
class Document:
    name: str  # "" for the schema itself
    root: Any
    text: str
    base: str
    modern: bool  # draft 2019-09 or later: keywords beside a $ref count
    ids: dict[str, Any] = field(default_factory=dict)


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def shown(text: str) -> str:
    return repr(text if len(text) <= NAME_SHOWN_MAX else text[:NAME_SHOWN_MAX] + "...")


def pointer_to(name: str) -> str:
    """A name as part of a JSON pointer, on one line."""
    return shown(name.replace("~", "~0").replace("/", "~1"))[1:-1]


def _joined(base: str, address: str) -> str:
    try:
        return urljoin(base, address)
    except ValueError:
        return address  # not a URL: it can only match by its exact name


def _float(digits: str) -> float | int:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"{shown(digits)} is out of range")
    return int(value) if value.is_integer() and abs(value) < 2**53 else value  # 1.0 and 1 are the same number


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is not a number")


def load(name: str, text: str) -> Document:
    whose = f"reference {shown(name)}: " if name else ""
    if len(text) > SIZE_MAX:
        raise InvalidInput(f"{whose}the schema has {len(text):,} characters; at most {SIZE_MAX:,} are allowed")
    try:
        root = json.loads(text, parse_float=_float, parse_constant=_no_number)
        said = canonical(root)
        said.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"{whose}not JSON: unpaired surrogate") from None
    except ValueError as error:
        raise InvalidInput(f"{whose}not JSON: {error}") from None
    except RecursionError:
        raise InvalidInput(f"{whose}the schema is nested deeper than {DEPTH_MAX} levels") from None
    top = root if isinstance(root, dict) else {}
    base = next((top[key] for key in ("$id", "id") if isinstance(top.get(key), str)), name).removesuffix("#")
    modern = any(draft in str(top.get("$schema")) for draft in ("2019-09", "2020-12"))
    document = Document(name, root, said, base, modern)
    level, depth = [root], 0
    while level := [value for value in level if isinstance(value, dict | list)]:
        depth += 1
        if depth > DEPTH_MAX:
            raise InvalidInput(f"{whose}the schema is nested deeper than {DEPTH_MAX} levels")
        for value in level:
            for known in _names_of(value, base):
                document.ids.setdefault(known, value)
        level = [inner for value in level for inner in (value.values() if isinstance(value, dict) else value)]
    return document


def _names_of(value: Any, base: str) -> Iterator[str]:
    for key, before in (("$id", ""), ("id", ""), ("$anchor", "#"), ("$dynamicAnchor", "#")):
        if isinstance(value, dict) and isinstance(name := value.get(key), str):
            yield before + name.removesuffix("#")
            yield _joined(base, before + name).removesuffix("#")


class Reader:
    """Reads a schema and those of its references that it uses."""

    def __init__(self, text: str, references: Mapping[str, str]) -> None:
        self.document = load("", text)
        self.used: dict[str, Document] = {}
        self._references = references
        self._loaded: dict[str, Document] = {}
        self._names = {_joined(self.document.base, name): name for name in references}
        self._names |= {name.removeprefix("./"): name for name in references} | {name: name for name in references}
        self._nodes: dict[int, Node] = {}
        self._refs: list[tuple[Node, str, Document, str]] = []

    def read(self) -> Node:
        root = self._node(self.document.root, self.document, "#")
        for node, ref, document, place in self._refs:  # the list grows during the loop
            node.target = self._target(ref, document, place)
        for node, ref, _, place in self._refs:
            chain: dict[Node, None] = {}
            end = node
            while end.target is not None:
                if end in chain:
                    raise InvalidInput(f"the $ref {shown(ref)} at {place} refers only to itself")
                chain[end] = None
                end = end.target
            for link in chain:
                link.target = end
        return root

    def _node(self, value: Any, document: Document, place: str) -> Node:
        if isinstance(value, bool):
            return Node("true" if value else "false")
        if not isinstance(value, dict):
            raise InvalidInput(f"a schema must be an object or a boolean, at {place}")
        if id(value) not in self._nodes:
            for keyword in value:
                if keyword in SHAPES and not SHAPES[keyword][1](value[keyword]):
                    what = SHAPES[keyword][0]
                    raise InvalidInput(f"{keyword} must be {what}, at {place}")
            parts = self._parts(value, document, place)
            whole = Node("allOf" if parts else "true", value, parts=parts)
            self._nodes[id(value)] = parts[0] if len(parts) == 1 else whole
        return self._nodes[id(value)]

    def _parts(self, value: dict[str, Any], document: Document, place: str) -> list[Node]:
        """The nodes that a value must all match."""
        one, named, listed = self._children(value, document, place)
        refs = [keyword for keyword in REFS[: len(REFS) if document.modern else 1] if keyword in value]
        parts = [Node("ref", value) for _ in refs]
        self._refs += [(part, value[ref], document, place) for part, ref in zip(parts, refs, strict=True)]
        if refs and not document.modern:
            return parts
        if "enum" in value:
            parts.append(Node("enum", value, values=frozenset(map(canonical, value["enum"]))))
        if "const" in value:
            parts.append(Node("const", value, values=frozenset((canonical(value["const"]),))))
        parts += [Node(keyword, value, parts=listed[keyword]) for keyword in COMBINED if keyword in value]
        parts += [Node(keyword, value, one) for keyword in ("not", "if") if keyword in value]

        def typed(name: str) -> Node:
            if name == "object":
                return Node(name, value, one, named, values=frozenset(value.get("required", ())))
            if name == "array":
                return _array(value, one, listed, closed=document.modern and value.get("items") is False)
            return Node(TYPES[name], value, integer=name == "integer")

        types = value.get("type", [])
        if isinstance(types, str):
            types = [types]
            parts.append(typed(types[0]))
        elif types:
            parts.append(Node("anyOf", value, parts=[typed(name) for name in dict.fromkeys(types)]))
        said = {keyword for keyword in value if not (document.modern and value[keyword] == {} and keyword in NAMED)}
        typeless = [kind for kind, keywords in KINDS.items() if keywords & said]
        return parts + [typed(kind) for kind in typeless if kind not in {TYPES[name] for name in types}]

    def _children(
        self, value: dict[str, Any], document: Document, place: str
    ) -> tuple[dict[str, Node], dict[str, dict[str, Node]], dict[str, list[Node]]]:
        def under(keyword: str, schemas: Iterable[Any]) -> list[Node]:
            return [self._node(schema, document, f"{place}/{keyword}/{at}") for at, schema in enumerate(schemas)]

        listed = {  # without duplicates
            keyword: under(keyword, {canonical(schema): schema for schema in value[keyword]}.values())
            for keyword in COMBINED
            if keyword in value
        }
        for keyword in ("items", "prefixItems"):
            if isinstance(value.get(keyword), list):
                listed[keyword] = under(keyword, value[keyword])
        one = {
            keyword: self._node(value[keyword], document, f"{place}/{keyword}")
            for keyword in ONE
            if keyword in value and keyword not in listed
        }
        named = {
            keyword: {
                name: self._node(schema, document, f"{place}/{keyword}/{pointer_to(name)}")
                for name, schema in value[keyword].items()
                if not (keyword == "dependencies" and are_names(schema))
            }
            for keyword in NAMED
            if keyword in value
        }
        return one, named, listed

    def _target(self, ref: str, document: Document, place: str) -> Node:
        address, _, fragment = ref.partition("#")
        home, value = self._addressed(address, document) if address else (document, document.root)
        if home is None and address.startswith(META_SCHEMAS):
            return Node(address)
        if home is None:
            raise InvalidInput(f"the $ref {shown(ref)} at {place} is not among the references")
        if fragment.startswith("/"):
            value = _pointed(value, fragment)
        elif fragment:
            value = home.ids.get("#" + fragment)
        if not isinstance(value, dict | bool):
            raise InvalidInput(f"the $ref {shown(ref)} at {place} does not lead to a schema")
        return self._node(value, home, shown(ref)[1:-1])

    def _addressed(self, address: str, document: Document) -> tuple[Document | None, Any]:
        names = (address, _joined(document.base, address), address.removeprefix("./"))
        for home in (document, self.document):
            for name in names:
                if name in home.ids:
                    return home, home.ids[name]
        if not any(name in self._names for name in names):  # not found by name: try its $id
            self._names = {self._load(name).base: name for name in self._references} | self._names
        for name in names:
            if name in self._names:
                home = self._load(self._names[name])
                self.used.setdefault(home.name, home)
                return home, home.root
        return None, None

    def _load(self, name: str) -> Document:
        if name not in self._loaded:
            self._loaded[name] = load(name, self._references[name])
        return self._loaded[name]


def _array(value: Mapping[str, Any], one: Mapping[str, Node], listed: Mapping[str, list[Node]], closed: bool) -> Node:
    """An array of any draft in the terms of draft 7: `additionalItems` applies to the items after `parts`."""
    if "prefixItems" in listed or closed:
        one = {**one, "items": Node("true"), "additionalItems": one.get("items", Node("true"))}
    if "contains" in value:
        value = {"minContains": 1, **value}
    return Node("array", value, one, parts=listed.get("prefixItems", listed.get("items", [])))


def _pointed(value: Any, pointer: str) -> Any:
    start = value
    for token in unquote(pointer).split("/")[1:]:
        key = token.replace("~1", "/").replace("~0", "~")
        if isinstance(value, list):
            value = value[int(key)] if re.fullmatch("[0-9]{1,7}", key) and int(key) < len(value) else None
        else:
            value = value.get(key) if isinstance(value, dict) else None
    if value is None and pointer.startswith("/$defs/"):  # some tools write $defs and mean definitions
        return _pointed(start, "/definitions/" + pointer.removeprefix("/$defs/"))
    return value
