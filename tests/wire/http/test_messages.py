"""Parsing and rendering of messages as JSON and NDJSON; ambiguous input is refused."""

import base64
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import MalformedJson, MalformedMessage
from headrace.record.types import Record
from headrace.wire.http import strict_json
from headrace.wire.http.messages import Draft, parse_json, parse_ndjson, render

MANY = 1000


def one(body: bytes) -> Draft:
    [draft] = parse_json(body, MANY)
    return draft


def test_strings_are_stored_as_utf8() -> None:
    draft = one('{"key": "ключ", "value": "wert\\u0000"}'.encode())
    assert draft == Draft("ключ".encode(), b"wert\0")


def test_other_json_values_are_stored_as_the_text_that_was_sent() -> None:
    assert one(b'{"value": {"b": 1.10, "a":[1e2 ]} }').value == b'{"b": 1.10, "a":[1e2 ]}'
    assert one(b'{"value": 12345678901234567890123}').value == b"12345678901234567890123"
    assert one(b'{"value": true, "key": 7}') == Draft(b"7", b"true")
    assert one(b'[ {"value": 1e400} ]').value == b"1e400"


def test_null_is_a_tombstone_and_an_empty_string_is_not() -> None:
    assert one(b'{"key": "k", "value": null}').value is None
    assert one(b'{"key": "", "value": ""}') == Draft(b"", b"")


def test_base64_applies_to_key_and_value_or_to_each_part() -> None:
    data = base64.b64encode(b"\xff\0").decode()
    assert one(f'{{"key": "{data}", "value": "{data}", "encoding": "base64"}}'.encode())[:2] == (b"\xff\0",) * 2
    separate = f'{{"key": "plain", "value": "{data}", "encoding": {{"value": "base64"}}}}'
    assert one(separate.encode())[:2] == (b"plain", b"\xff\0")


def test_headers_are_an_object_or_a_list_of_pairs() -> None:
    assert one(b'{"value": 1, "headers": {"a": "x", "b": null, "c": 1.50}}').headers == (
        ("a", b"x"),
        ("b", None),
        ("c", b"1.50"),
    )
    pairs = b'{"value": 1, "headers": [["a", "x"], ["a", [1, 2]]]}'
    assert one(pairs).headers == (("a", b"x"), ("a", b"[1, 2]"))
    encoded = b'{"value": 1, "headers": {"a": "/w=="}, "encoding": {"headers": "base64"}}'
    assert one(encoded).headers == (("a", b"\xff"),)


def test_partition_and_timestamp_are_integers() -> None:
    assert one(b'{"value": 1, "partition": 3, "timestamp": 1700000000000}')[3:] == (3, 1_700_000_000_000)
    assert one(b'{"value": 1, "partition": 3.0, "timestamp": null}')[3:] == (3, -1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "expecting value"),
        (b"{", "expecting"),
        (b'"text"', "a message must be a JSON object"),
        (b"[1]", "a message must be a JSON object"),
        (b"{}", "needs the field value"),
        (b'{"value": 1, "valeu": 2}', "unknown field"),
        (b'{"value": 1, "value": 2}', "appears twice"),
        (b'{"value": {"a": 1, "a": 2}}', "appears twice"),
        (b'{"value": NaN}', "not valid JSON"),
        (b'{"value": [-Infinity]}', "not valid JSON"),
        (b'{"value": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"value": "\\ud800"}', "lone surrogate"),
        (b'{"value": ["\\udc00x"]}', "lone surrogate"),
        (b'{"value": "\xff"}', "not UTF-8"),
        (b'{"value": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"value": 1} x', "unexpected data after"),
        (b'[{"value": 1}] x', "unexpected data after"),
        (b'[{"value": 1},]', "expecting value"),
        (b'[{"value": 1} {"value": 1}]', "expecting ','"),
        (b'{"value": 1, "partition": -1}', "partition must be an integer"),
        (b'{"value": 1, "partition": true}', "partition must be an integer"),
        (b'{"value": 1, "partition": 1.5}', "partition must be an integer"),
        (b'{"value": 1, "timestamp": "now"}', "timestamp must be an integer"),
        (b'{"value": 1, "timestamp": 99999999999999999}', "timestamp must be an integer"),
        (b'{"value": "!", "encoding": "base64"}', "not valid base64"),
        (b'{"value": 1, "encoding": "base64"}', "must be a string"),
        (b'{"value": "x", "encoding": "rot13"}', "encoding must be"),
        (b'{"value": "x", "encoding": {"offset": "base64"}}', "encoding must be"),
        (b'{"value": 1, "headers": "x"}', "headers must be"),
        (b'{"value": 1, "headers": 0}', "headers must be"),
        (b'{"value": 1, "headers": ["ab"]}', "headers must be"),
        (b'{"value": 1, "headers": [["a"]]}', "headers must be"),
        (b'{"value": 1, "headers": [[1, "x"]]}', "header name must be"),
    ],
)
def test_malformed_messages_are_refused_with_the_reason(body: bytes, reason: str) -> None:
    with pytest.raises((MalformedJson, MalformedMessage)) as caught:
        parse_json(body, MANY)
    assert reason in str(caught.value)
    if body:
        with pytest.raises(MalformedMessage):
            parse_ndjson(body, MANY)


def test_the_error_has_the_index_of_the_malformed_message() -> None:
    with pytest.raises(MalformedMessage) as caught:
        parse_ndjson(b'{"value": 1}\n\n{"value": 2}\r\n{"val": 3}\n', MANY)
    assert caught.value.index == 2
    with pytest.raises(MalformedMessage) as caught:
        parse_json(b'[{"value": 1}, {"value": 2, "partition": -1}]', MANY)
    assert caught.value.index == 1


def test_too_many_messages_are_refused_before_all_are_parsed() -> None:
    with pytest.raises(MalformedMessage):
        parse_json(b"[" + b'{"value":1},' * 20 + b'{"value":1}]', 10)
    with pytest.raises(MalformedMessage):
        parse_ndjson(b'{"value":1}\n' * 11, 10)
    assert len(parse_ndjson(b"\n" * 1000 + b'{"value":1}\n' * 10, 10)) == 10


def test_json_with_millions_of_values_is_refused_without_parsing() -> None:
    body = b'{"value": [' + b"[]," * 2_000_000 + b"[]]}"
    with pytest.raises(MalformedJson, match="values"):
        parse_json(body, MANY)


def test_commas_inside_strings_do_not_count_as_values() -> None:
    text = "a,b,[c]," * 400_000
    assert one(json.dumps({"value": text}).encode()).value == text.encode()


def test_a_message_that_was_read_can_be_published_again() -> None:
    record = Record(7, 123, b"\xff", b"text", (("a", b"\xfe"), ("a", None)))
    again = one(json.dumps(render(2, record)).encode())
    assert again == Draft(b"\xff", b"text", (("a", b"\xfe"), ("a", None)), 2, 123)


BYTES = st.none() | st.binary(max_size=20) | st.text(max_size=10).map(str.encode)
HEADERS = st.lists(st.tuples(st.text(max_size=5), BYTES), max_size=4).map(tuple)


@given(key=BYTES, value=BYTES, headers=HEADERS, binary=st.booleans())
def test_every_message_survives_a_round_trip(
    key: bytes | None, value: bytes | None, headers: tuple[tuple[str, bytes | None], ...], binary: bool
) -> None:
    record = Record(5, 1_700_000_000_000, key, value, headers)
    shown = render(1, record, binary=binary)
    assert one(json.dumps(shown).encode()) == Draft(key, value, headers, 1, record.timestamp)
    if shown.get("encoding") == "base64":
        assert base64.b64decode(shown["value"] or "") == (value or b"")


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_arbitrary_bytes_raise_only_malformed_errors(body: bytes) -> None:
    for parse in (parse_json, parse_ndjson):
        try:
            parse(body, MANY)
        except (MalformedJson, MalformedMessage):
            pass


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON_VALUES)
def test_valid_json_parses_like_the_standard_library(value: object) -> None:
    text = json.dumps(value).encode()
    assert strict_json.loads(text) == json.loads(text)
    stored = one(b'{"value":' + text + b"}").value
    if value is None:
        assert stored is None
    elif isinstance(value, str):
        assert stored == value.encode()
    else:
        assert stored == text
