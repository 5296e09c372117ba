"""Large responses are sent from the page cache: complete and in order, to slow clients and to those that disconnect."""

import asyncio
import errno
import gc
import os
import random
import socket
import stat
import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.listeners.kafka.sendfile import FileSending
from headrace.log.disk.pread import is_cached
from headrace.log.read.file_range import FileRange
from headrace.record import codec
from headrace.wire.kafka.apis import Api
from headrace.wire.kafka.schema import request_entity
from tests.listeners.kafka.world import SECONDS, World, make, world_at
from tests.wire.kafka.test_schema_codec import written

pytestmark = pytest.mark.asyncio(loop_scope="module")
BATCH = 40
BATCHES = 60


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("broker")
    probe = folder / "probe"
    probe.write_bytes(b"x" * 4096)
    with probe.open("rb") as file:
        if not is_cached(file.fileno(), 0, 4096):
            pytest.skip("this system does not tell what the page cache holds (Linux from 6.5 on does)")
    async with world_at(folder / "data") as opened:
        await fill(opened)
        yield opened


async def fill(world: World) -> None:
    await world.topic("large")
    client = await world.client()
    chosen = random.Random(5)
    for _ in range(BATCHES):
        values = [(None, chosen.randbytes(5000), (), 1000) for _ in range(BATCH)]
        assert (await client.produce("large", codec.build(values))).error_code == 0


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of ranges that were sent from their files."""
    sizes: list[int] = []
    really = os.sendfile

    def sendfile(out: int, file: int, position: int, size: int) -> int:
        sizes.append(size)
        return really(out, file, position, size)

    monkeypatch.setattr(os, "sendfile", sendfile)
    return sizes


def fetch_request(offset: int, correlation_id: int) -> bytes:
    wanted = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": 1 << 20}
    fields: dict[str, Any] = {"max_wait": 0, "min_bytes": 1, "max_bytes": 1 << 24, "session_epoch": -1}
    topics = [{"topic": "large", "partitions": [wanted]}]
    body = written(make(request_entity(Api.FETCH, 12), {"topics": topics, **fields}))
    header = struct.pack(">hhih", Api.FETCH, 12, correlation_id, 4) + b"test\0"
    return struct.pack(">i", len(header) + len(body)) + header + body


class Slow:
    """A client with a small receive window that reads on demand."""

    def __init__(self, port: int) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self._socket.connect(("127.0.0.1", port))
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._socket, data)

    async def ask(self, *offsets: int) -> None:
        for number, offset in enumerate(offsets):
            await self.send(fetch_request(offset, number))

    async def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            async with asyncio.timeout(SECONDS):
                more = await self._loop.sock_recv(self._socket, min(size - len(data), 100_000))
            if not more:
                raise EOFError(f"{len(data)} of {size} bytes")
            data += more
        return data

    async def answer(self) -> tuple[int, bytes]:
        """(correlation id, whole response)."""
        [size] = struct.unpack(">i", await self._exactly(4))
        data = await self._exactly(size)
        return struct.unpack_from(">i", data)[0], data

    def leave(self) -> None:
        self._socket.close()

    def ask_no_more(self) -> None:
        self._socket.shutdown(socket.SHUT_WR)


@pytest_asyncio.fixture(loop_scope="module")
async def client(world: World) -> AsyncIterator[Slow]:
    slow = Slow(world.listener.port)
    yield slow
    slow.leave()


def expected(world: World) -> dict[int, bytes]:
    """The records that a client gets by offset, except at the start and the end of the log."""
    log = world.broker.streams.get("large").partitions[0].log
    found, offset = {}, 0
    while offset < log.visible_end:
        chunk = log.read(offset, 1 << 20)
        found[offset], offset = bytes(chunk.data), chunk.next_offset
    # The last batch of a growing log is read into memory: no index has its end.
    return {offset: records for offset, records in found.items() if 0 < offset < max(found)}


def connections(world: World) -> list[FileSending]:
    return [one._files for one in world.listener.connections if one._files is not None and one._files.unsent_bytes]


async def until_stuck(world: World) -> FileSending:
    """Wait until the client's window and the socket are full and bytes are left to send."""
    async with asyncio.timeout(SECONDS):
        while True:
            found = [one for one in connections(world) if one._watched >= 0]
            if found:
                return found[0]
            await asyncio.sleep(0.01)


async def test_a_slow_client_gets_every_byte_in_request_order(world: World, client: Slow, sent: list[int]) -> None:
    answers = expected(world)
    await client.ask(*answers)
    await until_stuck(world)
    for number, records in enumerate(answers.values()):
        correlation_id, data = await client.answer()
        assert correlation_id == number and records in data
    assert len(sent) >= len(answers) and max(sent) > 900_000


async def test_small_responses_wait_for_the_large_ones_before_them(world: World, client: Slow, sent: list[int]) -> None:
    answers = expected(world)
    asked: list[bytes] = []
    for offset in answers:
        asked.append(fetch_request(offset, len(asked)))
        header = struct.pack(">hhih", Api.API_VERSIONS, 0, len(asked), 4) + b"test"
        asked.append(struct.pack(">i", len(header)) + header)
    await client.send(b"".join(asked))
    await until_stuck(world)
    for number, records in enumerate(answers.values()):
        correlation_id, data = await client.answer()
        assert correlation_id == 2 * number and records in data
        correlation_id, data = await client.answer()
        assert correlation_id == 2 * number + 1 and len(data) < 10_000
    assert sent


async def test_a_client_that_disconnects_during_a_response_leaks_nothing(world: World, client: Slow) -> None:
    await client.ask(*expected(world))
    stuck = await until_stuck(world)
    client.leave()
    async with asyncio.timeout(SECONDS):
        while stuck.unsent_bytes:
            await asyncio.sleep(0.01)
    assert stuck._watched == -1
    del stuck
    async with asyncio.timeout(SECONDS):
        while FileRange.made:
            gc.collect()
            await asyncio.sleep(0.01)
    other = await world.client()
    assert (await other.fetch("large", BATCH)).error_code == 0


async def test_a_half_closed_client_still_gets_its_responses(world: World, client: Slow) -> None:
    answers = expected(world)
    await client.ask(*answers)
    await until_stuck(world)
    client.ask_no_more()
    assert next(iter(answers.values())) in (await client.answer())[1]
    with pytest.raises((EOFError, ConnectionError)):  # requests that were not started are dropped
        while True:
            await client.answer()


async def test_a_range_that_left_the_page_cache_is_loaded_off_the_event_loop(
    world: World, client: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = expected(world)
    await client.ask(*answers)
    await until_stuck(world)
    loads: list[int] = []
    really = FileRange.load

    def load(self: FileRange, start: int = 0) -> bytes:
        with pytest.raises(RuntimeError):
            asyncio.get_running_loop()  # on the event loop's thread there is one
        loads.append(start)
        return really(self, start)

    monkeypatch.setattr(FileRange, "load", load)
    monkeypatch.setattr(FileRange, "is_cached", lambda self, start=0: False)
    for number, records in enumerate(answers.values()):
        correlation_id, data = await client.answer()
        assert correlation_id == number and records in data
    assert loads


async def test_a_later_range_that_left_the_page_cache_does_not_block_the_loop(
    world: World, client: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = expected(world)
    await client.ask(*answers)
    stuck = await until_stuck(world)
    async with asyncio.timeout(SECONDS):
        while len(ranges := [piece for piece in stuck._pieces if isinstance(piece, FileRange)]) < 2:
            await asyncio.sleep(0.01)  # on a busy machine, the responses are queued one after the other
    gone = ranges[1].position
    monkeypatch.setattr(FileRange, "is_cached", lambda self, start=0: self.position != gone)
    positions: list[int] = []
    really = os.sendfile

    def sendfile(out: int, file: int, position: int, size: int) -> int:
        positions.append(position)
        return really(out, file, position, size)

    monkeypatch.setattr(os, "sendfile", sendfile)
    for number, records in enumerate(answers.values()):
        correlation_id, data = await client.answer()
        assert correlation_id == number and records in data
    assert positions and gone not in positions


async def test_without_free_descriptors_the_connection_closes_instead_of_hanging(
    world: World, client: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.dup

    def dup(file: int) -> int:
        if stat.S_ISSOCK(os.fstat(file).st_mode):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return really(file)

    answers = expected(world)
    monkeypatch.setattr(os, "dup", dup)
    await client.ask(*answers)
    with pytest.raises((EOFError, ConnectionError)):
        for _ in answers:
            await client.answer()


async def test_a_truncated_file_closes_only_its_own_connection(
    world: World, client: Slow, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = expected(world)
    await client.ask(*answers)
    await until_stuck(world)
    monkeypatch.setattr(os, "sendfile", lambda *_: 0)
    with pytest.raises((EOFError, ConnectionError)):
        for records in answers.values():
            assert records in (await client.answer())[1]
    monkeypatch.undo()
    other = await world.client()
    assert (await other.fetch("large", BATCH)).error_code == 0


async def test_shutdown_sends_responses_that_were_started(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        await fill(world)
        answers = expected(world)
        client = Slow(world.listener.port)
        await client.ask(*answers)
        await until_stuck(world)
        reading = asyncio.create_task(client.answer())
        await world.listener.close()
        assert next(iter(answers.values())) in (await reading)[1]
        client.leave()
