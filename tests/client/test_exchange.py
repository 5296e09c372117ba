"""Bytes of an HTTP exchange: what goes out, and what may come back in any pieces."""

import pytest

from headrace.client.exchange import Endpoint, Response, ResponseReader, parse_url, path_of, request_bytes
from headrace.client.retry import DELAY_S_MAX, Attempts, Fate, backoff_s, may_repeat, retry_after_s
from headrace.errors import BrokerUnreachable, InvalidInput

HERE = Endpoint("localhost", 15672)
ANSWERS = [
    b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Type: application/json\r\n\r\nhello",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello",
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_does_not_depend_on_how_its_bytes_arrive(answer: bytes) -> None:
    for cut in range(1, len(answer)):
        reader = ResponseReader()
        reader.feed(answer[:cut])
        assert reader.response is None
        reader.feed(answer[cut:])
        assert reader.response is not None
        assert (reader.response.status, reader.response.body) == (200, b"hello")
        assert reader.keep_alive


def test_an_answer_that_closes_is_known_to_close() -> None:
    reader = ResponseReader()
    reader.feed(b"HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
    assert reader.response is not None
    assert not reader.keep_alive


def test_a_server_that_does_not_speak_http_is_not_a_broker() -> None:
    with pytest.raises(BrokerUnreachable, match="does not speak HTTP: use the port of the HTTP listener"):
        ResponseReader().feed(b"AMQP\x00\x00\x09\x01 hello there\r\n\r\n")


def test_an_error_response_to_a_stream_is_read_completely() -> None:
    pieces: list[bytes] = []
    reader = ResponseReader(pieces.append)
    reader.feed(b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}")
    assert reader.response == Response(404, {"content-length": "2"}, b"{}")
    assert not pieces


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("localhost:1", Endpoint("localhost", 1)),
        ("http://broker", Endpoint("broker", 15672)),
        ("https://broker/base/", Endpoint("broker", 443, tls=True, base="/base")),
        ("http://[::1]:8", Endpoint("::1", 8)),
        ("http://u:p%40@h:1", Endpoint("h", 1, authorization="Basic dTpwQA==")),
    ],
)
def test_a_url_names_a_broker(url: str, endpoint: Endpoint) -> None:
    assert parse_url(url) == endpoint


@pytest.mark.parametrize("url", ["", "amqp://x", "http://", "http://h:99999", "http://[x", "http://a..b", "x" * 64])
def test_an_invalid_url_is_refused_with_a_one_line_error(url: str) -> None:
    with pytest.raises(InvalidInput, match="not the address of a broker"):
        parse_url(url)


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("orders", "/topics/orders"),
        ("../x", "/topics/..%2Fx"),
        ("..", "/topics/%2E%2E"),
        ("a b/ü", "/topics/a%20b%2F%C3%BC"),
        (b"..", "/topics/%2E%2E"),
        (b"\xff/", "/topics/%FF%2F"),
    ],
)
def test_a_name_is_escaped_to_a_single_path_segment(name: str | bytes, path: str) -> None:
    assert path_of("topics", name) == path


def test_an_empty_name_is_refused() -> None:
    """An unset variable in a script: the path would be that of a list, and the answer no answer to the question."""
    with pytest.raises(InvalidInput, match="a name is empty"):
        path_of("queues", "/", "", "contents")


def test_a_request_is_encoded_exactly() -> None:
    data = request_bytes(HERE, "POST", "/t", query={"a": 1, "b": None, "c": "x y"}, headers={"A": "b"}, body=b"hi")
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert lines[0] == "POST /t?a=1&c=x+y HTTP/1.1"
    assert {"Host: localhost:15672", "A: b", "Content-Length: 2"} <= set(lines)
    assert body == b"hi"


def test_a_header_cannot_smuggle_a_second_one() -> None:
    with pytest.raises(InvalidInput):
        request_bytes(HERE, "GET", "/", headers={"Last-Event-ID": "0:1\r\nEvil: yes"})


def test_only_requests_that_failed_safely_or_are_idempotent_are_retried() -> None:
    assert may_repeat("POST", Fate.NOT_SENT)
    assert not may_repeat("POST", Fate.LOST)
    assert not may_repeat("DELETE", Fate.LOST)
    assert may_repeat("GET", Fate.LOST)


def test_a_refused_request_is_retried_only_with_a_retry_after_header() -> None:
    assert retry_after_s(Response(503, {"retry-after": "5"}, b"")) == 5.0
    assert retry_after_s(Response(429, {"retry-after": "0.5"}, b"")) == 0.5
    assert retry_after_s(Response(503, {}, b"")) is None  # a failed disk: unknown what was stored
    assert retry_after_s(Response(429, {"retry-after": "Wed, 21 Oct"}, b"")) is None
    assert retry_after_s(Response(200, {"retry-after": "5"}, b"")) is None


def test_a_long_poll_with_a_lost_connection_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long to try is counted from the first failure: a long poll had used it up before there was any."""
    now = 0.0
    monkeypatch.setattr("headrace.client.retry.time.monotonic", lambda: now)
    attempts = Attempts(parse_url("localhost"), "GET", 10)
    now = 60.0
    assert attempts.delay_s((Fate.LOST, "gone")) is not None
    now = 69.0
    assert attempts.delay_s((Fate.NOT_SENT, "refused")) is not None
    now = 70.1
    with pytest.raises(BrokerUnreachable, match="refused"):
        attempts.delay_s((Fate.NOT_SENT, "refused"))


def test_waiting_grows_and_stays_bounded() -> None:
    waits = [backoff_s(attempt, 1.0) for attempt in range(100)]
    assert waits == sorted(waits)
    assert waits[-1] == DELAY_S_MAX
    assert backoff_s(3, 0.0) == backoff_s(3, 1.0) / 2
