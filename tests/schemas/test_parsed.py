"""Schemas that were parsed lately."""

from typing import Any, cast

from headrace.schemas.parsed import CHARS_MIN, Parsed


def test_the_schema_cache_keeps_the_most_recently_used() -> None:
    parsed = Parsed(3 * (CHARS_MIN + 10))
    keys = [Parsed.key("AVRO", f"{number:5}", {"x": "y" * 5}) for number in range(4)]
    schemas = [cast(Any, f"schema {number}") for number in range(4)]
    for key, schema in zip(keys[:3], schemas[:3], strict=True):
        parsed.keep(key, schema)
    assert parsed.get(keys[0]) is schemas[0]
    for _ in range(2):  # the second time changes nothing
        parsed.keep(keys[3], schemas[3])
    assert [parsed.get(key) for key in keys] == [schemas[0], None, schemas[2], schemas[3]]


def test_a_schema_larger_than_the_cache_evicts_no_other() -> None:
    parsed = Parsed(CHARS_MIN + 10)
    keys = [Parsed.key("AVRO", "x", {}), Parsed.key("AVRO", "x" * 11, {})]
    schemas = [cast(Any, key) for key in keys]
    for key, schema in zip(keys, schemas, strict=True):
        parsed.keep(key, schema)
    assert [parsed.get(key) for key in keys] == [schemas[0], None]


def test_a_reference_with_another_text_makes_another_schema() -> None:
    assert Parsed.key("AVRO", "x", {"r": "a"}) != Parsed.key("AVRO", "x", {"r": "b"})
