"""The one text of a schema, and the one it has when what has no order is put into one."""

import contextlib
import json
from typing import Any

import pytest

from headrace.schemas import kinds
from headrace.schemas.kinds import AVRO, JSON, PROTOBUF
from headrace.schemas.refusals import RegistryError


def text(kind: str, schema: Any, *, normalized: bool = False, **references: str) -> str:
    written = schema if isinstance(schema, str) else json.dumps(schema)
    parsed = kinds.parse(kind, written, references)
    found = parsed.normalized() if normalized else parsed.text
    again = kinds.parse(kind, found, references)
    assert (again.normalized() if normalized else again.text) == found, "its text is the text of its text"
    assert kinds.differences("FULL", parsed, again) == []
    return found


# Avro.


def test_avro_has_its_keys_as_java_writes_them_and_its_names_short() -> None:
    schema = {
        "zeta": {"y": 1, "x": 2},
        "namespace": "shop",
        "aliases": ["shop.Purchase", "old.Purchase"],
        "fields": [
            {"default": None, "name": "who", "type": ["null", {"fields": [], "name": "shop.Who", "type": "record"}]},
            {"type": {"type": "shop.Who"}, "name": "payer", "order": "IGNORE", "aliases": ["p"], "doc": ""},
            {"type": {"logicalType": "date", "type": "int"}, "name": "day", "order": "ascending"},
            {"type": {"items": {"type": "long"}, "type": "array"}, "name": "ids"},
            {"type": {"size": 4, "type": "fixed", "name": "there.Key"}, "name": "key"},
            {"type": {"symbols": ["A"], "default": "A", "type": "enum", "name": "E", "namespace": ""}, "name": "e"},
        ],
        "doc": "é",
        "name": "Order",
        "type": "record",
    }
    assert text(AVRO, schema) == (
        '{"type":"record","name":"Order","namespace":"shop","doc":"é","fields":['
        '{"name":"who","type":["null",{"type":"record","name":"Who","fields":[]}],"default":null},'
        '{"name":"payer","type":"Who","doc":"","order":"ignore","aliases":["p"]},'
        '{"name":"day","type":{"type":"int","logicalType":"date"}},'
        '{"name":"ids","type":{"type":"array","items":"long"}},'
        '{"name":"key","type":{"type":"fixed","name":"Key","namespace":"there","size":4}},'
        '{"name":"e","type":{"type":"enum","name":"E","namespace":"","symbols":["A"],"default":"A"}}],'
        '"zeta":{"y":1,"x":2},"aliases":["Purchase","old.Purchase"]}'
    )


def test_normalizing_avro_removes_insignificant_order() -> None:
    decimal = {"scale": 2, "b": 1, "precision": 4, "a": 0, "type": "bytes", "logicalType": "decimal"}
    fields = [
        {"name": "x", "type": decimal, "zeta": {"y": 1, "x": 2}, "alpha": 1, "aliases": ["q", "p"]},
        {"name": "d", "type": ["double", "null"], "default": 1},
        {"name": "m", "type": {"type": "map", "values": "int"}, "default": {"b": 1, "a": 2}},
    ]
    schema = {"type": "record", "name": "r", "doc": "", "fields": fields, "aliases": ["z", "y"]}
    assert text(AVRO, schema, normalized=True) == (
        '{"type":"record","name":"r","fields":['
        '{"name":"x","type":{"type":"bytes","logicalType":"decimal","precision":4,"scale":2,"a":0,"b":1},'
        '"aliases":["p","q"],"alpha":1,"zeta":{"x":2,"y":1}},'
        '{"name":"d","type":["double","null"],"default":1.0},'
        '{"name":"m","type":{"type":"map","values":"int"},"default":{"a":2,"b":1}}],"aliases":["y","z"]}'
    )


def test_avro_types_of_references_are_written_by_name() -> None:
    who = '{"type":"record","name":"people.Who","fields":[]}'
    schema = {"type": "record", "namespace": "people", "name": "r", "fields": [{"name": "w", "type": "people.Who"}]}
    for normalized in (False, True):
        found = json.loads(text(AVRO, schema, normalized=normalized, who=who))
        assert found["fields"] == [{"name": "w", "type": "Who"}]


@pytest.mark.parametrize("number", ["NaN", "1e999"])
def test_a_number_that_json_has_not_is_refused(number: str) -> None:
    with pytest.raises(RegistryError, match="number"):
        kinds.parse(AVRO, f'{{"type":"string","x":{number}}}', {})


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RegistryError, match="surrogate"):
        kinds.parse(AVRO, r'{"type":"string","x":"\ud800"}', {})


def test_a_schema_nested_too_deep_is_refused_by_parsing_and_normalizing() -> None:
    for depth in range(900, 1_100):
        with contextlib.suppress(RegistryError):
            kinds.normalized(kinds.parse(AVRO, f'{{"type":"string","x":{"[" * depth + "]" * depth}}}', {}))


# JSON Schema.


def test_json_normalized_has_its_keys_sorted_and_its_lists_as_they_were() -> None:
    schema = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": ["z", {"y": 1, "x": 2}]}}}
    assert text(JSON, schema) == json.dumps(schema, separators=(",", ":"))
    assert text(JSON, schema, normalized=True) == (
        '{"properties":{"a":{"enum":["z",{"x":2,"y":1}]},"b":{"type":"string"}},"type":"object"}'
    )


# Protobuf.

ORDERED = """
syntax = "proto3";
import "a.proto";
import public "b.proto";
message M {
  reserved 10, 20 to 30;
  reserved "p", "q";
  map<string, A> m = 1;
  oneof o { int32 x = 2; int32 z = 4; }
  optional B y = 3;
  enum E { ZERO = 0; ONE = 1; TWO = 2; }
  message Inner {}
  message Also {}
}
"""
TURNED = """
syntax = "proto3";
import public "b.proto";
import "a.proto";
message M {
  enum E { ZERO = 0; TWO = 2; ONE = 1; }
  optional B y = 3;
  oneof o { int32 z = 4; int32 x = 2; }
  map<string, A> m = 1;
  message Inner {}
  message Also {}
  reserved "q", "p";
  reserved 20 to 30, 10;
}
"""
IMPORTS: dict[str, Any] = {"a.proto": 'syntax = "proto3"; message A {}', "b.proto": 'syntax = "proto3"; message B {}'}


def test_protobuf_normalized_has_fields_values_and_imports_in_order() -> None:
    assert text(PROTOBUF, TURNED, **IMPORTS) != text(PROTOBUF, ORDERED, **IMPORTS)
    found = text(PROTOBUF, TURNED, normalized=True, **IMPORTS)
    assert found == text(PROTOBUF, ORDERED, normalized=True, **IMPORTS) == text(PROTOBUF, ORDERED, **IMPORTS)


def test_messages_keep_their_places_and_so_do_the_entries_of_maps() -> None:
    schema = 'syntax = "proto3"; message M { map<int32, int32> b = 2; message N {} map<int32, int32> a = 1; }'
    found = text(PROTOBUF, schema, normalized=True)
    assert found == text(PROTOBUF, schema), "clients name N by its index, which is 1"
    schema = 'syntax = "proto3"; message B { int32 y = 2; int32 x = 1; } message A {}'
    assert text(PROTOBUF, schema, normalized=True).splitlines()[1:] == [
        *("message B {", "  int32 x = 1;", "  int32 y = 2;", "}", "message A {", "}")
    ]


def test_the_first_value_of_an_enum_stays_its_default() -> None:
    found = text(PROTOBUF, "enum E { FIVE = 5; TWO = 2; ONE = 1; }", normalized=True)
    assert [line.split()[0] for line in found.splitlines()[2:-1]] == ["FIVE", "ONE", "TWO"]
