"""JSON Schema in the registry: parsing, references and compatibility.

The expected answers are those of Confluent's registry, which has the same kinds of cases for its own rules.
"""

import json
from typing import Any

import pytest

from headrace.errors import InvalidInput
from headrace.schemas.json_nodes import DEPTH_MAX, SIZE_MAX
from headrace.schemas.json_schema import JsonSchema

MODERN = {"$schema": "https://json-schema.org/draft/2020-12/schema"}
STRING, NUMBER, INTEGER, BOOLEAN = ({"type": name} for name in ("string", "number", "integer", "boolean"))


def parsed(schema: Any, **references: Any) -> JsonSchema:
    return JsonSchema.parse(json.dumps(schema), {name: json.dumps(text) for name, text in references.items()})


def breaks(writer: Any, reader: Any) -> list[str]:
    return parsed(reader).breaks(parsed(writer))


def closed(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "additionalProperties": False}


def opened(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


COMPATIBLE = {
    "anything may become anything goes": (opened(a=STRING), {}),
    "nothing may become anything": (False, STRING),
    "a title is only a title": ({"title": "a", **STRING}, {"title": "b", **STRING}),
    "an integer is a number": (INTEGER, NUMBER),
    "a longer string": ({**STRING, "maxLength": 3, "minLength": 2}, {**STRING, "maxLength": 4, "minLength": 1}),
    "a pattern less": ({**STRING, "pattern": "^a"}, STRING),
    "wider bounds": ({**NUMBER, "minimum": 2, "maximum": 3}, {**NUMBER, "minimum": 1.5, "maximum": 9}),
    "a divisor": ({**NUMBER, "multipleOf": 0.3}, {**NUMBER, "multipleOf": 0.1}),
    "the same divisor": ({**NUMBER, "multipleOf": 5.0, "title": ""}, {**NUMBER, "multipleOf": 5}),
    "exclusive of draft 4 no more": (
        {**NUMBER, "minimum": 1, "exclusiveMinimum": True},
        {**NUMBER, "minimum": 1, "exclusiveMinimum": False},
    ),
    "one more value of an enum": ({"enum": ["a", 1]}, {"enum": [1.0, "b", "a"]}),
    "an enum no more": ({**STRING, "enum": ["a"]}, STRING),
    "one more type": ({"type": ["string"]}, {"type": ["null", "string"]}),
    "one more type, the others with their bounds": (
        {"type": ["string"], "maxLength": 2},
        {"type": ["null", "string"], "maxLength": 3},
    ),
    "not so much": ({"not": NUMBER}, {"not": INTEGER}),
    "an optional property in a closed model": (closed(), closed(a=STRING)),
    "a required property with a default in a closed model": (
        closed(),
        {**closed(a={**STRING, "default": ""}), "required": ["a"]},
    ),
    "a property less in an open model": (opened(a=STRING), opened()),
    "a property of anything in an open model": (opened(), opened(a=True)),
    "an impossible property": (closed(a=False), closed()),
    "a property that additional ones cover": (closed(a=INTEGER), {**closed(), "additionalProperties": NUMBER}),
    "a property that a pattern covers": (
        {**closed(), "patternProperties": {"^x_": STRING, "^i_": INTEGER}},
        {**closed(i_a=NUMBER), "patternProperties": {"^x_": STRING, "^i_": INTEGER}},
    ),
    "a property that unevaluated ones cover": (
        {**MODERN, **opened(), "unevaluatedProperties": STRING},
        {**MODERN, **opened(a=STRING), "unevaluatedProperties": STRING},
    ),
    "additional properties of anything": (closed(), opened()),
    "an empty schema for the rest": (opened(), {**opened(), "additionalProperties": {}}),
    "required no more": ({**opened(a=STRING), "required": ["a"]}, opened(a=STRING)),
    "required with a default": (opened(a=STRING), {**opened(a={**STRING, "default": "x"}), "required": ["a"]}),
    "fewer dependencies": ({"dependencies": {"a": ["b", "c"]}}, {"dependencies": {"a": ["b"]}}),
    "a dependency in newer words": ({"dependencies": {"a": ["b"]}}, {"dependentRequired": {"a": ["b"]}}),
    "a dependent schema in newer words": ({"dependencies": {"a": STRING}}, {"dependentSchemas": {"a": STRING}}),
    "items of any kind": ({"type": "array", "items": STRING}, {"type": "array"}),
    "items of an empty schema": ({"type": "array"}, {"type": "array", "items": {}}),
    "an item more in a closed tuple": (
        {"items": [STRING], "additionalItems": False},
        {"items": [STRING, NUMBER], "additionalItems": False},
    ),
    "a tuple in newer words": (
        {"items": [STRING], "additionalItems": INTEGER},
        {**MODERN, "prefixItems": [STRING], "items": NUMBER},
    ),
    "an item that the rest covers": (
        {**MODERN, "prefixItems": [STRING, INTEGER], "items": False},
        {**MODERN, "prefixItems": [STRING], "items": NUMBER},
    ),
    "an item less in an open tuple": ({"items": [STRING, NUMBER]}, {"items": [STRING]}),
    "unique no more": ({"type": "array", "uniqueItems": True}, {"type": "array"}),
    "one of more": ({"oneOf": [STRING]}, {"oneOf": [NUMBER, STRING]}),
    "one becomes one of several": ({**STRING, "maxLength": 3}, {"oneOf": [NUMBER, STRING]}),
    "one becomes all of one": (STRING, {"allOf": [STRING]}),
    "all of fewer": ({"allOf": [{"enum": ["a"]}, STRING]}, {"allOf": [STRING]}),
    "the same twice": ({"allOf": [STRING, STRING]}, {"allOf": [STRING]}),
    "any of instead of one of": ({"oneOf": [STRING, NUMBER]}, {"anyOf": [NUMBER, STRING]}),
    "each has a place though the first choice is taken": (
        {"anyOf": [INTEGER, {**INTEGER, "minimum": 1}]},
        {"anyOf": [{**INTEGER, "minimum": 0}, NUMBER]},
    ),
    "a definition moved": (STRING, {"$ref": "#/definitions/a", "definitions": {"a": STRING}}),
    "a definition in the other drawer": (STRING, {"$ref": "#/$defs/a", "definitions": {"a": STRING}}),
    "old drafts ignore what is beside a ref": (
        STRING,
        {"$ref": "#/definitions/a", "maxLength": 3, "definitions": {"a": STRING}},
    ),
    "decimals of Kafka Connect": (STRING | {"connect.type": "bytes"}, NUMBER | {"connect.type": "bytes"}),
    "no properties is no type, since 2019": (MODERN, {**MODERN, "properties": {}}),
}

BROKEN = {
    "another type": (opened(a=STRING), opened(a=NUMBER), ["TYPE_CHANGED at #/properties/a"]),
    "a number is no integer": (NUMBER, INTEGER, ["TYPE_NARROWED at #/"]),
    "anything is no object": ({}, {"properties": {}}, ["TYPE_CHANGED at #/"]),
    "a shorter string": (
        {**STRING, "maxLength": 4, "minLength": 1},
        {**STRING, "maxLength": 3, "minLength": 2},
        ["MAX_LENGTH_DECREASED at #/maxLength", "MIN_LENGTH_INCREASED at #/minLength"],
    ),
    "a pattern": (STRING, {**STRING, "pattern": "a"}, ["PATTERN_ADDED at #/pattern"]),
    "another pattern": ({"pattern": "a"}, {"pattern": "b"}, ["PATTERN_CHANGED at #/pattern"]),
    "narrower bounds": (
        {**NUMBER, "minimum": 1, "exclusiveMaximum": 9},
        {**NUMBER, "minimum": 1.5, "exclusiveMaximum": 8, "maximum": 7},
        [
            "MAXIMUM_ADDED at #/maximum",
            "MINIMUM_INCREASED at #/minimum",
            "EXCLUSIVE_MAXIMUM_DECREASED at #/exclusiveMaximum",
        ],
    ),
    "exclusive in draft 4": (
        {**NUMBER, "minimum": 1},
        {**NUMBER, "minimum": 1, "exclusiveMinimum": True},
        ["EXCLUSIVE_MINIMUM_ADDED at #/exclusiveMinimum"],
    ),
    "a divisor": (NUMBER, {**NUMBER, "multipleOf": 2}, ["MULTIPLE_OF_ADDED at #/multipleOf"]),
    "a multiple of the divisor": (
        {"multipleOf": 0.1},
        {"multipleOf": 0.3},
        ["MULTIPLE_OF_EXPANDED at #/multipleOf"],
    ),
    "another divisor": ({"multipleOf": 4}, {"multipleOf": 6}, ["MULTIPLE_OF_CHANGED at #/multipleOf"]),
    "fewer values": ({"enum": ["a", True]}, {"enum": ["a"]}, ["ENUM_ARRAY_NARROWED at #/enum"]),
    "true is not one": ({"enum": [True]}, {"enum": [1]}, ["ENUM_ARRAY_CHANGED at #/enum"]),
    "another constant": ({"const": 1}, {"const": 2}, ["ENUM_ARRAY_CHANGED at #/const"]),
    "more is forbidden": ({"not": INTEGER}, {"not": NUMBER}, ["NOT_TYPE_EXTENDED at #/not"]),
    "an optional property in an open model": (
        opened(),
        opened(a=STRING),
        ["OPTIONAL_PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL at #/properties/a"],
    ),
    "required properties in an open model": (
        opened(),
        {**opened(a=STRING, b={**STRING, "default": ""}), "required": ["a", "b"]},
        [
            "REQUIRED_PROPERTY_ADDED_TO_OPEN_CONTENT_MODEL at #/properties/a",
            "REQUIRED_PROPERTY_WITH_DEFAULT_ADDED_TO_OPEN_CONTENT_MODEL at #/properties/b",
        ],
    ),
    "a required property in a closed model": (
        closed(),
        {**closed(a=STRING), "required": ["a"]},
        ["REQUIRED_PROPERTY_ADDED_TO_UNOPEN_CONTENT_MODEL at #/properties/a"],
    ),
    "a property less in a closed model": (
        closed(a=STRING),
        closed(),
        ["PROPERTY_REMOVED_FROM_CLOSED_CONTENT_MODEL at #/properties/a"],
    ),
    "a property that additional ones do not cover": (
        closed(a=NUMBER),
        {**closed(), "additionalProperties": STRING},
        [
            "TYPE_CHANGED at #/properties/a",
            "PROPERTY_REMOVED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL at #/properties/a",
        ],
    ),
    "a property that a pattern does not cover": (
        {**closed(), "patternProperties": {"^a": STRING}},
        {**closed(ab=NUMBER), "patternProperties": {"^a": STRING}},
        [
            "TYPE_CHANGED at #/properties/ab",
            "PROPERTY_ADDED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL at #/properties/ab",
        ],
    ),
    "no more additional properties": (
        opened(),
        closed(),
        ["ADDITIONAL_PROPERTIES_REMOVED at #/additionalProperties"],
    ),
    "fewer additional properties": (
        opened(),
        {**opened(), "additionalProperties": STRING},
        ["ADDITIONAL_PROPERTIES_NARROWED at #/additionalProperties"],
    ),
    "other additional properties": (
        {"additionalProperties": STRING},
        {"additionalProperties": NUMBER},
        ["TYPE_CHANGED at #/additionalProperties"],
    ),
    "no more unevaluated properties": (
        {**MODERN, **opened()},
        {**MODERN, **opened(), "unevaluatedProperties": False},
        ["UNEVALUATED_PROPERTIES_REMOVED at #/unevaluatedProperties"],
    ),
    "a property becomes required": (
        opened(a=STRING),
        {**opened(a=STRING), "required": ["a"]},
        ["REQUIRED_ATTRIBUTE_ADDED at #/required/a"],
    ),
    "fewer properties may be there": (
        {"maxProperties": 2},
        {"maxProperties": 1, "minProperties": 1},
        ["MAX_PROPERTIES_DECREASED at #/maxProperties", "MIN_PROPERTIES_ADDED at #/minProperties"],
    ),
    "dependencies": (
        {"dependencies": {"a": ["b"], "c": ["d"]}},
        {"dependencies": {"a": ["b", "c"], "c": ["e"], "f": ["g"], "h": STRING}},
        [
            "DEPENDENCY_ARRAY_EXTENDED at #/dependencies/a",
            "DEPENDENCY_ARRAY_CHANGED at #/dependencies/c",
            "DEPENDENCY_ARRAY_ADDED at #/dependencies/f",
            "DEPENDENCY_SCHEMA_ADDED at #/dependencies/h",
        ],
    ),
    "a dependent schema": (
        {"dependentSchemas": {"a": STRING}},
        {"dependencies": {"a": NUMBER}},
        ["TYPE_CHANGED at #/dependencies/a"],
    ),
    "a schema for items": ({"type": "array"}, {"type": "array", "items": STRING}, ["SCHEMA_ADDED at #/items"]),
    "a changed item": ({"items": [STRING]}, {"items": [NUMBER]}, ["TYPE_CHANGED at #/items/0"]),
    "an item more in an open tuple": (
        {"items": [STRING]},
        {"items": [STRING, NUMBER]},
        ["ITEM_ADDED_TO_OPEN_CONTENT_MODEL at #/items/1"],
    ),
    "an item less in a closed tuple": (
        {**MODERN, "prefixItems": [STRING, NUMBER], "items": False},
        {**MODERN, "prefixItems": [STRING], "items": False},
        ["ITEM_REMOVED_FROM_CLOSED_CONTENT_MODEL at #/items/1"],
    ),
    "an item that the rest does not cover": (
        {"items": [STRING], "additionalItems": STRING},
        {"items": [STRING, NUMBER], "additionalItems": STRING},
        ["TYPE_CHANGED at #/items/1", "ITEM_ADDED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL at #/items/1"],
    ),
    "no items at all": (
        {**MODERN, "items": True},
        {**MODERN, "items": False},
        ["ADDITIONAL_ITEMS_REMOVED at #/additionalItems"],
    ),
    "bounds of an array": (
        {"type": "array", "maxItems": 3},
        {"type": "array", "maxItems": 2, "minItems": 1, "uniqueItems": True, "contains": STRING},
        [
            "UNIQUE_ITEMS_ADDED at #/uniqueItems",
            "MAX_ITEMS_DECREASED at #/maxItems",
            "MIN_ITEMS_ADDED at #/minItems",
            "MIN_CONTAINS_ADDED at #/minContains",
        ],
    ),
    "one of others": ({"oneOf": [STRING]}, {"oneOf": [NUMBER]}, ["COMBINED_TYPE_SUBSCHEMAS_CHANGED at #/"]),
    "one of fewer": ({"oneOf": [NUMBER, STRING]}, {"oneOf": [STRING]}, ["SUM_TYPE_NARROWED at #/"]),
    "all of more": ({"allOf": [STRING]}, {"allOf": [STRING, {"enum": ["a"]}]}, ["PRODUCT_TYPE_EXTENDED at #/"]),
    "all of instead of one of": ({"oneOf": [STRING, NUMBER]}, {"allOf": [STRING]}, ["COMBINED_TYPE_CHANGED at #/"]),
    "two that need the same place": (
        {"anyOf": [INTEGER, {**INTEGER, "minimum": 1}]},
        {"anyOf": [NUMBER, STRING]},
        ["COMBINED_TYPE_SUBSCHEMAS_CHANGED at #/"],
    ),
    "an enum where there was none": (STRING, {**STRING, "enum": ["a"]}, ["TYPE_CHANGED at #/"]),
    "a definition changed": (
        {"items": {"$ref": "#/definitions/a"}, "definitions": {"a": STRING}},
        {"items": {"$ref": "#/definitions/a"}, "definitions": {"a": NUMBER}},
        ["TYPE_CHANGED at #/items"],
    ),
    "since 2019 what is beside a ref counts": (
        {**MODERN, **STRING},
        {**MODERN, "$ref": "#/$defs/a", "enum": ["b"], "$defs": {"a": STRING}},
        ["TYPE_CHANGED at #/"],
    ),
    "a name that needs escaping": (
        opened(**{"a/b~\n": STRING}),
        opened(**{"a/b~\n": NUMBER}),
        [r"TYPE_CHANGED at #/properties/a~1b~0\n"],
    ),
}


@pytest.mark.parametrize(("writer", "reader"), COMPATIBLE.values(), ids=COMPATIBLE)
def test_a_reader_that_accepts_more_breaks_nothing(writer: Any, reader: Any) -> None:
    assert breaks(writer, reader) == []


@pytest.mark.parametrize(("writer", "reader", "reasons"), BROKEN.values(), ids=BROKEN)
def test_a_stricter_reader_is_reported_with_kind_and_path(writer: Any, reader: Any, reasons: list[str]) -> None:
    assert breaks(writer, reader) == reasons


def test_equal_schemas_have_equal_text_and_keys_stay_in_order() -> None:
    texts = ('{"b": [1.0, 0.50], "a": "é"}', ' {"b":[1,5e-1],\n"a":"\\u00e9"}')
    assert [JsonSchema.parse(text, {}).text for text in texts] == ['{"b":[1,0.5],"a":"é"}'] * 2
    other = JsonSchema.parse('{"a": "é", "b": [1, 0.5]}', {})
    assert other.breaks(JsonSchema.parse(texts[0], {})) == []


@pytest.mark.parametrize("text", ["true", "false", "{}", '{"x-unknown": [1]}'])
def test_the_smallest_schemas_are_schemas(text: str) -> None:
    assert JsonSchema.parse(text, {}).references == ()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "not JSON: Expecting value: line 1 column 1 (char 0)"),
        ('{"minimum": NaN}', "not JSON: NaN is not a number"),
        ('{"minimum": 1e999}', "not JSON: '1e999' is out of range"),
        ('{"title": "\\ud800"}', "not JSON: unpaired surrogate"),
        ("[]", "a schema must be an object or a boolean, at #"),
        ('{"properties": {"a": {"items": 1}}}', "a schema must be an object or a boolean, at #/properties/a/items"),
        ('{"type": "text"}', "type must be one or several of array, boolean, integer, "),
        ('{"type": []}', "type must be one or several of "),
        ('{"allOf": []}', "allOf must be an array that is not empty, at #"),
        ('{"not": {"required": ["a", 1]}}', "required must be an array of strings, at #/not"),
        ('{"maxLength": true}', "maxLength must be a whole number of at least 0, "),
        ('{"minItems": -1}', "minItems must be a whole number of at least 0, "),
        ('{"multipleOf": 0}', "multipleOf must be a number over 0, "),
        ('{"minimum": "1"}', "minimum must be a number, "),
        ('{"dependentRequired": {"a": "b"}}', "dependentRequired must be an object of arrays of strings, "),
        ('{"$ref": 1}', "$ref must be a string, "),
        ('{"items": {"$ref": "#/definitions/a"}}', "the $ref '#/definitions/a' at #/items does not lead to a schema"),
        ('{"$ref": "#/a", "a": []}', "the $ref '#/a' at # does not lead to a schema"),
        ('{"$ref": "#/a", "a": {"type": 1}}', "type must be one or several of "),
        ('{"$ref": "#nowhere"}', "the $ref '#nowhere' at # does not lead to a schema"),
        ('{"$ref": "other.json"}', "the $ref 'other.json' at # is not among the references"),
        ('{"$ref": "http://[/"}', "the $ref 'http://[/' at # is not among the references"),
        ('{"$ref": "#"}', "the $ref '#' at # refers only to itself"),
        ('{"$ref": "#/a", "a": {"$ref": "#/b"}, "b": {"$ref": "#/a"}}', "the $ref '#/a' at # refers only to itself"),
    ],
)
def test_an_invalid_json_schema_is_refused_with_a_reason(text: str, reason: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        JsonSchema.parse(text, {})
    assert str(refused.value).startswith(reason)
    assert "\n" not in str(refused.value)


def test_a_schema_too_deep_or_too_long_is_refused() -> None:
    JsonSchema.parse('{"not":' * (DEPTH_MAX - 1) + "{}" + "}" * (DEPTH_MAX - 1), {})
    for text in ('{"not":' * DEPTH_MAX + "{}" + "}" * DEPTH_MAX, "[" * 500_000):
        with pytest.raises(InvalidInput, match="nested deeper than 100 levels"):
            JsonSchema.parse(text, {})
    with pytest.raises(InvalidInput, match="at most 1,000,000 are allowed"):
        JsonSchema.parse('"' + " " * SIZE_MAX + '"', {})


def test_references_are_found_by_name_and_by_id_and_through_each_other() -> None:
    references = {
        "money.json": {"$ref": "http://example.com/amount.json"},
        "by-id": {"$id": "http://example.com/amount.json#", "properties": {"a": {"$ref": "#/definitions/n"}}}
        | {"definitions": {"n": NUMBER}},
        "unused": STRING,
    }
    schema = parsed({"$id": "http://example.com/root.json", "items": {"$ref": "./money.json"}}, **references)
    assert schema.references == ("money.json", "by-id")
    other = parsed({"items": {"properties": {"a": STRING}}})
    assert other.breaks(schema) == ["TYPE_CHANGED at #/items/properties/a"]


def test_a_ref_finds_a_part_of_a_reference_an_anchor_and_an_embedded_id() -> None:
    document = {
        "properties": {
            "a": {"$ref": "other#/definitions/a~1b"},
            "b": {"$ref": "#there"},
            "c": {"$ref": "part.json"},
            "d": {"$ref": "#/anywhere/0"},
        },
        "definitions": {"x": {"$anchor": "there", **STRING}, "y": {"$id": "part.json", **STRING}},
        "anywhere": [STRING],
    }
    schema = parsed(document, other={"definitions": {"a/b": STRING}})
    assert schema.references == ("other",)
    assert schema.breaks(parsed(opened(a=NUMBER, b=NUMBER, c=NUMBER, d=NUMBER))) == [
        f"TYPE_CHANGED at #/properties/{name}" for name in "abcd"
    ]


def test_the_same_text_with_another_reference_is_another_schema() -> None:
    before, after = (parsed({"$ref": "a"}, a=schema) for schema in (STRING, NUMBER))
    assert after.breaks(before) == ["TYPE_CHANGED at #/"]


def test_a_broken_reference_is_named() -> None:
    with pytest.raises(InvalidInput, match="reference 'a': not JSON"):
        JsonSchema.parse('{"$ref": "a"}', {"a": "{"})


def test_a_meta_schema_needs_no_reference() -> None:
    meta = {"$ref": "http://json-schema.org/draft-07/schema#"}
    assert breaks(opened(a=meta), opened(a={**meta, "title": "t"})) == []
    assert breaks(opened(a=meta), opened(a=STRING)) == ["TYPE_CHANGED at #/properties/a"]


def test_a_recursive_schema_is_compared_to_its_end() -> None:
    def tree(value: Any) -> dict[str, Any]:
        return opened(value=value, children={"type": "array", "items": {"$ref": "#"}})

    assert breaks(tree(INTEGER), tree(NUMBER)) == []
    assert "TYPE_NARROWED at #/properties/value" in breaks(tree(NUMBER), tree(INTEGER))


def test_an_incompatibility_after_a_cycle_is_reported() -> None:
    """The pair of A looks fine while it is compared, for it leads back to itself; it must not be believed later."""

    def schema(a: Any, b: Any) -> dict[str, Any]:
        def to(value: Any, name: str) -> dict[str, Any]:
            return opened(id=value, next={"oneOf": [{"$ref": f"#/definitions/{name}"}]})

        definitions = {"A": to(a, "C"), "B": to(b, "C"), "C": to(INTEGER, "A")}
        return {"oneOf": [{"$ref": "#/definitions/A"}, {"$ref": "#/definitions/B"}], "definitions": definitions}

    assert breaks(schema(INTEGER, BOOLEAN), schema(INTEGER, BOOLEAN) | {"title": "t"}) == []
    assert breaks(schema(INTEGER, BOOLEAN), schema(BOOLEAN, NUMBER)) == ["COMBINED_TYPE_SUBSCHEMAS_CHANGED at #/"]


def test_all_choices_are_compared_after_a_first_incompatibility() -> None:
    choices = {"anyOf": [{"$ref": "#/definitions/s"}, {"$ref": "#/definitions/n"}]}
    reader = {**opened(x=NUMBER, y=choices), "definitions": {"s": STRING, "n": NUMBER}}
    assert breaks(opened(x=STRING, y=NUMBER), reader) == ["TYPE_CHANGED at #/properties/x"]


def test_many_types_that_refer_to_each_other_are_compared_once_each() -> None:
    def schema(title: str) -> dict[str, Any]:
        union = {"oneOf": [{"$ref": f"#/$defs/{i}"} for i in range(12)]}
        return {**MODERN, "title": title, "$ref": "#/$defs/0"} | {
            "$defs": {str(i): opened(**dict.fromkeys("abcde", union), tag={"const": i}) for i in range(12)}
        }

    assert breaks(schema("a"), schema("b")) == []


def test_a_long_chain_of_references_does_not_recurse() -> None:
    def chain(last: Any) -> dict[str, Any]:
        links = {str(i): opened(a={"$ref": f"#/definitions/{i + 1}"}) for i in range(2000)}
        return {"$ref": "#/definitions/0", "definitions": {**links, "2000": last}}

    assert breaks(chain(INTEGER), chain(NUMBER)) == []
    (reason,) = breaks(chain(NUMBER), chain(INTEGER))
    assert reason.startswith("TYPE_NARROWED at #/properties/a/properties/a")


def test_too_many_combinations_are_a_break_and_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    many = {"oneOf": [{"const": i} for i in range(50)]}
    assert breaks(many, {**many, "title": "t"}) == []
    monkeypatch.setattr("headrace.schemas.json_schema.STEPS_MAX", 2_000)
    assert breaks(many, {**many, "title": "t"}) == ["too many combinations to compare at #/"]


@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)" * 30, "a?" * 30 + "b", r"\p{L}", "[", "a" * 2000, "[[a]"])
def test_a_pattern_that_cannot_be_tried_covers_nothing(pattern: str) -> None:
    before = {**closed(), "patternProperties": {pattern: STRING}}
    name = "a" * 30 + "!"
    assert breaks(before, {**before, "properties": {name: STRING}}) == [
        f"TYPE_CHANGED at #/properties/{name}",
        f"PROPERTY_ADDED_NOT_COVERED_BY_PARTIALLY_OPEN_CONTENT_MODEL at #/properties/{name}",
    ]
