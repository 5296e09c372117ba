"""What both clients do when the network or the broker does not do its part."""

import asyncio
import contextlib
import socket
from collections.abc import Callable

import pytest

from headrace.client.async_connection import AsyncConnection
from headrace.client.connection import Connection
from headrace.client.exchange import Response, parse_url
from headrace.errors import (
    BrokerUnreachable,
    Unconfirmed,
)
from tests.client.scripted import CLOSE, ok, scripted

STORED = b'{"messages":[{"partition":0,"offset":7}]}'
CLOSING = "Then: close\r\n"
Request = Callable[..., list[Response]]


def blocking(url: str, *methods: str, retry_s: float = 60.0) -> list[Response]:
    connection = Connection(parse_url(url), retry_s=retry_s, timeout_s=60)
    with contextlib.closing(connection):
        return [connection.request(method, "/x", body=b"body" * (method == "POST")) for method in methods]


def with_asyncio(url: str, *methods: str, retry_s: float = 60.0) -> list[Response]:
    async def run() -> list[Response]:
        connection = AsyncConnection(parse_url(url), retry_s=retry_s, timeout_s=60)
        try:
            return [await connection.request(m, "/x", body=b"body" * (m == "POST")) for m in methods]
        finally:
            await connection.close()

    return asyncio.run(run())


both = pytest.mark.parametrize("request_", [blocking, with_asyncio])


@both
def test_one_connection_serves_many_requests(request_: Request) -> None:
    with scripted(ok(b"1"), ok(b"2"), ok(b"3")) as server:
        answers = request_(server.url, "GET", "POST", "GET")
        assert [answer.body for answer in answers] == [b"1", b"2", b"3"]
        assert server.connections == 1


@both
def test_an_answer_to_head_has_no_body_to_wait_for(request_: Request) -> None:
    headers = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n"
    with scripted(headers, ok(b"2")) as server:
        answers = request_(server.url, "HEAD", "GET")
        assert [answer.body for answer in answers] == [b"", b"2"]
        assert server.connections == 1


@both
def test_a_publish_with_a_lost_reply_raises_an_error_and_is_not_retried(request_: Request) -> None:
    with scripted(CLOSE, ok(b"2")) as server:
        with pytest.raises(Unconfirmed, match="may or may not be stored"):
            request_(server.url, "POST")
        assert len(server.requests) == 1


@both
def test_a_truncated_response_is_a_lost_response(request_: Request) -> None:
    with scripted(ok(b"whole", headers=CLOSING)[:-2], ok(b"2")) as server:
        with pytest.raises(Unconfirmed):
            request_(server.url, "POST")
        assert len(server.requests) == 1


@both
def test_a_read_with_a_lost_response_is_retried(request_: Request) -> None:
    with scripted(CLOSE, CLOSE, ok(b"3")) as server:
        assert [answer.body for answer in request_(server.url, "GET")] == [b"3"]
        assert len(server.requests) == 3


@both
def test_a_connection_closed_while_idle_costs_a_publish_nothing(request_: Request) -> None:
    with scripted(ok(b"1", headers="Connection: close\r\n" + CLOSING), ok(b"2")) as server:
        assert [answer.body for answer in request_(server.url, "GET", "POST")] == [b"1", b"2"]
        assert server.connections == 2


@both
def test_a_request_is_retried_after_the_retry_after_time(request_: Request) -> None:
    later = ok(b"{}", status="503 Service Unavailable", headers="Retry-After: 0\r\n")
    with scripted(later, later, ok(b"3")) as server:
        assert [answer.body for answer in request_(server.url, "POST")] == [b"3"]


@both
def test_a_broker_that_does_not_say_when_is_taken_at_its_word(request_: Request) -> None:
    with scripted(ok(b"{}", status="503 Service Unavailable"), ok(b"2")) as server:
        assert [answer.status for answer in request_(server.url, "POST")] == [503]


@both
def test_an_unreachable_broker_gives_a_one_line_error(request_: Request) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # so that no other process listens there
        port = taken.getsockname()[1]
        with pytest.raises(BrokerUnreachable, match=f"no broker answers at http://127.0.0.1:{port}: .*refused"):
            request_(f"http://127.0.0.1:{port}", "POST", retry_s=0.0)
