"""What holds for every JSON Schema, drawn by Hypothesis, with a validator as the judge."""

import json
from typing import Any

import jsonschema_rs
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidInput
from headrace.schemas.json_schema import JsonSchema
from tests.schemas.test_json_schema import MODERN, breaks, parsed

KEYS = st.sampled_from(("a", "b", "c/d", "x_1"))
COUNTS = st.integers(0, 3)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.just(0.5) | st.sampled_from(("", "a", "bc")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=5,
)
REFS = st.sampled_from(("#", "#/$defs/a", "#/$defs/b"))


def keywords(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    some, named = st.lists(inner, min_size=1, max_size=3), st.dictionaries(KEYS, inner, max_size=3)
    names = st.lists(KEYS, max_size=2)
    types = st.sampled_from(("array", "boolean", "integer", "null", "number", "object", "string"))
    values = {
        "type": types | st.lists(types, min_size=1, max_size=3, unique=True),
        **dict.fromkeys(("allOf", "anyOf", "oneOf", "prefixItems"), some),
        **dict.fromkeys(("not", "if", "contains", "additionalItems", "additionalProperties"), inner),
        **dict.fromkeys(("unevaluatedItems", "unevaluatedProperties"), inner),
        **dict.fromkeys(("properties", "dependentSchemas"), named),
        "items": inner | some,
        "patternProperties": st.dictionaries(st.sampled_from(("^a", "(a+)+", "[", "_1$")), inner, max_size=2),
        "dependencies": st.dictionaries(KEYS, inner | names, max_size=2),
        "required": names,
        "enum": st.lists(VALUES, max_size=3),
        **dict.fromkeys(("const", "default"), VALUES),
        **dict.fromkeys(("maxLength", "minItems", "maxProperties", "minContains"), COUNTS),
        **dict.fromkeys(("minimum", "exclusiveMaximum"), COUNTS | st.just(0.5)),
        "multipleOf": st.sampled_from((1, 2, 0.5, 0.1)),
        "$ref": REFS,
    }
    pairs = [st.tuples(st.just(keyword), value) for keyword, value in values.items()]
    return st.lists(st.one_of(pairs), max_size=4).map(dict)


BODIES: st.SearchStrategy[Any] = st.recursive(st.booleans() | st.just({}), keywords, max_leaves=6)


@st.composite
def schemas(draw: st.DrawFn) -> Any:
    root = draw(BODIES)
    definitions = {"a": draw(BODIES), "b": draw(BODIES)}
    return root if isinstance(root, bool) else {**root, "$defs": definitions, **draw(st.sampled_from(({}, MODERN)))}


def accepted(schema: Any) -> JsonSchema | None:
    try:
        return parsed(schema)
    except InvalidInput as refused:  # a $ref that cannot be resolved
        assert "refers only to itself" in str(refused) or "does not lead to a schema" in str(refused)
        return None


@given(schemas())
def test_a_schema_never_breaks_itself(schema: Any) -> None:
    if (one := accepted(schema)) is not None:
        assert one.breaks(one) == []
        if isinstance(schema, dict):
            assert parsed({**schema, "title": "so that it is compared"}).breaks(one) == []


@given(schemas(), schemas(), st.booleans())
def test_all_schemas_that_parse_can_be_compared(writer: Any, reader: Any, related: bool) -> None:
    if related and isinstance(writer, dict) and isinstance(reader, dict):
        reader = {**writer, **reader}
    before, after = accepted(writer), accepted(reader)
    if before is not None and after is not None:
        for reason in after.breaks(before):
            assert " at #/" in reason
            assert "\n" not in reason


@given(st.text() | VALUES.map(json.dumps) | st.text('{}[]":,$reftypn ', max_size=30))
def test_any_text_is_a_schema_or_invalid_input(text: str) -> None:
    try:
        again = JsonSchema.parse(JsonSchema.parse(text, {}).text, {})
    except InvalidInput:
        return
    assert again.breaks(JsonSchema.parse(text, {})) == []


def said(**optional: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=optional)


NUMBERS = said(minimum=COUNTS, maximum=COUNTS, exclusiveMinimum=COUNTS, multipleOf=st.sampled_from((1, 2, 0.5)))
STRINGS = said(minLength=COUNTS, maxLength=COUNTS)
ARRAYS = said(maxItems=COUNTS, minItems=COUNTS, uniqueItems=st.booleans())
OBJECTS = said(maxProperties=COUNTS, minProperties=st.integers(0, 1), additionalProperties=st.booleans())


@st.composite
def relatives(draw: st.DrawFn, depth: int = 2) -> tuple[Any, Any]:
    """Two schemas that are often alike. No unions: by the rules, one of several may become one too many."""
    kinds = [("string", STRINGS), ("number", NUMBERS), ("integer", NUMBERS), ("array", ARRAYS), ("object", OBJECTS)]
    name, keywords = draw(st.sampled_from(kinds if depth else kinds[:3]))
    first = {"type": name, **draw(keywords)}
    pair = (first, {**first, **draw(keywords)} if draw(st.booleans()) else {"type": name, **draw(keywords)})
    if name == "integer":
        pair[draw(st.sampled_from((0, 1)))]["type"] = "number"
    for inner, keyword in (("array", "items"), ("object", "additionalProperties")):
        if name == inner and draw(st.booleans()):
            for schema, child in zip(pair, draw(relatives(depth - 1)), strict=True):
                if draw(st.integers(0, 3)):
                    schema[keyword] = child
    if name == "object":
        for key in draw(st.sets(st.sampled_from(("a", "b")), min_size=1)):
            for schema, child in zip(pair, draw(relatives(depth - 1)), strict=True):
                if draw(st.integers(0, 3)):
                    schema.setdefault("properties", {})[key] = child
                    schema.setdefault("required", []).extend([key] * draw(st.integers(0, 1)))
    return pair


RELATED_VALUES = st.recursive(
    st.integers(0, 4) | st.sampled_from((0.5, "", "a", "bcd")),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("a", "b")), inner),
    max_leaves=4,
)


@given(relatives(), st.lists(RELATED_VALUES, max_size=20))
def test_data_of_a_compatible_schema_passes_a_validator(pair: tuple[Any, Any], values: list[Any]) -> None:
    if not breaks(*pair):
        written, read = map(jsonschema_rs.Draft7Validator, pair)
        assert [value for value in values if written.is_valid(value) and not read.is_valid(value)] == []
