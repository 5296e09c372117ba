"""Messages on their way to JSON and back, and answers that say no."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.client.exchange import Response
from headrace.client.positions import EventReader, event_id, resolve
from headrace.client.shapes import (
    Message,
    Published,
    Range,
    message_json,
    message_line,
    parse_draft,
    parse_message,
    parse_published,
    parse_read,
    raise_for,
)
from headrace.errors import (
    AccessRefused,
    AlreadyExists,
    BrokerRefused,
    BrokerUnreachable,
    Conflict,
    HeadraceError,
    InvalidInput,
    NotFound,
    OffsetOutOfRange,
    Overloaded,
    StorageError,
)
from headrace.wire.http.messages import parse_ndjson

data = st.one_of(st.none(), st.binary(max_size=20), st.text(max_size=10).map(lambda text: text.encode()))
headers = st.lists(st.tuples(st.text(max_size=5), data), max_size=3)


@given(key=data, value=data, pairs=headers, partition=st.none() | st.integers(0, 9))
def test_the_broker_decodes_an_encoded_message_line(
    key: bytes | None, value: bytes | None, pairs: list[tuple[str, bytes | None]], partition: int | None
) -> None:
    line = message_line(value, key=key, headers=pairs, partition=partition, timestamp=5)
    (draft,) = parse_ndjson(line, 10)
    assert (draft.key, draft.value, list(draft.headers), draft.partition, draft.timestamp) == (
        key,
        value,
        pairs,
        partition,
        5,
    )


@given(key=data, value=data, pairs=headers)
def test_a_message_survives_json(key: bytes | None, value: bytes | None, pairs: list[tuple[str, bytes | None]]) -> None:
    message = Message(1, 2, 3, key, value, tuple(pairs))
    line = message_json(message)
    assert line.count(b"\n") == 1
    assert parse_message(line) == message
    draft = parse_draft(message_json(message, "orders"))
    assert (draft.key, draft.value, draft.headers, draft.partition, draft.timestamp) == (
        key,
        value,
        tuple(pairs),
        1,
        3,
    )


def test_text_is_sent_as_text_and_only_the_rest_as_base64() -> None:
    assert message_line("hi", key=b"k") == b'{"value":"hi","key":"k"}\n'
    assert message_line(None) == b'{"value":null}\n'
    assert message_line(b"\xff", key=b"k") == b'{"value":"/w==","key":"k","encoding":{"value":"base64"}}\n'
    assert msgspec.json.decode(message_line("x", headers=[("a", "1"), ("a", b"2")]))["headers"] == [
        ["a", "1"],
        ["a", "2"],
    ]


def test_zeros_are_sent_as_base64_because_json_would_make_six_characters_of_each() -> None:
    zeros = bytes(3000)
    assert len(message_line(zeros)) < 1.4 * len(zeros)
    assert b"base64" not in message_line(b"lines\nand\ttabs are text")


@pytest.mark.parametrize(
    ("text", "value"),
    [('{"value": {"a": [1, 2.50]}}', b'{"a": [1, 2.50]}'), ('{"value": 7}', b"7"), ('{"value": null}', None)],
)
def test_json_values_are_published_as_their_text(text: str, value: bytes | None) -> None:
    assert parse_draft(text.encode()).value == value


@pytest.mark.parametrize(
    "text", ["", "7", "{}", '{"value": 1, "encoding": {"value": 3}}', '{"value": "&", "encoding": "base64"}']
)
def test_an_invalid_message_is_refused_with_a_one_line_error(text: str) -> None:
    with pytest.raises(InvalidInput, match="not a JSON message"):
        parse_draft(text.encode())


@pytest.mark.parametrize("name", [b"trace", 7])
def test_a_header_name_that_is_not_text_is_refused_before_sending(name: object) -> None:
    """Header names in bytes were stored as base64 and could not be found by name."""
    for headers in ({name: "x"}, [(name, b"x"), ("other", b"\xff")]):
        with pytest.raises(InvalidInput, match="the name of a header must be str"):
            message_line("v", headers=headers)  # type: ignore[arg-type]


def test_a_value_of_another_type_is_refused_before_it_is_sent() -> None:
    with pytest.raises(InvalidInput, match="must be bytes, str or None, not dict"):
        message_line({"a": 1})  # type: ignore[arg-type]


def answer(status: int, body: object, headers: dict[str, str] | None = None) -> Response:
    return Response(status, {"content-type": "application/problem+json", **(headers or {})}, msgspec.json.encode(body))


@pytest.mark.parametrize(
    ("response", "kind"),
    [
        (answer(401, {"detail": "Login failed"}), AccessRefused),
        (answer(403, {"detail": "no right"}), AccessRefused),
        (answer(404, {"code": "topic_not_found", "detail": "no topic 'x'"}), NotFound),
        (answer(409, {"code": "topic_exists", "detail": "there"}), AlreadyExists),
        (answer(409, {"code": "conflict", "detail": "there"}), Conflict),
        (answer(400, {"code": "invalid_setting", "detail": "no"}), InvalidInput),
        (answer(413, {"code": "message_too_large", "detail": "no"}), InvalidInput),
        (answer(416, {"code": "offset_out_of_range", "offset": 5, "start": 7, "end": 9}), OffsetOutOfRange),
        (answer(429, {"detail": "later"}, {"retry-after": "1"}), Overloaded),
        (answer(503, {"code": "storage_failed", "detail": "disk"}), StorageError),
        (answer(500, {"code": "internal_error", "detail": "bug"}), BrokerRefused),
        (Response(502, {"content-type": "text/html"}, b"<html>"), BrokerRefused),
    ],
)
def test_every_refusal_becomes_the_error_it_means(response: Response, kind: type[HeadraceError]) -> None:
    with pytest.raises(kind) as caught:
        raise_for(response)
    cause = caught.value.__cause__
    assert isinstance(cause, BrokerRefused)
    assert cause.status == response.status


def test_offset_out_of_range_has_the_available_range() -> None:
    with pytest.raises(OffsetOutOfRange) as caught:
        raise_for(answer(416, {"code": "offset_out_of_range", "offset": 5, "start": 7, "end": 9}))
    assert (caught.value.offset, caught.value.start, caught.value.end) == (5, 7, 9)


def test_a_reply_of_another_server_is_not_accepted() -> None:
    with pytest.raises(BrokerUnreachable, match="not a Headrace broker"):
        parse_read(Response(200, {}, b"<html>"))
    with pytest.raises(BrokerUnreachable, match="confirmed 1 messages, but 2 were sent"):
        parse_published(Response(200, {}, b'{"messages":[{"partition":0,"offset":1}]}'), 2)
    assert parse_published(Response(200, {}, b'{"messages":[{"partition":0,"offset":1}]}'), 1) == [Published(0, 1)]


RANGES = [Range(0, 5, 10), Range(1, 0, 0)]


def test_where_to_start_is_resolved_for_every_partition() -> None:
    assert resolve("earliest", RANGES) == {0: 5, 1: 0}
    assert resolve("latest", RANGES) == {0: 10, 1: 0}
    assert resolve(-3, RANGES) == {0: 7, 1: 0}
    assert resolve(-30, RANGES) == {0: 5, 1: 0}
    assert resolve(6, RANGES) == {0: 6, 1: 6}
    assert resolve({0: 8}, RANGES) == {0: 8, 1: 0}
    with pytest.raises(InvalidInput, match="no partition 7"):
        resolve({7: 1}, RANGES)
    with pytest.raises(InvalidInput):
        resolve("middle", RANGES)  # type: ignore[arg-type]


def test_events_do_not_depend_on_how_bytes_arrive() -> None:
    first, second = Message(0, 1, 2, None, b"x"), Message(1, 7, 2, b"k", "ü".encode())
    text = b":\n\nid: 0:2\r\ndata: " + message_json(first) + b"\n"
    text += b"event: message\nid: 0:2,1:8\ndata: " + message_json(second) + b"\n"
    for cut in range(len(text)):
        reader = EventReader()
        assert reader.messages(text[:cut]) + reader.messages(text[cut:]) == [first, second]
        assert not reader.has_notice
    assert event_id({1: 8, 0: 2}) == "0:2,1:8"


def test_a_notice_ends_the_messages_that_are_returned() -> None:
    first, second = Message(0, 1, 2, None, b"x"), Message(0, 9, 2, None, b"y")
    text = b"data: " + message_json(first) + b"\n" + b'event: gap\ndata: {"from": 2, "to": 9}\n\n'
    reader = EventReader()
    assert reader.messages(text + b"data: " + message_json(second) + b"\n") == [first]
    assert reader.has_notice
