"""The connection limit, and the connections reserved for standbys."""

from contextlib import ExitStack, closing
from http.client import HTTPConnection

import pytest

from headrace import Client
from headrace.errors import Overloaded
from headrace.listeners.http.server import bounded_protocol
from tests.listeners.amqp.running import eventually
from tests.listeners.http.live import Live, StartLive, read_all, status_of

GET = b"GET /health HTTP/1.1\r\nHost: x\r\n"


def in_reserve(server: Live) -> int:
    """The number of connections in the places that are reserved for standbys."""
    connection = next(iter(server.listener._state.connections))
    assert isinstance(connection, bounded_protocol.BoundedHttp)
    return len(connection.limits.reserve)


@pytest.mark.usefixtures("no_hurry")
def test_connections_over_the_limit_get_an_error_response(own: StartLive) -> None:
    server = own(connections_max=3)
    waiting = [server.connect() for _ in range(3)]

    async def count() -> int:
        return len(server.listener._state.connections)

    while server.call(count()) < 3:
        pass
    with server.connect() as sock:
        sock.sendall(GET + b"\r\n")
        answer = read_all(sock)
    assert status_of(answer) == 503 and b"too_many_connections" in answer
    with Client(server.base, retry_s=0) as client, pytest.raises(Overloaded, match="too many connections"):
        client.get("/health")
    for sock in waiting:
        sock.close()


def asks_as_standby(connection: HTTPConnection, *, keeps: bool = False) -> int:
    headers = {"content-type": "application/json"} | ({} if keeps else {"connection": "close"})
    connection.request("PUT", "/standby/nobody", b'{"position":1}', headers)
    answer = connection.getresponse()
    answer.read()
    return answer.status


@pytest.mark.usefixtures("no_hurry")
def test_a_standby_can_connect_when_the_limit_is_reached(own: StartLive) -> None:
    """All connections may be publishers that wait for a standby. Others cannot take the reserved places."""
    server = own(connections_max=3)

    async def counts() -> tuple[int, int]:
        return len(server.listener._state.connections), in_reserve(server)

    with ExitStack() as stack:
        waiting = [stack.enter_context(server.connect()) for _ in range(3)]
        eventually(lambda: server.call(counts()) == (3, 0), "they are in")
        for _ in range(bounded_protocol.RESERVED + 1):
            with server.connect() as sock:
                sock.sendall(GET + b"\r\n")
                assert status_of(read_all(sock)) == 503
        eventually(lambda: server.call(counts()) == (3, 0), "they are gone")
        assert asks_as_standby(HTTPConnection("127.0.0.1", server.port, timeout=60)) == 404
        eventually(lambda: server.call(counts()) == (3, 0), "it is gone")
        assert len(waiting) == 3


@pytest.mark.usefixtures("no_hurry")
def test_silent_connections_do_not_block_the_places_of_standbys(own: StartLive) -> None:
    """Silent connections used to occupy the reserved places for ten seconds each."""
    server = own(connections_max=1)

    async def count() -> int:
        return in_reserve(server)

    with ExitStack() as stack:
        stack.enter_context(server.connect())
        silent = []
        for number in range(bounded_protocol.RESERVED):
            eventually(lambda: server.call(count()) == number, "one after the other")  # noqa: B023
            silent.append(stack.enter_context(server.connect()))
        eventually(lambda: server.call(count()) == bounded_protocol.RESERVED, "they have its places")
        standby = stack.enter_context(closing(HTTPConnection("127.0.0.1", server.port, timeout=60)))
        assert asks_as_standby(standby, keeps=True) == 404
        assert b"too_many_connections" in read_all(silent[0]), "the first of them made room"
        for _ in silent:
            stack.enter_context(server.connect())
        assert b"too_many_connections" in read_all(silent[-1])
        assert asks_as_standby(standby, keeps=True) == 404, "it stays although others connect"


@pytest.mark.usefixtures("no_hurry")
def test_one_address_cannot_take_all_connections(own: StartLive, monkeypatch: pytest.MonkeyPatch) -> None:
    server, where = own(connections_max=4), ["203.0.113.7"]
    monkeypatch.setattr(bounded_protocol, "is_loopback", lambda host: where[0] == "here")
    monkeypatch.setattr(bounded_protocol, "source_of", lambda host: where[0])

    async def count() -> int:
        return len(server.listener._state.connections)

    with ExitStack() as stack:
        for number in range(1, 4):
            stack.enter_context(server.connect())
            eventually(lambda: server.call(count()) == number, "it is in")  # noqa: B023
        assert b"too_many_connections" in server.raw(GET + b"\r\n")
        eventually(lambda: server.call(count()) == 3, "it is gone")
        for where[0] in ("198.51.100.1", "here"):
            assert status_of(server.raw(GET + b"Connection: close\r\n\r\n")) == 200
            eventually(lambda: server.call(count()) == 3, "it is gone")
        where[0] = "203.0.113.7"
    eventually(lambda: server.call(count()) == 0, "all are gone")
    assert status_of(server.raw(GET + b"Connection: close\r\n\r\n")) == 200
