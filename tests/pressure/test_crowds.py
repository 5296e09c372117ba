"""Many of something: connections that come to nothing, queues beyond the file limit, one message for a thousand."""

import asyncio
import os
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pamqp import commands

from headrace.config import Address, Config
from headrace.server import Server
from tests.pressure.raw import RawClient, method, publish
from tests.pressure.running import MB, broker, eventually

HALF_OPEN = 1000
PAUSE_EVERY = 50  # to see progress, instead of waiting for all of them at once


@pytest.fixture
def fast_folder(tmp_path: Path) -> Iterator[Path]:
    """In memory where that is possible: declaring a thousand durable queues is thousands of syncs, not the point."""
    memory = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(dir=memory if os.access(memory, os.W_OK) else tmp_path, prefix="headrace-test-"))
    yield folder
    shutil.rmtree(folder)


async def test_half_open_connections_leave_nothing_behind(tmp_path: Path) -> None:
    """Some say nothing, some half a greeting, some half a request; then all of them are gone."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # as the server does when it is a process of its own
    config = Config(
        data_dir=str(tmp_path), amqp=Address("127.0.0.1", 0), kafka=Address("127.0.0.1", 0),
        http=Address("127.0.0.1", 0),
    )  # fmt: skip
    server = await Server.start(config)
    try:
        ports = {name: int(listener.addresses[0].rpartition(":")[2]) for name, listener in server.listeners.items()}
        await _open_and_leave(server, ports, 6)  # what is made once is made now
        before = (_open_files(), len(asyncio.all_tasks()))
        await _open_and_leave(server, ports, HALF_OPEN)
        async with asyncio.timeout(60):
            while _open_files() > before[0] or len(asyncio.all_tasks()) > before[1]:
                await asyncio.sleep(0.01)
        assert [server.broker.stats.listener(name).connections for name in ("amqp", "kafka")] == [0, 0]
    finally:
        await server.close()


async def _open_and_leave(server: Server, ports: dict[str, int], count: int) -> None:
    loop = asyncio.get_running_loop()
    beginnings = [
        ("amqp", b""), ("amqp", b"AMQP\x00"), ("amqp", b"AMQP\x00\x00\x09\x01"), ("kafka", b"\0\0"),
        ("kafka", b"\0\0\1\0half"), ("http", b"GET /hea"),
    ]  # fmt: skip
    clients = []
    for number in range(count):
        listener, beginning = beginnings[number % len(beginnings)]
        client = socket.socket()
        client.setblocking(False)
        await loop.sock_connect(client, ("127.0.0.1", ports[listener]))
        await loop.sock_sendall(client, beginning)
        clients.append(client)
    accepted = server.broker.stats.listener("amqp")
    while accepted.connections < sum(beginnings[n % 6][0] == "amqp" for n in range(count)):
        await asyncio.sleep(0.01)
    for client in clients:
        client.close()
    while accepted.connections or server.broker.stats.listener("kafka").connections:
        await asyncio.sleep(0.01)


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize(("queues", "open_files"), [(5000, 200)])
def test_queues_beyond_the_file_limit_all_take_and_give_messages(
    fast_folder: Path, queues: int, open_files: int
) -> None:
    names = [f"queue-{number}" for number in range(queues)]
    with broker(fast_folder, "--open-files-max", str(open_files)) as running, RawClient(running.amqp) as client:
        for number, name in enumerate(names):
            client.send(method(1, commands.Queue.Declare(queue=name, durable=True, nowait=True)))
            if number % PAUSE_EVERY == 0:
                client.declare(name)
        for turn in range(3):
            client.send(b"".join(publish(name, b"%d of " % turn + name.encode()) for name in names))
            assert client.depth(names[-1]) == turn + 1
        # Files of segments, and what a broker has open anyway.
        assert running.open_files < open_files + 60
        for name in names:
            client.send(method(1, commands.Basic.Get(queue=name, no_ack=True)))
        for _ in names:
            client.expect(commands.Basic.GetOk)
        assert {client.depth(name) for name in names} == {2}
        assert running.rss_bytes < 300 * MB


def test_one_message_reaches_a_thousand_queues_and_is_confirmed_once(fast_folder: Path) -> None:
    queues = 1000
    with broker(fast_folder) as running, RawClient(running.amqp) as client:
        client.call(commands.Exchange.Declare(exchange="all", exchange_type="fanout"), commands.Exchange.DeclareOk)
        for number in range(queues):
            client.send(method(1, commands.Queue.Declare(queue=f"q{number}", durable=True, nowait=True)))
            client.send(method(1, commands.Queue.Bind(queue=f"q{number}", exchange="all", nowait=True)))
            if number % PAUSE_EVERY == 0:
                client.depth(f"q{number}")
        client.depth("q0")
        client.call(commands.Confirm.Select(), commands.Confirm.SelectOk)
        before = running.rss_bytes
        for number in range(1, 11):
            message = publish("", b"f" * 1000)
            body = message[message.index(b"\xce") + 1 :]
            client.send(method(1, commands.Basic.Publish(exchange="all", routing_key="")) + body)
            assert client.expect(commands.Basic.Ack).delivery_tag == number
        assert {client.depth(f"q{number}") for number in range(queues)} == {10}
        assert running.rss_bytes - before < 100 * MB
        eventually(lambda: running.metric("headrace_log_pending_bytes") == 0, "everything is stored")
