"""Protobuf schemas: what is refused, what the text becomes, and what breaks a reader."""

import base64
import re
from collections.abc import Iterator
from typing import Any

import pytest
from google.protobuf import (
    any_pb2,
    api_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    empty_pb2,
    field_mask_pb2,
    source_context_pb2,
    struct_pb2,
    timestamp_pb2,
    type_pb2,
    wrappers_pb2,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import InvalidInput
from headrace.schemas.protobuf import Protobuf

WELL_KNOWN = [
    *(any_pb2, api_pb2, descriptor_pb2, duration_pb2, empty_pb2, field_mask_pb2, source_context_pb2, struct_pb2),
    *(timestamp_pb2, type_pb2, wrappers_pb2),
]

PROTO3 = """
// An order, as the shop sends it.
syntax = "proto3";
package acme.shop;

import "google/protobuf/timestamp.proto";
import public "acme/money.proto";
option java_package = "com.acme.shop";
option optimize_for = CODE_SIZE;
option (acme.owner) = { team: "shop" on_call: [1, 2] nested < a: -1.5 > };

/* Lines are
   nested. */
message Order {
  option deprecated = true;
  reserved 20, 30 to 39, 1000 to max;
  reserved "old", 'older';
  message Line { string sku = 1; uint32 count = 0x2; }
  string id = 1 [json_name = "ID", (acme.pii) = true, (acme.tag).name = "a" 'b'];
  map<string, Line> lines = 2;
  repeated sint64 deltas = 3 [packed = false];
  optional bool paid = 4;
  oneof how { bytes card = 5; Line voucher = 6; }
  Status status = 7;
  google.protobuf.Timestamp at = 8;
  .acme.Money total = 9;
  enum Status { option allow_alias = true; NEW = 0; FRESH = 0; DONE = 1 [deprecated = true]; reserved -3 to -1, 9; }
}
service Shop {
  rpc Order(Order) returns (stream Order.Line) { option idempotency_level = IDEMPOTENT; }
  rpc Watch (stream Order) returns (Order);
}
"""
MONEY = 'syntax = "proto3"; package acme; message Money { string currency = 1; int64 units = 2; }'
REFERENCES = {"acme/money.proto": MONEY}

PROTO2 = """
package old;
message Legacy {
  required int32 id = 1 [default = -7];
  optional string name = 2 [default = "a\\"b\\n\\u00e9"];
  optional bytes raw = 3 [default = "\\001\\xff"];
  optional double ratio = 4 [default = 1.5e3];
  optional float infinite = 5 [default = -inf];
  optional Kind kind = 6 [default = SECOND];
  optional bool yes = 7 [default = true];
  repeated group Item = 8 { required string sku = 1; optional Item parent = 2; }
  extensions 100 to 199, 500;
  enum Kind { FIRST = 1; SECOND = 2; }
  extend Legacy { optional string note = 100; }
  oneof one { string a = 9; group Choice = 10 { optional int32 x = 1; } }
}
extend Legacy { repeated Legacy.Item more = 101; optional int32 extra = 500; }
"""
EDITION = """
edition = "2023";
package ed;
option features.enum_type = CLOSED;
message M {
  reserved gone;
  reserved 7;
  int32 must = 1 [features.field_presence = LEGACY_REQUIRED];
  int32 plain = 2 [features.field_presence = IMPLICIT];
  M child = 3 [features.message_encoding = DELIMITED];
  repeated int32 many = 4 [features.repeated_field_encoding = EXPANDED];
  enum E { ONE = 1; }
}
"""


def proto(text: str, references: dict[str, str] | None = None) -> Protobuf:
    return Protobuf.parse(text, references or {})


def proto3(body: str, references: dict[str, str] | None = None) -> Protobuf:
    return proto(f'syntax = "proto3";\n{body}', references)


def descriptor(schema: Protobuf) -> descriptor_pb2.FileDescriptorProto:
    return descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(schema.serialized()))


def in_pool(schema: Protobuf, references: dict[str, str] | None = None) -> descriptor_pool.DescriptorPool:
    """A pool of Google's library that has taken the schema, and what it imports."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    for path, text in (references or {}).items():
        file = descriptor(proto(text, references))
        file.name = path
        pool.AddSerializedFile(file.SerializeToString())
    pool.AddSerializedFile(base64.b64decode(schema.serialized()))
    return pool


# Text


@pytest.mark.parametrize("text", [PROTO3, PROTO2, EDITION], ids=["proto3", "proto2", "edition"])
def test_the_text_is_read_again_as_the_same_schema(text: str) -> None:
    schema = proto(text, REFERENCES)
    assert proto(schema.text, REFERENCES).text == schema.text
    assert proto(schema.text, REFERENCES).serialized() == schema.serialized()
    assert proto(schema.serialized(), REFERENCES).text == schema.text


def test_white_space_comments_and_the_spelling_of_types_make_no_difference() -> None:
    one = proto3("package a; message M { string s = 1; N n = 2; message N {} }")
    other = proto3("package a; /* why */ message M {\n\n string s=1;;.a.M.N n = 0x2 ; // how\n message N { } }")
    assert one.text == other.text
    assert one.text != proto3("package a; message M { string t = 1; N n = 2; message N {} }").text


def test_options_are_in_the_order_that_a_descriptor_keeps() -> None:
    one = proto3('option go_package = "g"; option (b) = 1; option java_package = "j"; option (a) = 1.0;')
    assert one.text.splitlines()[1:] == [
        *('option java_package = "j";', 'option go_package = "g";', "option (b) = 1;", "option (a) = 1.0;")
    ]


def test_a_value_in_braces_is_kept_as_one_writes_it() -> None:
    schema = proto3('option (a)={x :- 1.5,y:[1 ,"b"  "c"] [acme . com/b.C]<z:{}>};')
    assert 'option (a) = { x: -1.5, y: [1, "b" "c"] [acme.com/b.C] < z: { } > };' in schema.text


def test_a_type_is_spelled_in_full_where_something_nearer_has_its_name() -> None:
    schema = proto3("message A {} message M { .A a = 1; string A = 2; } service S { rpc A(.A) returns (.A); }")
    assert ".A a = 1;" in schema.text
    assert "rpc A(.A) returns (.A);" in schema.text
    assert proto(schema.text).text == schema.text


def test_an_entry_of_a_map_written_by_hand_is_a_map() -> None:
    by_hand = """message M { repeated CountsEntry counts = 1;
        message CountsEntry { option map_entry = true; string key = 1; int32 value = 2; } }"""
    assert proto3(by_hand).text == proto3("message M { map<string, int32> counts = 1; }").text


def test_nested_messages_keep_their_index_also_beside_maps_and_groups() -> None:
    """Clients write which message a record holds as its index among the nested ones, entries included."""
    schema = proto("""message M { message A {} map<int32, A> m = 1; message B {}
        optional group G = 2 {} message C {} message D {} oneof o { A a = 3; } }""")
    for again in (schema, proto(schema.text), proto(schema.serialized())):
        assert [m.name for m in descriptor(again).message_type[0].nested_type] == ["A", "MEntry", "B", "G", "C", "D"]


def test_references_are_the_imports_that_must_be_registered() -> None:
    schema = proto(PROTO3.replace("import public", 'import "google/type/date.proto"; import weak'), REFERENCES)
    assert schema.references == ("acme/money.proto",)


# Descriptors, with Google's library as the judge


def test_the_descriptor_of_proto3_equals_the_source() -> None:
    pool = in_pool(proto(PROTO3, REFERENCES), REFERENCES)
    order = pool.FindMessageTypeByName("acme.shop.Order")
    fields = order.fields_by_name
    assert fields["id"].json_name == "ID"
    assert fields["lines"].message_type.GetOptions().map_entry
    assert fields["lines"].message_type.fields_by_name["value"].message_type is order.nested_types_by_name["Line"]
    assert not fields["deltas"].is_packed
    assert fields["paid"].has_presence
    assert not fields["id"].has_presence
    assert [f.name for f in order.oneofs_by_name["how"].fields] == ["card", "voucher"]
    assert fields["status"].enum_type.values_by_name["FRESH"].number == 0
    assert fields["at"].message_type.full_name == "google.protobuf.Timestamp"
    assert fields["total"].message_type.full_name == "acme.Money"
    assert order.GetOptions().deprecated
    watch = pool.FindServiceByName("acme.shop.Shop").methods_by_name["Watch"]
    assert (watch.client_streaming, watch.server_streaming) == (True, False)


def test_the_descriptor_of_proto2_equals_the_source() -> None:
    pool = in_pool(proto(PROTO2))
    legacy = pool.FindMessageTypeByName("old.Legacy")
    assert {name: f.default_value for name, f in legacy.fields_by_name.items() if f.has_default_value} == {
        "id": -7,
        "name": 'a"b\né',
        "raw": b"\x01\xff",
        "ratio": 1500.0,
        "infinite": float("-inf"),
        "kind": 2,
        "yes": True,
    }
    assert legacy.fields_by_name["id"].is_required
    assert legacy.fields_by_name["item"].type == descriptor_pb2.FieldDescriptorProto.TYPE_GROUP
    assert pool.FindExtensionByNumber(legacy, 101).name == "more"
    assert pool.FindExtensionByName("old.Legacy.note").number == 100


def test_the_descriptor_of_an_edition_equals_the_source() -> None:
    fields = in_pool(proto(EDITION)).FindMessageTypeByName("ed.M").fields_by_name
    assert fields["must"].is_required
    assert not fields["plain"].has_presence
    assert fields["child"].type == descriptor_pb2.FieldDescriptorProto.TYPE_GROUP
    assert not fields["many"].is_packed


@pytest.mark.parametrize("module", WELL_KNOWN, ids=lambda module: module.__name__.rpartition(".")[2])
def test_descriptors_of_googles_files_survive_a_round_trip(module: Any) -> None:
    references = {d.name: base64.b64encode(d.serialized_pb).decode() for d in module.DESCRIPTOR.dependencies}
    schema = proto(base64.b64encode(module.DESCRIPTOR.serialized_pb).decode(), references)
    again = descriptor(proto(schema.text, references))
    wanted = descriptor_pb2.FileDescriptorProto.FromString(module.DESCRIPTOR.serialized_pb)
    for field in all_fields(wanted):  # of no meaning to anybody but protoc itself
        field.options.ClearField("feature_support")
        field.options.ClearField("edition_defaults")
        if not field.options.ByteSize():
            field.ClearField("options")
    for enum in (enum for message in wanted.message_type for enum in message.enum_type):
        for value in enum.value:
            value.ClearField("options")
    for file in (again, wanted):
        file.name = ""
        for field in all_fields(file):
            field.ClearField("json_name")  # generated code leaves out what follows from the name
    assert again == wanted


def all_fields(file: descriptor_pb2.FileDescriptorProto) -> Iterator[descriptor_pb2.FieldDescriptorProto]:
    messages = list(file.message_type)
    yield from file.extension
    while messages:
        message = messages.pop()
        yield from message.field
        yield from message.extension
        messages += message.nested_type


def test_a_descriptor_with_names_that_are_none_is_refused() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="a.proto", syntax="proto3")
    file.message_type.add(name="A {} message B")
    with pytest.raises(InvalidInput):
        proto(base64.b64encode(file.SerializeToString()).decode())


def test_a_descriptor_whose_type_names_are_relative_is_resolved() -> None:
    file = descriptor_pb2.FileDescriptorProto(name="a.proto", package="p", syntax="proto3")
    file.message_type.add(name="A").field.add(name="b", number=1, label=1, type_name="B")
    file.enum_type.add(name="B").value.add(name="ZERO", number=0)
    made = descriptor(proto(base64.b64encode(file.SerializeToString()).decode())).message_type[0].field[0]
    assert (made.type, made.type_name) == (descriptor_pb2.FieldDescriptorProto.TYPE_ENUM, ".p.B")


# Imports


def test_only_a_public_import_is_transitive() -> None:
    uses = 'import "b.proto"; message M { C c = 1; }'
    c = 'syntax = "proto3"; message C {}'
    proto3(uses, {"b.proto": 'syntax = "proto3"; import public "c.proto";', "c.proto": c})
    with pytest.raises(InvalidInput, match="line 2: unknown type C"):
        proto3(uses, {"b.proto": 'syntax = "proto3"; import "c.proto";', "c.proto": c})


@pytest.mark.parametrize(
    ("references", "reason"),
    [
        ({}, "line 1: the import 'b.proto' is not among the references"),
        ({"b.proto": 'import "c.proto";'}, "line 1: in 'b.proto', line 1: the import 'c.proto' is not among"),
        ({"b.proto": "\nmessage {"}, "line 1: in 'b.proto', line 2: expected the name of a message, found '{'"),
        ({"b.proto": 'import "b.proto";'}, "line 1: in 'b.proto', line 1: the import is circular"),
        ({"b.proto": "message M {}"}, "line 1: M is defined twice"),
    ],
)
def test_imports_that_cannot_be_followed_are_refused(references: dict[str, str], reason: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(reason)):
        proto('import "b.proto"; message M {}', references)


# Refusals


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("message M { string s = 1 }", "line 2: expected ';', found '}'"),
        ("message M {\n string s = 1;\n", "line 4: expected a type, found the end"),
        ("message M { string s; }", "line 2: expected '=', found ';'"),
        ("hello", "line 2: unexpected 'hello'"),
        ("message M {\n#\n}", "line 3: unexpected character at"),
        ("message M { /* no end", "line 2: unexpected character at '*"),
        ('option java_package = "x;', "line 2: unexpected character at"),
        ('option java_package = "\\q";', "line 2: unknown escape"),
        ("option java_package = x;", "line 2: the value of option java_package is of the wrong type"),
        ("option deprecated = true; option deprecated = true;", "line 2: option deprecated is set twice"),
        ("option (a) = { b: [1 };", "line 2: unmatched '}'"),
        ("package a; package b;", "line 2: the package is declared twice"),
        ("message M {\n Missing m = 1; }", "line 3: unknown type Missing"),
        ("message M { string a = 1;\n string b = 1; }", "line 3: M: field number 1 is used twice"),
        ("message M { string a = 1;\n int32 a = 2; }", "line 3: M.a is defined twice"),
        ("message M { string a_b = 1; string aB = 2; }", "line 2: M: two fields have the JSON name 'aB'"),
        ("message M { reserved 2 to 4; string a = 3; }", "line 2: M: field a = 3 is reserved"),
        ('message M { reserved "a"; string a = 3; }', "line 2: M: field a = 3 is reserved"),
        ("message M { reserved 4 to 3; }", "line 2: 4 to 3 is an empty range"),
        ("message M { reserved 1 to 3, 3; }", "line 2: M: overlapping ranges at 3"),
        ("message M { string a = 0; }", "line 2: the number of a field must be from 1 to 536870911"),
        ("message M { string a = 536870912; }", "line 2: the number of a field must be from 1 to 536870911"),
        ("message M { string a = 08; }", "line 2: 08 is not an octal number"),
        ("message M { string a = 19500; }", "line 2: a: the numbers 19000 to 19999 are reserved by protobuf"),
        ("message M { required string a = 1; }", "line 2: only proto2 has required fields"),
        ("message M { optional group A = 1 {} }", "line 2: only proto2 has groups"),
        ('message M { string a = 1 [default = "x"]; }', "line 2: proto3 has no defaults"),
        ("message M { extensions 1; }", "line 2: proto3 has no extension ranges"),
        ("message M {} extend M { string a = 1; }", "line 2: proto3 can only extend options"),
        ("message M { oneof o { } }", "line 2: oneof o has no fields"),
        ("message M { oneof o { repeated string a = 1; } }", "line 2: a field of a oneof cannot have a label"),
        ("message M { oneof o { map<int32, M> a = 1; } }", "line 2: a map cannot be in a oneof"),
        ("message M { map<double, M> a = 1; }", "line 2: expected a type for the keys of a map, found 'double'"),
        ("enum E { }", "line 2: enum E has no values"),
        ("enum E { A = 1; }", "line 2: the first value of enum E must be zero"),
        ("enum E { A = 0; B = 0; }", "line 2: E: 0 is used twice without allow_alias"),
        ("enum E { A = 0; } enum F { A = 0; }", "line 2: A is defined twice"),
        ("enum E { A = 0; reserved 1; B = 1; }", "line 2: E: B = 1 is reserved"),
        ("enum E { A = 0; B = 2147483648; }", "line 2: the number of a value must be from"),
        ("enum E { A = 0; } service S { rpc M(E) returns (E); }", "line 2: E is an enum, not a message"),
        ("message M { message E { option map_entry = true; } }", "line 2: E is not a valid map entry"),
        ('import "a"; import "a";', "line 2: 'a' is imported twice"),
    ],
)
def test_invalid_proto3_is_refused_with_its_line(body: str, reason: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        proto3(body)
    assert str(refused.value).startswith(reason)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('syntax = "proto4";', "line 1: unknown syntax 'proto4'"),
        ('edition = "1999";', "line 1: unknown edition '1999'"),
        ("message M { string a = 1; }", "line 1: a proto2 field needs a label"),
        ("message M { optional int32 a = 1 [default = 3000000000]; }", "line 1: the default of a is not of its type"),
        ("message M { optional E e = 1 [default = B]; enum E { A = 1; } }", "line 1: the default of e is not of its"),
        ("message M { optional M m = 1 [default = B]; }", "line 1: the default of m is not of its type"),
        ("message M { repeated int32 a = 1 [default = 1]; }", "line 1: this field cannot have a default"),
        ("message M { extensions 5; optional int32 a = 5; }", "line 1: M: 5 is reserved for extensions"),
        ("message M { extensions 5; } extend M { optional int32 a = 6; }", "line 1: M does not allow extension 6"),
        (
            "message M { extensions 5; } extend M { optional int32 a = 5; optional int32 b = 5; }",
            "line 1: extension 5 of M is used twice",
        ),
        (
            'message M { extensions 5; } extend M { optional int32 a = 5 [json_name = "b"]; }',
            "line 1: an extension cannot have a json_name",
        ),
        ('edition = "2023"; message M { optional int32 a = 1; }', "line 1: editions have no label optional"),
        ("\ud800", "the schema is not UTF-8"),
    ],
)
def test_invalid_proto2_and_editions_are_refused(text: str, reason: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        proto(text)
    assert str(refused.value).startswith(reason)


def test_size_and_nesting_have_limits() -> None:
    proto("message A {" * 100 + "}" * 100)
    for text in ("message A {" * 101 + "}" * 101, "option (a) = " + "{" * 200, " " * 1_000_001):
        with pytest.raises(InvalidInput, match=r"nested|the limit is"):
            proto(text)


# Whatever comes

WORDS = """message enum oneof map < > { } [ ] ( ) = ; , . - string int32 M a b 1 2 0 "x" option reserved to max
    repeated optional required group extend extensions syntax "proto3" package import rpc returns service stream
    default 1.5 -1 true A 0x1F json_name features packed /* */ // \\ '"""
NAMES = st.sampled_from(["a", "b", "c_d", "message", "optional", "string", "M", "N", "_x", "enum"])


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.text(), st.lists(st.sampled_from([*WORDS.split(), "\n"]), max_size=40).map(" ".join)))
def test_nothing_but_invalid_input_is_raised_for_any_text(text: str) -> None:
    for candidate in (text, f'syntax = "proto3"; message M {{ {text} }}'):
        try:
            schema = proto(candidate)
        except InvalidInput as e:
            assert "\n" not in str(e)
        else:
            assert proto(schema.text).text == schema.text
            assert proto(schema.serialized()).text == schema.text
            assert schema.breaks(schema) == []


PROTO2_BYTES = base64.b64decode(proto(PROTO2).serialized())


@settings(max_examples=100, deadline=None)
@given(st.binary(), st.integers(0, 2000), st.binary(min_size=1, max_size=4))
def test_nothing_but_invalid_input_is_raised_for_any_bytes(data: bytes, at: int, patch: bytes) -> None:
    whole = bytearray(PROTO2_BYTES)
    whole[at % len(whole) : at % len(whole) + len(patch)] = patch
    for candidate in (data, bytes(whole)):
        try:
            schema = proto(base64.b64encode(candidate).decode())
        except InvalidInput as e:
            assert "\n" not in str(e)
        else:
            assert proto(schema.text).text == schema.text


@st.composite
def bodies(draw: st.DrawFn, depth: int = 2) -> str:
    """The inside of a message of proto3, its names apart."""
    names = draw(st.lists(NAMES, unique=True, min_size=1, max_size=6))
    nested = [f"Nested{i}" for i in range(draw(st.integers(0, 2)) if depth else 0)]
    parts = [f"message {name} {{ {draw(bodies(depth=depth - 1))} }}" for name in nested]
    types = st.sampled_from(["int32", "string", "bool", "double", *nested, ".Top", ".Top.Kind"])
    for number, name in enumerate(names, 1):
        kind = draw(types)
        form = draw(st.sampled_from(["{} {} = {};", "repeated {} {} = {};", "optional {} {} = {};"]))
        if draw(st.booleans()):
            form = draw(st.sampled_from(["map<string, {}> {} = {};", "oneof of_%s {{ {} {} = {}; }}" % name]))  # noqa: UP031
        parts.append(form.format(kind, name, number))
    return " ".join(draw(st.permutations(parts)))


@settings(max_examples=100, deadline=None)
@given(bodies())
def test_any_schema_is_taken_by_googles_library_and_never_breaks_itself(body: str) -> None:
    schema = proto3(f"message Top {{ {body} enum Kind {{ ZERO = 0; }} }}")
    in_pool(schema)
    assert schema.breaks(schema) == []
    again = proto(schema.serialized())
    assert again.text == schema.text
    assert again.breaks(schema) == []
