"""Which Protobuf schemas can read what was written with which, in the words of Confluent's registry."""

import pytest

from tests.schemas.test_protobuf import proto, proto3

BREAKS = {
    "package": ("package a;", "package b;", ["PACKAGE_CHANGED at #/"]),
    "message removed": ("message A {} message B {}", "message A {}", ["MESSAGE_REMOVED at #/B"]),
    "nested message removed": ("message A { message B {} }", "message A {}", ["MESSAGE_REMOVED at #/A/B"]),
    "messages added and moved": ("message A {} message B {}", "message B {} message C {} message A {}", []),
    "enum changed": ("enum E { A = 0; B = 1; }", "enum E { A = 0; C = 1; D = 2; }", []),
    "enum removed": ("enum E { A = 0; }", "", []),
    "field added, removed and renamed": (
        "message M { int32 a = 1; int32 b = 2; }",
        "message M { int32 c = 1; int32 d = 3; }",
        [],
    ),
    "integers": (
        "message M { int32 a = 1; uint32 b = 2; bool c = 3; sint32 d = 4; fixed32 e = 5; sfixed64 f = 6; }",
        "message M { int64 a = 1; bool b = 2; uint64 c = 3; sint64 d = 4; sfixed32 e = 5; fixed64 f = 6; }",
        [],
    ),
    "string and bytes": ("message M { string a = 1; }", "message M { bytes a = 1; }", []),
    "enum and integer": ("enum E { A = 0; } message M { E a = 1; }", "message M { int32 a = 1; }", []),
    "zigzag": (
        "message M { int32 a = 1; }",
        "message M { sint32 a = 1; }",
        ["FIELD_SCALAR_KIND_CHANGED at #/M/1"],
    ),
    "float to double": (
        "message A { message M { float a = 7; } }",
        "message A { message M { double a = 7; } }",
        ["FIELD_SCALAR_KIND_CHANGED at #/A/M/7"],
    ),
    "scalar to message": (
        "message M { string a = 1; }",
        "message M { M a = 1; }",
        ["FIELD_KIND_CHANGED at #/M/1"],
    ),
    "enum to message": (
        "message M { E a = 1; enum E { A = 0; } }",
        "message M { E a = 1; message E {} }",
        ["FIELD_KIND_CHANGED at #/M/1"],
    ),
    "another message": (
        "message A {} message B {} message M { A a = 1; }",
        "message A {} message B {} message M { B a = 1; }",
        ["FIELD_NAMED_TYPE_CHANGED at #/M/1"],
    ),
    "a message that differs": (
        "message M { N n = 1; } message N { int32 a = 1; }",
        "message M { N n = 1; } message N { float a = 1; }",
        ["FIELD_SCALAR_KIND_CHANGED at #/N/1", "FIELD_NAMED_TYPE_CHANGED at #/M/1"],
    ),
    "messages that refer to each other": (
        "message A { B b = 1; } message B { A a = 1; int32 x = 2; }",
        "message A { B b = 1; } message B { A a = 1; string x = 2; }",
        [
            "FIELD_SCALAR_KIND_CHANGED at #/B/2",
            "FIELD_NAMED_TYPE_CHANGED at #/A/1",
            "FIELD_NAMED_TYPE_CHANGED at #/B/1",
        ],
    ),
    "label of a number": (
        "message M { optional int32 a = 1; optional E e = 2; } enum E { A = 0; }",
        "message M { repeated int32 a = 1; repeated E e = 2; } enum E { A = 0; }",
        ["FIELD_NUMERIC_LABEL_CHANGED at #/M/1", "FIELD_NUMERIC_LABEL_CHANGED at #/M/2"],
    ),
    "label of a string": ("message M { optional string a = 1; }", "message M { repeated string a = 1; }", []),
    "map and message": (
        "message M { map<string, M> a = 1; }",
        "message M { repeated M a = 1; }",
        ["FIELD_KIND_CHANGED at #/M/1"],
    ),
    "key and value of a map": (
        "message M { map<string, string> a = 1; map<int32, int64> b = 2; }",
        "message M { map<int32, float> a = 1; map<int64, bool> b = 2; }",
        ["FIELD_SCALAR_KIND_CHANGED at #/M/1"],
    ),
    "map removed": ("message M { map<string, M> a = 1; }", "message M { }", []),
    "oneof added, filled and renamed": (
        "message M { oneof o { int32 a = 1; } int32 c = 3; }",
        "message M { oneof p { int32 a = 1; int32 b = 2; } oneof q { int32 c = 3; } }",
        [],
    ),
    "oneof removed with its fields": ("message M { oneof o { int32 a = 1; int32 b = 2; } }", "message M { }", []),
    "oneof dissolved": (
        "message M { oneof o { int32 a = 1; int32 b = 2; } }",
        "message M { int32 a = 1; int32 b = 2; }",
        [],
    ),
    "field of a oneof removed": (
        "message M { oneof o { int32 a = 1; int32 b = 2; } }",
        "message M { oneof o { int32 a = 1; } }",
        ["ONEOF_FIELD_REMOVED at #/M/o/2"],
    ),
    "field of a dissolved oneof removed": (
        "message M { oneof o { int32 a = 1; int32 b = 2; } }",
        "message M { int32 a = 1; }",
        ["ONEOF_FIELD_REMOVED at #/M/o/2"],
    ),
    "field of a oneof changed": (
        "message M { oneof o { int32 a = 1; } }",
        "message M { oneof p { string a = 1; } }",
        ["FIELD_SCALAR_KIND_CHANGED at #/M/p/1"],
    ),
    "field moved to a oneof": (
        "message M { int32 a = 1; oneof o { int32 b = 2; } }",
        "message M { oneof o { int32 a = 1; int32 b = 2; } }",
        ["FIELD_MOVED_TO_EXISTING_ONEOF at #/M/o"],
    ),
    "fields moved to a oneof": (
        "message M { int32 a = 1; int32 b = 2; }",
        "message M { oneof o { int32 a = 1; int32 b = 2; } }",
        ["MULTIPLE_FIELDS_MOVED_TO_ONEOF at #/M/o"],
    ),
    "oneofs merged": (
        "message M { oneof o { int32 a = 1; } oneof p { int32 b = 2; } }",
        "message M { oneof o { int32 a = 1; int32 b = 2; } }",
        ["FIELD_MOVED_TO_EXISTING_ONEOF at #/M/o"],
    ),
    "optional is no oneof": ("message M { int32 a = 1; }", "message M { optional int32 a = 1; }", []),
}


@pytest.mark.parametrize("case", BREAKS)
def test_incompatible_proto3_changes_are_reported(case: str) -> None:
    writer, reader, breaks = BREAKS[case]
    assert sorted(proto3(reader).breaks(proto3(writer))) == sorted(breaks)


@pytest.mark.parametrize(
    ("writer", "reader", "breaks"),
    [
        ("", "required int32 a = 1;", ["REQUIRED_FIELD_ADDED at #/M/1"]),
        ("required int32 a = 1;", "", ["REQUIRED_FIELD_REMOVED at #/M/1"]),
        ("optional int32 a = 1;", "required int32 a = 1;", ["FIELD_NUMERIC_LABEL_CHANGED at #/M/1"]),
        ("optional group G = 1 {}", "message G {} optional G g = 1;", ["FIELD_KIND_CHANGED at #/M/1"]),
        ("optional int32 a = 1;", "oneof o { int32 a = 1; }", []),
    ],
)
def test_incompatible_proto2_changes_are_reported(writer: str, reader: str, breaks: list[str]) -> None:
    assert proto(f"message M {{ {reader} }}").breaks(proto(f"message M {{ {writer} }}")) == breaks


def test_an_incompatible_change_of_an_import_breaks_its_users() -> None:
    text = 'syntax = "proto3"; import "n.proto"; message M { n.N n = 1; }'
    old, new = (
        proto(text, {"n.proto": f'syntax = "proto3"; package n; message N {{ {kind} a = 1; }}'})
        for kind in ("int32", "string")
    )
    assert new.breaks(old) == ["FIELD_SCALAR_KIND_CHANGED at #/N/1", "FIELD_NAMED_TYPE_CHANGED at #/M/1"]
    moved = proto3("message M { N n = 1; } message N { int32 a = 1; }")
    assert moved.breaks(old) == []


def test_a_long_chain_of_messages_with_many_paths_is_compared_once_each() -> None:
    """Each message names the next one twice: 2^2000 paths."""
    links = " ".join(f"message M{i} {{ M{i + 1} a = 1; M{i + 1} b = 2; }}" for i in range(2000))
    old, new = proto3(links + "message M2000 { int32 x = 1; }"), proto3(links + "message M2000 { float x = 1; }")
    assert old.breaks(old) == []
    assert len(new.breaks(old)) == 4001
