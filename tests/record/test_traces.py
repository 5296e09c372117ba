"""Finding the trace headers of a message in its AMQP properties."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.record.amqp.properties import Value, encode_properties
from headrace.record.amqp.trace_headers import traces_of
from headrace.record.layout import TRACE_HEADERS

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
names = st.sampled_from([*TRACE_HEADERS, "trace", "Traceparent", "tracestat", "x"])
values = st.one_of(st.text(max_size=20), st.integers(0, 99), st.booleans(), st.none(), st.lists(st.text(max_size=3)))


def test_all_trace_headers_are_found_in_the_order_of_the_message() -> None:
    headers: dict[str, Value] = {
        "a": 1,
        "baggage": "k=v",
        "traceparent": PARENT,
        "nested": {"tracestate": "no"},
        "tracestate": "é=1",
    }
    found = traces_of(encode_properties({"content_type": "text/plain", "content_encoding": "x", "headers": headers}))
    assert found == (("baggage", b"k=v"), ("traceparent", PARENT.encode()), ("tracestate", "é=1".encode()))


@given(st.dictionaries(names, values), st.booleans(), st.booleans())
def test_only_text_headers_with_a_trace_header_name_are_found(
    headers: dict[str, Any], typed: bool, encoded: bool
) -> None:
    properties: dict[str, Any] = {"headers": headers, "delivery_mode": 2}
    if typed:
        properties["content_type"] = "t" * 200
    if encoded:
        properties["content_encoding"] = ""
    wanted = [(name, v.encode()) for name, v in headers.items() if name in TRACE_HEADERS and isinstance(v, str)]
    assert traces_of(encode_properties(properties)) == tuple(wanted)


def test_the_first_of_two_headers_with_the_same_name_is_used() -> None:
    field = b"\x07baggageS\x00\x00\x00\x01"
    table = field + b"1" + field + b"2"
    assert traces_of(b"\x20\x00" + len(table).to_bytes(4, "big") + table) == (("baggage", b"1"),)


@pytest.mark.parametrize("properties", [b"", b"\x20", b"\x10\x00\x02"])
def test_properties_without_headers_have_no_trace_headers(properties: bytes) -> None:
    assert traces_of(properties) == ()


def test_truncated_or_changed_properties_raise_no_error() -> None:
    whole = encode_properties({"content_type": "t", "headers": {"n": 5, "traceparent": PARENT, "baggage": "x"}})
    assert len(traces_of(whole)) == 2
    for at in range(len(whole)):
        assert len(traces_of(whole[:at])) == 0, "a truncated table is not read"
        for byte in (0, 0x53, 0x7F, 0xFF):
            traces_of(whole[:at] + bytes([byte]) + whole[at + 1 :])
