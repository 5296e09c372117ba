"""The canonical text of an Avro schema: keys in the order of Java's Schema.toString, names as short as possible.

Confluent's registry stores the same text, so a schema that was registered there is found here, however it was typed.
Normalization also sorts what has no order: properties unknown to Avro, aliases, and the keys of defaults. As in
Confluent's registry, it drops empty descriptions and converts numeric defaults to the field's type.
"""

import json
from collections.abc import Iterable
from typing import Any

from headrace.errors import InvalidInput

NAMED = frozenset({"record", "error", "enum", "fixed"})
OF_TYPES = frozenset({"type", "name", "namespace", "doc", "fields", "items", "values", "size", "symbols", "aliases"})
OF_FIELDS = frozenset({"name", "type", "doc", "default", "order", "aliases"})
DECIMAL = ("logicalType", "precision", "scale")  # written first, in this order


def load(text: str) -> Any:
    """Parse JSON. Raises ValueError or RecursionError."""
    return json.loads(text, parse_constant=_no_number)


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is not a number")


def write(value: Any, known: Iterable[str], *, normalized: bool = False) -> str:
    """The text of a valid schema; `known` are the types that references define. Raises InvalidInput."""
    made = _Writer(known, normalized).node(value, "")
    try:
        text = json.dumps(made, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
        text.encode()
    except UnicodeEncodeError:
        raise InvalidInput("the schema contains an unpaired surrogate") from None
    except ValueError:
        raise InvalidInput("the schema contains a number that is too large") from None
    return text


class _Writer:
    def __init__(self, known: Iterable[str], normalized: bool) -> None:
        self._known = set(known)
        self._normalized = normalized

    def node(self, value: Any, space: str) -> Any:
        if isinstance(value, str):
            return self._reference(value, space)
        if isinstance(value, list):
            return [self.node(one, space) for one in value]
        kind = value["type"]
        if not isinstance(kind, str):
            return self._with_properties(self.node(kind, space), value)
        if kind in NAMED:
            return self._named(kind, value, space)
        if kind in ("array", "map"):
            part = "items" if kind == "array" else "values"
            return {"type": kind, part: self.node(value[part], space), **self._properties(value, OF_TYPES)}
        if self._full(kind, space) is not None:
            return self._reference(kind, space)  # other attributes of a reference are dropped
        return self._with_properties(kind, value)

    def _with_properties(self, kind: Any, value: dict[str, Any]) -> Any:
        properties = self._properties(value, OF_TYPES)
        return {"type": kind, **properties} if properties else kind

    def _full(self, name: str, space: str) -> str | None:
        full = name if "." in name or not space else f"{space}.{name}"
        return next((one for one in (full, name) if one in self._known), None)

    def _reference(self, name: str, space: str) -> str:
        full = self._full(name, space)
        return name if full is None else _short(full, space)

    def _named(self, kind: str, value: dict[str, Any], outer: str) -> dict[str, Any]:
        name, space = value["name"], value.get("namespace")
        if "." in name:
            space, _, name = name.rpartition(".")
        elif space is None:
            space = outer
        self._known.add(f"{space}.{name}" if space else name)
        made: dict[str, Any] = {"type": kind, "name": name}
        if space != outer:
            made["namespace"] = space
        doc = value.get("doc")
        if isinstance(doc, str) and (doc or not self._normalized):
            made["doc"] = doc
        if kind == "enum":
            made["symbols"] = value["symbols"]
            if "default" in value:
                made["default"] = value["default"]
        elif kind == "fixed":
            made["size"] = value["size"]
        else:
            made["fields"] = [self._field(one, space) for one in value["fields"]]
        made |= self._properties(value, OF_TYPES | {"default"} if kind == "enum" else OF_TYPES)
        full = [alias if "." in alias or not space else f"{space}.{alias}" for alias in value.get("aliases", ())]
        if full:
            made["aliases"] = [_short(alias, space) for alias in (sorted(set(full)) if self._normalized else full)]
        return made

    def _field(self, value: dict[str, Any], space: str) -> dict[str, Any]:
        made: dict[str, Any] = {"name": value["name"], "type": self.node(value["type"], space)}
        if isinstance(value.get("doc"), str):
            made["doc"] = value["doc"]
        if "default" in value:
            made["default"] = self._default(value["default"], made["type"])
        order = value.get("order")
        if isinstance(order, str) and order.lower() != "ascending":
            made["order"] = order.lower()
        if aliases := value.get("aliases"):
            made["aliases"] = sorted(set(aliases)) if self._normalized else aliases
        return made | self._properties(value, OF_FIELDS)

    def _default(self, value: Any, kind: Any) -> Any:
        if not self._normalized:
            return value
        kind = kind[0] if isinstance(kind, list) and kind else kind
        kind = kind.get("type") if isinstance(kind, dict) else kind
        return float(value) if type(value) is int and kind in ("float", "double") else _sorted(value)

    def _properties(self, value: dict[str, Any], reserved: frozenset[str]) -> dict[str, Any]:
        found = {key: one for key, one in value.items() if key not in reserved}
        if not self._normalized:
            return found
        first = DECIMAL if found.get("logicalType") == "decimal" else DECIMAL[:1]
        keys = [*(key for key in first if key in found), *sorted(found.keys() - set(first))]
        return {key: _sorted(found[key]) for key in keys}


def _short(full: str, space: str) -> str:
    own, _, name = full.rpartition(".")
    return name if own == space else full


def _sorted(value: Any) -> Any:
    return json.loads(json.dumps(value, sort_keys=True)) if isinstance(value, dict | list) else value
