"""JSON Schema for the registry: parsing and compatibility.

The rules and their names are those of Confluent's registry (strict policy), so clients get the same results. As there,
`if`, `format`, `propertyNames`, the schema of `contains`, and `required` names and `patternProperties` without a
matching property schema are not compared.
"""

import json
import re
from collections.abc import Mapping
from fractions import Fraction
from itertools import zip_longest
from typing import Any

from headrace.schemas.json_nodes import COMBINED, Node, Reader, are_names, pointer_to

STEPS_MAX = 600_000  # a second or two
REASONS_MAX = 50
PLACE_MAX = 50

Reasons = list[tuple[str, tuple[str, ...]]]  # (reason, place)
Pair = tuple[Node, Node]

UNKNOWN = Node("unknown")  # compatible with nothing


class _TooManySteps(Exception):
    pass


class JsonSchema:
    def __init__(self, text: str, references: Mapping[str, str]) -> None:
        reader = Reader(text, references)
        self._root = reader.read()
        self._used = {name: document.text for name, document in reader.used.items()}
        self._canonical = reader.document.text
        # Keys keep their order, as in Confluent's registry, because people read the text.
        self.text = _written(reader.document.root)
        self.references = tuple(self._used)

    @classmethod
    def parse(cls, text: str, references: Mapping[str, str]) -> "JsonSchema":
        """Parse a schema; `references` maps names to texts. Raises InvalidInput."""
        return cls(text, references)

    def normalized(self) -> str:
        return _written(json.loads(self.text), sort_keys=True)

    def breaks(self, writer: "JsonSchema") -> list[str]:
        """Why a reader with this schema cannot read all data of the writer's schema; empty if it can."""
        if (self._canonical, self._used) == (writer._canonical, writer._used):
            return []
        try:
            reasons = _Comparison().of(writer._root, self._root)
        except _TooManySteps:
            return ["too many combinations to compare at #/"]
        return [f"{what} at #/{'/'.join(map(pointer_to, place))}" for what, place in reasons]


def _written(root: Any, *, sort_keys: bool = False) -> str:
    return json.dumps(root, separators=(",", ":"), ensure_ascii=False, sort_keys=sort_keys)


class _Comparison:
    """Compares an original schema (the writer's) with its update (the reader's).

    Schemas may be recursive. So a pair of schemas behind a $ref is compared separately and assumed to be compatible
    until it turns out not to be; then the pairs that relied on it are compared again. This terminates because a pair is
    found incompatible at most once.
    """

    def __init__(self) -> None:
        self._dependants: dict[Pair, dict[Pair, None]] = {}
        self._broken: dict[Pair, Reasons] = {}
        self._new: list[Pair] = []
        self._current: Pair
        self._steps = 0

    def of(self, original: Node, update: Node) -> Reasons:
        self._current = root = (original.target or original, update.target or update)
        self._assume(root)
        while self._new:
            self._find_broken()
            for pair in reversed([*self._dependants]):  # all broken pairs are known now: collect the full reasons
                if pair in self._broken:
                    self._current, self._broken[pair] = pair, self._differences(*pair)
        return self._broken.get(root, [])

    def _find_broken(self) -> None:
        recheck: dict[Pair, None] = {}
        while self._new or recheck:
            # New pairs first: then a union is compared once, not once for each of its broken pairs.
            self._current = pair = self._new.pop() if self._new else recheck.popitem()[0]
            if pair not in self._broken and (reasons := self._differences(*pair)):
                self._broken[pair] = reasons
                recheck |= self._dependants[pair]

    def _assume(self, pair: Pair) -> Reasons:
        if pair in self._broken:
            return self._broken[pair]
        if pair not in self._dependants:
            self._dependants[pair] = {}
            self._new.append(pair)
        self._dependants[pair][self._current] = None
        return []

    def _spend(self, steps: int) -> None:
        self._steps += steps
        if self._steps > STEPS_MAX:
            raise _TooManySteps

    def _compare(self, original: Node | None, update: Node | None, *place: str) -> Reasons:
        self._spend(1)
        if update is None:
            return []
        if original is None:
            return [] if update.kind == "true" else [("SCHEMA_ADDED", place)]
        if original.target or update.target:
            reasons = self._assume((original.target or original, update.target or update))
        else:
            reasons = self._differences(original, update)
        return [(what, (*place, *below)[:PLACE_MAX]) for what, below in reasons[:REASONS_MAX]]

    def _differences(self, original: Node, update: Node) -> Reasons:
        before, after = original.kind in COMBINED, update.kind in COMBINED
        if before and after:
            return self._combined(original, update)
        choices = update.parts if after and (update.kind != "allOf" or len(update.parts) == 1) else []
        demands = original.parts if before and (original.kind == "allOf" or len(original.parts) == 1) else []
        if any(not self._compare(original, choice) for choice in choices):
            return []
        if any(not self._compare(demand, update) for demand in demands):
            return []
        if original.kind != update.kind:
            # Kafka Connect writes decimals both as strings and as numbers.
            decimals = original.says.get("connect.type") == update.says.get("connect.type") == "bytes"
            return [] if original.kind == "false" or update.kind == "true" or decimals else [("TYPE_CHANGED", ())]
        match original.kind:
            case "object":
                return self._object(original, update)[:REASONS_MAX]
            case "array":
                return self._array(original, update)[:REASONS_MAX]
            case "number":
                return _number(original, update)
            case "string":
                return _string(original, update)
            case "enum" | "const":
                self._spend((len(original.values) + len(update.values)) // 10)
                fewer = "ENUM_ARRAY_NARROWED" if original.values > update.values else "ENUM_ARRAY_CHANGED"
                return [] if original.values <= update.values else [(fewer, (original.kind,))]
            case "not":  # the reader may forbid less than the writer
                forbidden = self._compare(update.one["not"], original.one["not"])
                return [("NOT_TYPE_EXTENDED", ("not",))] if forbidden else []
        return []

    def _combined(self, original: Node, update: Node) -> Reasons:
        before, after = len(original.parts), len(update.parts)
        if original.kind != update.kind != "anyOf" and not (
            (before == 1 and (after == 1 or update.kind == "oneOf")) or (after == 1 and original.kind == "allOf")
        ):
            return [("COMBINED_TYPE_CHANGED", ())]
        reasons: Reasons = []
        if before < after and update.kind == "allOf":
            reasons.append(("PRODUCT_TYPE_EXTENDED", ()))
        if before > after and original.kind != "allOf":
            reasons.append(("SUM_TYPE_NARROWED", ()))
        fitting = [
            [at for at, part in enumerate(update.parts) if not self._compare(old, part)] for old in original.parts
        ]
        if _matched(fitting) < min(before, after):
            reasons.append(("COMBINED_TYPE_SUBSCHEMAS_CHANGED", ()))
        return reasons

    def _object(self, original: Node, update: Node) -> Reasons:
        before, after = original.named.get("properties", {}), update.named.get("properties", {})
        self._spend(len(before) + len(after) + len(original.values) + len(update.values))
        newly = update.values - original.values
        reasons: Reasons = [
            ("REQUIRED_ATTRIBUTE_ADDED", ("required", name))
            for name in before
            if name in newly and name in after and "default" not in after[name].says
        ]
        for name in {**before, **after}:
            place = ("properties", name)
            if name not in after:
                reasons += self._removed("PROPERTY", before[name], update, place)
            elif name in before:
                reasons += self._compare(before[name], after[name], *place)
            else:
                default = "_WITH_DEFAULT" if "default" in after[name].says else ""
                what = f"REQUIRED_PROPERTY{default}" if name in update.values else "OPTIONAL_PROPERTY"
                reasons += self._added("PROPERTY", what, original, after[name], place)
                if what == "REQUIRED_PROPERTY" and not _is_open(original):
                    reasons.append(("REQUIRED_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL", place))
        return [
            *reasons,
            *self._dependencies(original, update),
            *self._rest(original, update, "additionalProperties"),
            *self._rest(original, update, "unevaluatedProperties"),
            *_bounds(original, update, "maxProperties", "minProperties"),
        ]

    def _dependencies(self, original: Node, update: Node) -> Reasons:
        reasons: Reasons = []
        needed, needs = _needs(original), _needs(update)
        self._spend(sum(map(len, needed.values())) + sum(map(len, needs.values())))
        for name, names in needs.items():
            if name not in needed:
                reasons.append(("DEPENDENCY_ARRAY_ADDED", ("dependencies", name)))
            elif not names <= needed[name]:
                what = "DEPENDENCY_ARRAY_EXTENDED" if names > needed[name] else "DEPENDENCY_ARRAY_CHANGED"
                reasons.append((what, ("dependencies", name)))
        before, after = (
            {**node.named.get("dependencies", {}), **node.named.get("dependentSchemas", {})}
            for node in (original, update)
        )
        for name, schema in after.items():
            if name in before:
                reasons += self._compare(before[name], schema, "dependencies", name)
            else:
                reasons.append(("DEPENDENCY_SCHEMA_ADDED", ("dependencies", name)))
        return reasons

    def _array(self, original: Node, update: Node) -> Reasons:
        reasons = self._compare(original.one.get("items"), update.one.get("items"), "items")
        for at, (before, after) in enumerate(zip_longest(original.parts, update.parts)):
            place = ("items", str(at))
            if after is None:
                reasons += self._removed("ITEM", before, update, place)
            elif before is None:
                reasons += self._added("ITEM", "ITEM", original, after, place)
            else:
                reasons += self._compare(before, after, *place)
        if update.says.get("uniqueItems") and not original.says.get("uniqueItems"):
            reasons.append(("UNIQUE_ITEMS_ADDED", ("uniqueItems",)))
        return [
            *reasons,
            *self._rest(original, update, "additionalItems"),
            *self._rest(original, update, "unevaluatedItems"),
            *_bounds(original, update, "maxItems", "minItems", "maxContains", "minContains"),
        ]

    def _removed(self, what: str, schema: Node, update: Node, place: tuple[str, ...]) -> Reasons:
        """A property or item that only the original has: the update must allow it."""
        if _is_open(update):
            return []
        if (covering := self._covering(update, place[-1])) is None:
            return [] if schema.kind == "false" else [(f"{what}_REMOVED_FROM_CLOSED_CONTENT_MODEL", place)]
        if reasons := self._compare(schema, covering, *place):
            reasons.append((f"{what}_REMOVED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL", place))
        return reasons

    def _added(self, what: str, how: str, original: Node, schema: Node, place: tuple[str, ...]) -> Reasons:
        """A property or item that only the update has: data of the original may contain any value there."""
        if _is_open(original):
            return [] if schema.kind == "true" else [(f"{how}_ADDED_TO_OPEN_CONTENT_MODEL", place)]
        if (covering := self._covering(original, place[-1])) is None:
            return []
        if reasons := self._compare(covering, schema, *place):
            reasons.append((f"{what}_ADDED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL", place))
        return reasons

    def _covering(self, node: Node, name: str) -> Node | None:
        """The schema for a property or item without a schema of its own."""
        for pattern, schema in node.named.get("patternProperties", {}).items():
            self._spend(len(name))
            match _matches(pattern, name):
                case None:
                    return UNKNOWN
                case True:
                    return schema
        rest = _unnamed(node)
        return rest if rest and rest.kind != "false" else None

    def _rest(self, original: Node, update: Node, keyword: str) -> Reasons:
        before, after = _said(original, keyword), _said(update, keyword)
        if after is None:
            return []
        if after.kind == "false" and (before is None or before.kind != "false"):
            return [(_snake(keyword) + "_REMOVED", (keyword,))]
        if before is None:
            return [(_snake(keyword) + "_NARROWED", (keyword,))]
        return self._compare(before, after, keyword)


def _said(node: Node, keyword: str) -> Node | None:
    schema = node.one.get(keyword)
    return None if schema is None or schema.kind == "true" else schema


def _unnamed(node: Node) -> Node | None:
    what = "Properties" if node.kind == "object" else "Items"
    return _said(node, "additional" + what) or _said(node, "unevaluated" + what)


def _is_open(node: Node) -> bool:
    return not node.named.get("patternProperties") and _unnamed(node) is None


def _needs(node: Node) -> dict[str, set[str]]:
    said = {**node.says.get("dependencies", {}), **node.says.get("dependentRequired", {})}
    return {name: set(names) for name, names in said.items() if are_names(names)}


def _matches(pattern: str, name: str) -> bool | None:
    """Whether the pattern matches the name; None if that cannot be decided, or not quickly.

    Python's regular expressions backtrack at every repetition and alternative, so only a few are allowed.
    """
    repetitions = sum(map(pattern.count, "*+?{"))
    if len(pattern) > 1_000 or (len(name) + 1) ** repetitions > 10_000 or pattern.count("(") > 1:
        return None
    if re.search(r"\)[*+?{]|\[\[|--|&&|~~|\|\|", pattern):  # a repeated group, or syntax that Python warns about
        return None
    try:
        return re.search(pattern, name, re.ASCII) is not None
    except (re.error, OverflowError):
        return None


def _snake(keyword: str) -> str:
    return re.sub("[A-Z]", r"_\g<0>", keyword).upper()


def _bounds(original: Node, update: Node, *keywords: str) -> Reasons:
    reasons: Reasons = []
    for keyword in keywords:
        before, after = original.says.get(keyword), update.says.get(keyword)
        if after is None or after is False or (before is True and after is True):
            continue
        if before is None or isinstance(before, bool) or isinstance(after, bool):  # draft 4 uses booleans
            reasons.append((_snake(keyword) + "_ADDED", (keyword,)))
        elif "max" in keyword.lower() and after < before:
            reasons.append((_snake(keyword) + "_DECREASED", (keyword,)))
        elif "min" in keyword.lower() and after > before:
            reasons.append((_snake(keyword) + "_INCREASED", (keyword,)))
    return reasons


def _string(original: Node, update: Node) -> Reasons:
    reasons = _bounds(original, update, "maxLength", "minLength")
    before, after = original.says.get("pattern"), update.says.get("pattern")
    if after not in (None, before):
        reasons.append(("PATTERN_ADDED" if before is None else "PATTERN_CHANGED", ("pattern",)))
    return reasons


def _number(original: Node, update: Node) -> Reasons:
    reasons = _bounds(original, update, "maximum", "minimum", "exclusiveMaximum", "exclusiveMinimum")
    before, after = (Fraction(str(node.says.get("multipleOf", 0))) for node in (original, update))
    if after and not before:
        reasons.append(("MULTIPLE_OF_ADDED", ("multipleOf",)))
    elif after and before % after:
        what = "MULTIPLE_OF_CHANGED" if after % before else "MULTIPLE_OF_EXPANDED"
        reasons.append((what, ("multipleOf",)))
    return reasons + ([("TYPE_NARROWED", ())] if update.integer and not original.integer else [])


def _matched(fitting: list[list[int]]) -> int:
    """The size of a maximum matching, by augmenting paths: `fitting` lists the candidates of each element."""
    serves: dict[int, int] = {}
    served: dict[int, int] = {}
    asked: dict[int, int] = {}
    for first in range(len(fitting)):
        asking = [first]
        while asking:
            one = asking.pop()
            free = next((other for other in fitting[one] if other not in serves), None)
            if free is None:
                new = [other for other in fitting[one] if other not in asked]
                asked |= dict.fromkeys(new, one)
                asking += [serves[other] for other in new]
                continue
            while one != first:  # each element on the path takes the next candidate and frees its own
                serves[free], served[one], free = one, free, served[one]
                one = asked[free]
            serves[free], served[one] = one, free
            asked = {}  # dead ends stay dead only until the matching changes
            break
    return len(served)
