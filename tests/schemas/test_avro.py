"""Avro: parsing, equality and compatibility, checked with data against fastavro."""

import io
import json
from typing import Any

import fastavro
import fastavro.utils
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import InvalidInput
from headrace.schemas.avro import REASONS_MAX, Avro


def avro(schema: Any, **references: Any) -> Avro:
    return Avro.parse(json.dumps(schema), {name: json.dumps(one) for name, one in references.items()})


def record(*fields: Any, name: str = "r", **more: Any) -> dict[str, Any]:
    return {"type": "record", "name": name, "fields": list(fields), **more}


def field(name: str, kind: Any, **more: Any) -> dict[str, Any]:
    return {"name": name, "type": kind, **more}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must be JSON"),
        ("{", "must be JSON"),
        ("null", "not a type"),
        ("1", "not a type"),
        ('"strng"', "unknown type 'strng'"),
        ('{"type": "record", "name": "r"}', "no list of fields"),
        ('{"type": "record", "fields": []}', "needs a name"),
        ('{"type": "record", "name": "1r", "fields": []}', "needs a name"),
        ('{"type": "record", "name": "int", "fields": []}', "primitive"),
        ('{"type": "record", "name": "r", "namespace": "a..b", "fields": []}', "namespace"),
        ('{"type": "record", "name": "r", "fields": [{"name": "a"}]}', "a name and a type"),
        ('{"type": "record", "name": "r", "fields": [1]}', "a name and a type"),
        (json.dumps({"type": "record", "name": "r", "fields": [{"name": "a", "type": "int"}] * 2}), "twice"),
        ('{"type": "record", "name": "r", "fields": [{"name": "a", "type": "int", "default": "x"}]}', "default of r.a"),
        ('{"type": "record", "name": "r", "fields": [{"name": "a", "type": "int", "default": 2147483648}]}', "default"),
        ('{"type": "enum", "name": "e", "symbols": []}', "symbols"),
        ('{"type": "enum", "name": "e", "symbols": ["A", "A"]}', "each of them once"),
        ('{"type": "enum", "name": "e", "symbols": ["A"], "default": "B"}', "default of enum e"),
        ('{"type": "enum", "name": "e", "symbols": [1]}', "list of strings"),
        ('{"type": "fixed", "name": "f", "size": -1}', "size"),
        ('{"type": "array"}', "must have items"),
        ('["int", "int"]', "twice"),
        ('["int", ["long"]]', "must not contain a union"),
        ("[" * 100_000, "deep|JSON"),
        ('{"type":"array","items":' * 200 + '"int"' + "}" * 200, "too deep"),
        (" " * (1 << 21), "at most"),
    ],
)  # fmt: skip
def test_an_invalid_avro_schema_is_refused_with_the_reason(text: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        Avro.parse(text, {})


def test_two_types_of_one_name_are_refused() -> None:
    with pytest.raises(InvalidInput, match=r"type a\.r is defined twice"):
        avro([record(name="a.r"), {"type": "fixed", "name": "r", "namespace": "a", "size": 1}])


def test_the_same_schema_has_the_same_text() -> None:
    spaced = ' { "type" : "record", "name":"r", "fields": [ {"name":"a", "type": {"type": "string"}} ] } '
    assert Avro.parse(spaced, {}).text == avro(record(field("a", "string"))).text
    assert Avro.parse('{"type": "string"}', {}).text == '"string"'
    logical = '{"type":"long","logicalType":"timestamp-millis"}'
    assert Avro.parse(logical, {}).text == logical


def test_types_are_found_by_name_in_namespaces_and_in_references() -> None:
    avro(record(field("inner", record(name="i", namespace="b")), field("again", "b.i"), name="a.r"))
    avro(record(field("next", ["null", "r"], default=None), name="r", namespace="a"))
    user = avro(record(field("who", "people.person")), person=record(name="people.person"))
    assert user.references == ("people.person",)
    with pytest.raises(InvalidInput, match=r"unknown type 'people\.person'"):
        avro(record(field("who", "people.person")))
    with pytest.raises(InvalidInput, match="reference 'person': "):
        avro(record(), person={"type": "record"})


LONGER = record(field("a", "int"), field("b", "string", default=""))
SHORTER = record(field("a", "int"))
# reader, writer, the word for what is wrong ("" if nothing is).
PAIRS = [
    (LONGER, SHORTER, ""),
    (SHORTER, LONGER, ""),
    (record(field("a", "int"), field("b", "string")), SHORTER, "READER_FIELD_MISSING_DEFAULT_VALUE at /fields/1/: b"),
    (record(field("x", "int", aliases=["a"])), SHORTER, ""),
    (record(field("a", "long")), SHORTER, ""),
    (SHORTER, record(field("a", "long")), "TYPE_MISMATCH at /fields/0/type/"),
    ("double", "int", ""),
    ("int", "double", "TYPE_MISMATCH"),
    ("float", "long", ""),
    ("string", "bytes", ""),
    ("bytes", "string", ""),
    ("boolean", "int", "TYPE_MISMATCH"),
    (["null", "int"], "int", ""),
    ("int", ["null", "int"], "TYPE_MISMATCH"),
    ("int", ["int"], ""),
    (["null", "long"], ["null", "int"], ""),
    (["null"], ["null", "int"], "MISSING_UNION_BRANCH at /1"),
    (["null", "string"], "int", "MISSING_UNION_BRANCH"),
    ({"type": "array", "items": "long"}, {"type": "array", "items": "int"}, ""),
    ({"type": "array", "items": "int"}, {"type": "array", "items": "long"}, "TYPE_MISMATCH at /items/"),
    ({"type": "map", "values": "int"}, {"type": "map", "values": "string"}, "TYPE_MISMATCH at /values/"),
    ({"type": "map", "values": "int"}, {"type": "array", "items": "int"}, "TYPE_MISMATCH"),
    ({"type": "enum", "name": "e", "symbols": ["A", "B"]}, {"type": "enum", "name": "e", "symbols": ["A"]}, ""),
    (
        {"type": "enum", "name": "e", "symbols": ["A"]},
        {"type": "enum", "name": "e", "symbols": ["A", "B"]},
        "MISSING_ENUM_SYMBOLS at /symbols: the reader has no B",
    ),
    (
        {"type": "enum", "name": "e", "symbols": ["A"], "default": "A"},
        {"type": "enum", "name": "e", "symbols": ["A", "B"]},
        "",
    ),
    ({"type": "fixed", "name": "f", "size": 2}, {"type": "fixed", "name": "f", "size": 3}, "FIXED_SIZE_MISMATCH"),
    (record(name="other"), record(name="r"), "NAME_MISMATCH"),
    (record(name="other", aliases=["r"]), record(name="r"), ""),
    (record(name="a.r"), record(name="b.r"), ""),
]


@pytest.mark.parametrize(("reader", "writer", "wrong"), PAIRS)
def test_incompatible_avro_changes_are_refused(reader: Any, writer: Any, wrong: str) -> None:
    found = avro(reader).breaks(avro(writer))
    assert bool(found) == bool(wrong), found
    assert not wrong or wrong in found[0]


def test_types_that_contain_themselves_are_compared_to_their_end() -> None:
    tree = record(field("value", "int"), field("next", ["null", "r"], default=None))
    wider = record(field("value", "long"), field("next", ["null", "r"], default=None))
    assert avro(wider).breaks(avro(tree)) == []
    assert avro(tree).breaks(avro(wider)) == ["TYPE_MISMATCH at /fields/0/type/: the reader has int, the writer long"]


def test_reasons_do_not_double_with_every_type_that_is_used_twice() -> None:
    def chain(last: str) -> Any:
        made: Any = record(field("x", last), name="R40")
        for number in range(39, -1, -1):
            made = record(field("a", made), field("b", f"R{number + 1}"), name=f"R{number}")
        return made

    assert len(avro(chain("int")).breaks(avro(chain("string")))) == REASONS_MAX


def test_a_comparison_of_many_pairs_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.schemas.avro.STEPS_MAX", 1_000)
    many = [record(name=f"a{number}") for number in range(40)]
    assert "TOO_MANY" in avro(many).breaks(avro([{**one, "name": "b" + one["name"]} for one in many]))[0]
    assert avro(many[:10]).breaks(avro(many[:10])) == []


def test_a_default_is_tried_once_with_every_type() -> None:
    """Two records in one union, each with the same union in it: twice as many ways with every level."""
    default: Any = 5
    for _ in range(90):
        default = {"f": default}
    inner = record(field("f", ["null", "A", "B"]), name="B")
    both = record(field("f", ["null", "A", inner]), name="A")
    with pytest.raises(InvalidInput, match="the default of"):
        avro(record(field("z", both), field("y", "A", default=default)))
    default = None
    for _ in range(40):
        default = {"f": default}
    avro(record(field("z", both), field("y", "A", default=default)))


def test_a_long_chain_of_named_types_is_refused_as_too_deep() -> None:
    """Each refers to the one before it, and the last is looked at first."""
    links = [record(field("before", f"r{number - 1}"), name=f"r{number}") for number in range(1, 2000)]
    references = {f"r{number}": one for number, one in enumerate([record(name="r0"), *links])}
    schema = avro(record(field("last", "r1999")), **references)
    [found] = schema.breaks(schema)
    assert found.startswith("TOO_DEEP")


def schemas() -> st.SearchStrategy[Any]:
    names = st.sampled_from(["n1", "n2", "n3", "n4"])
    primitive = st.sampled_from(["null", "boolean", "int", "long", "float", "double", "bytes", "string"])
    enum = st.builds(lambda n, s: {"type": "enum", "name": n, "symbols": s}, names, st.just(["A", "B"]))

    def wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        fields = st.lists(st.tuples(st.sampled_from("abc"), inner), max_size=3, unique_by=lambda pair: pair[0])
        return st.one_of(
            st.builds(lambda one: {"type": "array", "items": one}, inner),
            st.builds(lambda one: {"type": "map", "values": one}, inner),
            st.lists(inner, min_size=1, max_size=3),
            st.builds(lambda n, f: record(*(field(*one) for one in f), name=n), names, fields),
        )

    return st.recursive(st.one_of(primitive, enum), wider, max_leaves=6)


def parsed(schema: Any) -> Avro | None:
    try:
        return avro(schema)
    except InvalidInput:
        return None


@given(schemas(), schemas())
def test_data_of_compatible_schemas_is_readable_by_fastavro(reader: Any, writer: Any) -> None:
    mine, theirs = parsed(reader), parsed(writer)
    if mine is None or theirs is None:
        return
    assert mine.breaks(mine) == []
    if mine.breaks(theirs):
        return
    written, wanted = fastavro.parse_schema(writer), fastavro.parse_schema(reader)
    data = fastavro.utils.generate_one(written)
    out = io.BytesIO()
    fastavro.schemaless_writer(out, written, data)
    out.seek(0)
    fastavro.schemaless_reader(out, written, wanted)


KEYWORDS = st.sampled_from(["type", "name", "fields", "items", "symbols", "default", "size"])
LEAVES = st.none() | st.integers() | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(KEYWORDS, inner))


@given(st.text() | VALUES.map(json.dumps))
def test_arbitrary_text_is_parsed_or_refused_cleanly(text: str) -> None:
    try:
        Avro.parse(text, {})
    except InvalidInput as error:
        assert "\n" not in str(error)
