"""What is found of a message's trace in its AMQP properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.record.amqp.properties import encode_properties
from headrace.record.amqp.trace_headers import traces_of
from headrace.record.layout import TRACE_HEADERS

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
names = st.sampled_from([*TRACE_HEADERS, "trace", "Traceparent", "tracestat", "x"])
values = st.one_of(st.text(max_size=20), st.integers(0, 99), st.booleans(), st.none(), st.lists(st.text(max_size=3)))


def test_all_three_are_found_in_the_order_of_the_message() -> None:
    headers = {"a": 1, "baggage": "k=v", "traceparent": PARENT, "nested": {"tracestate": "no"}, "tracestate": "é=1"}
    found = traces_of(encode_properties({"content_type": "text/plain", "content_encoding": "x", "headers": headers}))
    assert found == (("baggage", b"k=v"), ("traceparent", PARENT.encode()), ("tracestate", "é=1".encode()))


@given(st.dictionaries(names, values), st.booleans(), st.booleans())
def test_text_of_the_three_names_is_found_and_nothing_else(headers: dict, typed: bool, encoded: bool) -> None:
    properties: dict = {"headers": headers, "delivery_mode": 2}
    if typed:
        properties["content_type"] = "t" * 200
    if encoded:
        properties["content_encoding"] = ""
    wanted = [(name, v.encode()) for name, v in headers.items() if name in TRACE_HEADERS and isinstance(v, str)]
    assert traces_of(encode_properties(properties)) == tuple(wanted)


def test_of_a_name_that_comes_twice_the_first_counts() -> None:
    field = b"\x07baggageS\x00\x00\x00\x01"
    table = field + b"1" + field + b"2"
    assert traces_of(b"\x20\x00" + len(table).to_bytes(4, "big") + table) == (("baggage", b"1"),)


@pytest.mark.parametrize("properties", [b"", b"\x20", b"\x10\x00\x02"])
def test_properties_without_headers_have_none(properties: bytes) -> None:
    assert traces_of(properties) == ()


def test_properties_that_are_cut_or_changed_anywhere_are_survived() -> None:
    whole = encode_properties({"content_type": "t", "headers": {"n": 5, "traceparent": PARENT, "baggage": "x"}})
    assert len(traces_of(whole)) == 2
    for at in range(len(whole)):
        assert len(traces_of(whole[:at])) == 0, "the table says how long it is"
        for byte in (0, 0x53, 0x7F, 0xFF):
            traces_of(whole[:at] + bytes([byte]) + whole[at + 1 :])
