"""Messages in JSON: what is kept is what was meant, and what could be misunderstood is refused."""

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


def test_strings_are_kept_as_they_are() -> None:
    draft = one('{"key": "ключ", "value": "wert\\u0000"}'.encode())
    assert draft == Draft("ключ".encode(), b"wert\0")


def test_other_json_types_are_kept_as_the_text_they_were_sent_as() -> None:
    assert one(b'{"value": {"b": 1.10, "a":[1e2 ]} }').value == b'{"b": 1.10, "a":[1e2 ]}'
    assert one(b'{"value": 12345678901234567890123}').value == b"12345678901234567890123"
    assert one(b'{"value": true, "key": 7}') == Draft(b"7", b"true")
    assert one(b'[ {"value": 1e400} ]').value == b"1e400"


def test_a_null_value_is_a_tombstone_and_an_empty_one_is_not() -> None:
    assert one(b'{"key": "k", "value": null}').value is None
    assert one(b'{"key": "", "value": ""}') == Draft(b"", b"")


def test_base64_names_key_and_value_together_or_apart() -> None:
    data = base64.b64encode(b"\xff\0").decode()
    assert one(f'{{"key": "{data}", "value": "{data}", "encoding": "base64"}}'.encode())[:2] == (b"\xff\0",) * 2
    apart = f'{{"key": "plain", "value": "{data}", "encoding": {{"value": "base64"}}}}'
    assert one(apart.encode())[:2] == (b"plain", b"\xff\0")


def test_headers_are_an_object_or_pairs_where_names_repeat() -> None:
    assert one(b'{"value": 1, "headers": {"a": "x", "b": null, "c": 1.50}}').headers == (
        ("a", b"x"),
        ("b", None),
        ("c", b"1.50"),
    )
    pairs = b'{"value": 1, "headers": [["a", "x"], ["a", [1, 2]]]}'
    assert one(pairs).headers == (("a", b"x"), ("a", b"[1, 2]"))
    encoded = b'{"value": 1, "headers": {"a": "/w=="}, "encoding": {"headers": "base64"}}'
    assert one(encoded).headers == (("a", b"\xff"),)


def test_partition_and_timestamp_are_whole_numbers() -> None:
    assert one(b'{"value": 1, "partition": 3, "timestamp": 1700000000000}')[3:] == (3, 1_700_000_000_000)
    assert one(b'{"value": 1, "partition": 3.0, "timestamp": null}')[3:] == (3, -1)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "expecting value"),
        (b"{", "expecting"),
        (b'"text"', "a message is a JSON object"),
        (b"[1]", "a message is a JSON object"),
        (b"{}", "needs a value"),
        (b'{"value": 1, "valeu": 2}', "no such field"),
        (b'{"value": 1, "value": 2}', "appears twice"),
        (b'{"value": {"a": 1, "a": 2}}', "appears twice"),
        (b'{"value": NaN}', "not JSON"),
        (b'{"value": [-Infinity]}', "not JSON"),
        (b'{"value": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"value": "\\ud800"}', "half a character"),
        (b'{"value": ["\\udc00x"]}', "half a character"),
        (b'{"value": "\xff"}', "not UTF-8"),
        (b'{"value": "\xed\xa0\x80"}', "not UTF-8"),
        (b'{"value": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'{"value": 1} x', "something follows"),
        (b'[{"value": 1}] x', "something follows"),
        (b'[{"value": 1},]', "expecting value"),
        (b'[{"value": 1} {"value": 1}]', "expecting ','"),
        (b'{"value": 1, "partition": -1}', "partition is a whole number"),
        (b'{"value": 1, "partition": true}', "partition is a whole number"),
        (b'{"value": 1, "partition": 1.5}', "partition is a whole number"),
        (b'{"value": 1, "timestamp": "now"}', "timestamp is a whole number"),
        (b'{"value": 1, "timestamp": 99999999999999999}', "timestamp is a whole number"),
        (b'{"value": "!", "encoding": "base64"}', "is not"),
        (b'{"value": 1, "encoding": "base64"}', "must be a string"),
        (b'{"value": "x", "encoding": "rot13"}', "encoding is"),
        (b'{"value": "x", "encoding": {"offset": "base64"}}', "encoding is"),
        (b'{"value": 1, "headers": "x"}', "headers are"),
        (b'{"value": 1, "headers": 0}', "headers are"),
        (b'{"value": 1, "headers": ["ab"]}', "headers are"),
        (b'{"value": 1, "headers": [["a"]]}', "headers are"),
        (b'{"value": 1, "headers": [[1, "x"]]}', "name of a header"),
    ],
)
def test_what_could_be_misunderstood_is_refused_with_a_sentence(body: bytes, reason: str) -> None:
    with pytest.raises((MalformedJson, MalformedMessage)) as caught:
        parse_json(body, MANY)
    assert reason in str(caught.value)
    if body:
        with pytest.raises(MalformedMessage):
            parse_ndjson(body, MANY)


def test_a_refusal_names_the_message_that_is_wrong() -> None:
    with pytest.raises(MalformedMessage) as caught:
        parse_ndjson(b'{"value": 1}\n\n{"value": 2}\r\n{"val": 3}\n', MANY)
    assert caught.value.index == 2
    with pytest.raises(MalformedMessage) as caught:
        parse_json(b'[{"value": 1}, {"value": 2, "partition": -1}]', MANY)
    assert caught.value.index == 1


def test_more_messages_than_one_request_may_hold_are_refused_before_they_are_all_parsed() -> None:
    with pytest.raises(MalformedMessage):
        parse_json(b"[" + b'{"value":1},' * 20 + b'{"value":1}]', 10)
    with pytest.raises(MalformedMessage):
        parse_ndjson(b'{"value":1}\n' * 11, 10)
    assert len(parse_ndjson(b"\n" * 1000 + b'{"value":1}\n' * 10, 10)) == 10


def test_json_that_unfolds_to_millions_of_pieces_is_refused_without_parsing_it() -> None:
    body = b'{"value": [' + b"[]," * 2_000_000 + b"[]]}"
    with pytest.raises(MalformedJson, match="pieces"):
        parse_json(body, MANY)


def test_commas_inside_a_string_are_not_pieces() -> None:
    text = "a,b,[c]," * 400_000
    assert one(json.dumps({"value": text}).encode()).value == text.encode()


def test_a_page_can_be_published_again_as_it_was_read() -> None:
    record = Record(7, 123, b"\xff", b"text", (("a", b"\xfe"), ("a", None)))
    again = one(json.dumps(render(2, record)).encode())
    assert again == Draft(b"\xff", b"text", (("a", b"\xfe"), ("a", None)), 2, 123)


BYTES = st.none() | st.binary(max_size=20) | st.text(max_size=10).map(str.encode)
HEADERS = st.lists(st.tuples(st.text(max_size=5), BYTES), max_size=4).map(tuple)


@given(key=BYTES, value=BYTES, headers=HEADERS, binary=st.booleans())
def test_every_message_survives_being_read_and_published(key, value, headers, binary) -> None:  # type: ignore[no-untyped-def]
    record = Record(5, 1_700_000_000_000, key, value, headers)
    shown = render(1, record, binary=binary)
    assert one(json.dumps(shown).encode()) == Draft(key, value, headers, 1, record.timestamp)
    if shown.get("encoding") == "base64":
        assert base64.b64decode(shown["value"] or "") == (value or b"")


@given(st.binary(max_size=200) | st.text(max_size=100).map(str.encode))
def test_no_bytes_at_all_raise_anything_but_a_refusal(body: bytes) -> None:
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
def test_any_plain_json_is_read_as_other_readers_read_it(value) -> None:  # type: ignore[no-untyped-def]
    text = json.dumps(value).encode()
    assert strict_json.loads(text) == json.loads(text)
    stored = one(b'{"value":' + text + b"}").value
    if value is None:
        assert stored is None
    elif isinstance(value, str):
        assert stored == value.encode()
    else:
        assert stored == text
