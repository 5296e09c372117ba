"""RequestPipeline: responses leave in request order. One connection without a socket, and handlers of the test."""

import asyncio
import contextlib
import gc
import struct
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.listeners.kafka.connection import Connection
from headrace.listeners.kafka.dispatch import HANDLERS
from headrace.listeners.kafka.request_pipeline import Request
from headrace.log.disk.disk import RealDisk
from headrace.log.read.file_range import FileRange
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.world import World

pytestmark = pytest.mark.asyncio(loop_scope="module")
ANSWER_BYTES_AHEAD = 1 << 20


class Wire:
    """A transport that records the written bytes."""

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.is_paused = False
        self.aborts = self.closes = 0

    def get_extra_info(self, name: str) -> Any:
        return ("127.0.0.1", 1) if name in ("peername", "sockname") else None

    def write(self, data: bytes) -> None:
        self.written.append(bytes(data))

    def writelines(self, pieces: list[bytes]) -> None:
        self.written.append(b"".join(pieces))

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def abort(self) -> None:
        self.aborts += 1

    def close(self) -> None:
        self.closes += 1

    def get_write_buffer_size(self) -> int:
        return 0


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Produce requests that were started; the test answers them."""
    requests: list[Request] = []
    monkeypatch.setitem(HANDLERS, Api.PRODUCE, lambda _, request: requests.append(request))
    return requests


@contextlib.contextmanager
def connected(world: World, wire: Any = None) -> Iterator[tuple[Connection, Wire]]:
    connection, wire = world.listener.new_connection(), wire or Wire()
    connection.connection_made(wire)
    try:
        yield connection, wire
    finally:
        connection.connection_lost(None)


def request(number: int, *, body: bytes = b"", client: bytes | None = b"me", key: int = 0, version: int = 8) -> bytes:
    named = struct.pack(">h", -1) if client is None else struct.pack(">h", len(client)) + client
    data = struct.pack(">hhi", key, version, number) + named + body
    return struct.pack(">i", len(data)) + data


def arrive(connection: Connection, data: bytes) -> None:
    while data:
        room = connection.get_buffer(-1)
        count = min(len(room), len(data))
        room[:count] = data[:count]
        connection.buffer_updated(count)
        data = data[count:]


async def turn() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_responses_are_sent_in_request_order_and_together(world: World, begun: list[Request]) -> None:
    with connected(world) as (connection, wire):
        arrive(connection, b"".join(map(request, range(4))))
        assert [one.correlation_id for one in begun] == [0, 1, 2, 3]
        begun[2].answer([b"c"])
        begun[1].answer([b"b1", b"b2"])
        await turn()
        assert wire.written == [], "the first request is not answered"
        begun[0].answer((b"a",))
        await turn()
        assert wire.written == [b"ab1b2c"]
        begun[3].answer(())
        await turn()
        assert wire.written == [b"ab1b2c"], "acks=0 has no response"
        assert (len(connection._waiting), connection._waiting_bytes, connection._answer_bytes) == (0, 0, 0)
        with pytest.raises(AssertionError, match="once"):
            begun[3].answer([b"d"])


async def test_requests_before_a_malformed_one_are_started(world: World, begun: list[Request]) -> None:
    """In one read; requests after it are not, and the connection closes."""
    no_api = request(1, key=99)
    for bad in (no_api, request(1, version=77), struct.pack(">i", 3) + b"\0\0\0", request(1, client=b"\xff\xfe")):
        begun.clear()
        with connected(world) as (connection, wire):
            arrive(connection, request(0) + bad + request(2))
            assert [one.correlation_id for one in begun] == [0]
            assert wire.aborts == 1
            arrive(connection, request(3))
            assert len(begun) == 1, "no more requests are started"


async def test_nothing_is_started_of_a_read_with_an_invalid_size(world: World, begun: list[Request]) -> None:
    with connected(world) as (connection, wire):
        arrive(connection, request(0) + struct.pack(">i", -1))
        assert (begun, wire.aborts) == ([], 1)


async def test_every_request_has_its_client_id(world: World, begun: list[Request]) -> None:
    names = [b"me", b"me", b"be", b"be-me", None, b"be-me", b"", "käfer".encode(), "käfer".encode(), b"me"]
    with connected(world) as (connection, _):
        for name in names:
            arrive(connection, request(0, client=name, body=b"xyz"))
            assert connection.client_id == (name or b"").decode()
    assert [one.client_id.encode() for one in begun] == [name or b"" for name in names]
    assert all(bytes(one.body[one.position :]) == b"xyz" for one in begun)


async def test_a_flexible_header_is_read_with_its_tags(world: World, begun: list[Request]) -> None:
    with connected(world) as (connection, wire):
        for tags in (b"\0", b"\1\5\3abc", b"\2\0\0\x81\1\1z"):
            arrive(connection, request(0, version=9, body=tags + b"xyz"))
            assert bytes(begun[-1].body[begun[-1].position :]) == b"xyz"
        arrive(connection, request(0, version=9, body=b"\1\0\5abc"))
        assert (len(begun), wire.aborts) == (3, 1)


async def test_requests_wait_while_responses_are_not_written(world: World, begun: list[Request]) -> None:
    """The requests of one read start when there is room, and their bytes count from then on."""
    with connected(world) as (connection, wire):
        arrive(connection, request(0))
        connection.pause_writing()
        assert wire.is_paused
        arrive(connection, request(1) + request(2))
        assert len(begun) == 1
        connection.resume_writing()
        assert [one.correlation_id for one in begun] == [0, 1, 2]
        assert not wire.is_paused
        begun[0].answer([bytes(ANSWER_BYTES_AHEAD)])
        arrive(connection, request(3))
        assert (len(begun), wire.is_paused) == (3, True)
        await turn()
        assert (len(begun), wire.is_paused) == (4, False)


async def test_file_ranges_do_not_count_as_memory(world: World, begun: list[Request], tmp_path: Path) -> None:
    """Connections with much in memory are closed when memory is short; closing one with file ranges would free
    nothing."""
    (tmp_path / "segment").write_bytes(bytes(2 * ANSWER_BYTES_AHEAD))
    with connected(world) as (connection, wire), (tmp_path / "segment").open("rb") as segment:
        arrive(connection, request(0) + request(1))
        part = FileRange(RealDisk(), segment.fileno(), 0, 2 * ANSWER_BYTES_AHEAD, 1, lambda: None)
        begun[1].answer([b"head", part])
        assert connection.buffered_bytes == 4
        arrive(connection, request(2))
        assert (len(begun), wire.is_paused) == (2, True), "enough is ready already"


async def test_at_most_128_requests_of_a_connection_are_in_progress(world: World, begun: list[Request]) -> None:
    with connected(world) as (connection, wire):
        arrive(connection, b"".join(map(request, range(300))))
        assert (len(begun), wire.is_paused) == (128, True)
        for one in begun[:10]:
            one.answer([b"x"])
        await turn()
        assert len(begun) == 138
        while len(begun) < 300 or connection._waiting:
            for one in begun:
                if not one.answered:
                    one.answer([b"x"])
            await turn()
        assert [one.correlation_id for one in begun] == list(range(300))
        assert not wire.is_paused


async def test_requests_not_started_before_a_disconnect_never_start(world: World, begun: list[Request]) -> None:
    heavy = world.listener.pipelines.heavy
    with connected(world) as (connection, wire):
        arrive(connection, b"".join(request(n, body=bytes(1000)) for n in range(200)))
        assert world.listener.pipelines.heavy == heavy + 1
        begun[0].answer([b"ready, but the client is gone"])
    assert world.listener.pipelines.heavy == heavy
    begun[1].answer([b"too late"])
    await turn()
    assert (len(begun), wire.written, connection._waiting_bytes) == (128, [], 0)


async def test_a_client_may_disconnect_while_its_responses_are_written(world: World, begun: list[Request]) -> None:
    class Breaking(Wire):
        def write(self, data: bytes) -> None:
            super().write(data)
            connection.connection_lost(BrokenPipeError())

    heavy = world.listener.pipelines.heavy
    with connected(world, Breaking()) as (connection, wire):
        arrive(connection, b"".join(request(n, body=bytes(1000)) for n in range(200)))
        begun[0].answer([b"x"])
        await turn()
        assert wire.written == [b"x"]
        assert (len(begun), world.listener.pipelines.heavy) == (128, heavy)


async def test_a_bug_in_one_connection_does_not_delay_the_responses_of_others(
    world: World, begun: list[Request]
) -> None:
    class Broken(Wire):
        def write(self, data: bytes) -> None:
            raise RuntimeError("a bug")

    loop = asyncio.get_running_loop()
    seen: list[BaseException] = []
    loop.set_exception_handler(lambda _, context: seen.append(context["exception"]))
    try:
        with connected(world, Broken()) as (first, _), connected(world) as (second, wire):
            arrive(first, request(0))
            arrive(second, request(0))
            for one in begun:
                one.answer([b"x"])
            await turn()
            assert wire.written == [b"x"]
            assert [str(error) for error in seen] == ["a bug"]
    finally:
        loop.set_exception_handler(None)


async def test_small_reads_are_reported_to_the_flow_too(
    world: World, begun: list[Request], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[int] = []
    monkeypatch.setattr(world.context.flow, "received", lambda _, size: told.append(size))
    data = request(0, body=bytes(1000))
    with connected(world) as (one, _), connected(world) as (other, _):
        for _ in range(100):
            arrive(one, data)
            arrive(other, data)
        before = sum(told)
        assert 200 * len(data) - (64 << 10) < before <= 200 * len(data) + (64 << 10)
        assert len(told) < 10
        arrive(one, data[:500])
        assert sum(told) > before, "an incomplete request is reported at once"


async def test_a_closed_connection_is_garbage_collected(world: World, begun: list[Request]) -> None:
    with connected(world) as (connection, _):
        arrive(connection, request(0) + request(1)[:7])
        begun[0].answer([b"x"])
        await turn()
    gone = weakref.ref(connection)
    del connection
    begun.clear()
    gc.collect()
    assert gone() is None


async def test_only_the_handler_holds_the_buffer_of_a_request(world: World, begun: list[Request]) -> None:
    with connected(world) as (connection, _):
        arrive(connection, request(0, body=b"x"))
        begun[0].buffer.append(1)  # BufferError if a view still existed
