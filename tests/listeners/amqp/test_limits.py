"""Limits on channels, bindings, consumers and handshakes: attempts beyond them are refused and use no memory."""

import contextlib
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import msgspec
import pytest
from pamqp import commands

from headrace.listeners.amqp import connection as listener_connection
from headrace.listeners.amqp import transport as listener_link
from headrace.wire.amqp.methods import frame
from headrace.wire.amqp.protocol import PROTOCOL_HEADER
from tests.listeners.amqp.raw import Raw, raw_frame
from tests.listeners.amqp.running import Running, Traced, eventually

CHANNELS_MAX = 2047
BINDINGS_MAX = 5
CONSUMERS_MAX = 4
KEPT_BYTES_MAX = 300_000  # allocated memory that may remain after hundreds of refused attempts


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    broker = Running(tmp_path_factory.mktemp("data"), amqp_bindings_max=BINDINGS_MAX, amqp_consumers_max=CONSUMERS_MAX)
    yield broker
    broker.stop()


@pytest.fixture
def client(running: Running) -> Iterator[Raw]:
    raw = Raw(running.port)
    yield raw
    raw.close()


def test_single_bytes_do_not_extend_the_handshake_timeout(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_connection, "HANDSHAKE_TIMEOUT_S", 0.3)
    with closing(Raw(running.port)) as client, contextlib.suppress(ConnectionError):
        client.send(PROTOCOL_HEADER)
        deadline = time.monotonic() + 30
        start_ok = frame(0, commands.Connection.StartOk, mechanism="PLAIN", response=b"x" * 4000, locale="en_US")
        for byte in start_ok:  # more bytes than fit into the timeout
            client.send(bytes([byte]))
            time.sleep(0.01)
            assert time.monotonic() < deadline, "the handshake did not time out"
    wait_until_no_connection_is_left(running)


def test_silent_connections_from_one_address_lock_no_client_out(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients from other addresses and clients that log in from the same one can connect; existing connections stay."""
    monkeypatch.setattr(listener_connection, "HANDSHAKE_TIMEOUT_S", 300.0)
    known = [running.connect() for _ in range(5)]
    config = msgspec.structs.replace(running.listener.registry.config, connections_max=len(known) + 4)
    monkeypatch.setattr(running.listener.registry, "config", config)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(closing(Raw(running.port))) for _ in range(10)]
        assert silent[0].is_closed()
        running.connect().close()
        monkeypatch.setattr(listener_link, "source_of", lambda host: "198.51.100.1")
        running.connect().close()
    assert all(connection.is_open and connection.channel() for connection in known)
    for connection in known:
        connection.close()
    wait_until_no_connection_is_left(running)


def wait_until_no_connection_is_left(running: Running) -> None:
    eventually(lambda: running.call(lambda: len(running.listener.connections)) == 0)


def test_a_name_with_a_nul_character_is_406(client: Raw) -> None:
    client.open().channel().send(raw_frame(1, 1, b"\x00\x32\x00\x0a\0\0\x03a\0b\0\0\0\0\0"))
    assert client.expect(commands.Channel.Close).reply_code == 406


def test_the_2048th_channel_is_530_and_allocates_nothing(running: Running, client: Raw) -> None:
    client.open(channel_max=CHANNELS_MAX)
    for number in range(1, CHANNELS_MAX + 1):
        client.method(number, commands.Channel.Open)
    for _ in range(CHANNELS_MAX):
        client.expect(commands.Channel.OpenOk)
    more = b"".join(frame(number, commands.Channel.Open) for number in range(CHANNELS_MAX + 1, 60_000))
    with Traced() as memory:
        client.send(more)
        assert client.expect(commands.Connection.Close).reply_code == 530
        client.close()
        wait_until_no_connection_is_left(running)
    assert memory.kept_bytes < KEPT_BYTES_MAX
    assert memory.peak_bytes < 4 << 20


def test_a_binding_over_the_limit_is_506_and_allocates_nothing(running: Running) -> None:
    with closing(Raw(running.port)) as first:
        first.open().channel().method(1, commands.Queue.Declare, queue="bound")
        first.expect(commands.Queue.DeclareOk)
        for number in range(BINDINGS_MAX):
            first.method(1, commands.Queue.Bind, queue="bound", exchange="amq.topic", routing_key=f"k{number}")
            first.expect(commands.Queue.BindOk)
        first.method(1, commands.Queue.Bind, queue="bound", exchange="amq.topic", routing_key="k0")
        first.expect(commands.Queue.BindOk)  # the binding exists already, so it does not count
    with Traced() as memory:
        for attempt in range(300):
            with closing(Raw(running.port)) as client:
                client.open().channel()
                client.method(1, commands.Queue.Bind, queue="bound", exchange="amq.topic", routing_key=f"new{attempt}")
                assert client.expect(commands.Connection.Close).reply_code == 506
        wait_until_no_connection_is_left(running)
    assert memory.kept_bytes < KEPT_BYTES_MAX
    assert running.call(lambda: running.server.broker.vhosts.get("/").routing.bindings_count) == BINDINGS_MAX


def test_a_consumer_over_the_limit_is_506_until_another_is_cancelled(running: Running, client: Raw) -> None:
    client.open().channel().method(1, commands.Queue.Declare, queue="consumed")
    client.expect(commands.Queue.DeclareOk)
    client.channel(2)
    for number in range(CONSUMERS_MAX):  # over two channels: the limit is per broker
        client.method(1 + number % 2, commands.Basic.Consume, queue="consumed", consumer_tag=f"c{number}")
        client.expect(commands.Basic.ConsumeOk)
    for attempt in range(300):
        with closing(Raw(running.port)) as other:
            other.open().channel().method(1, commands.Basic.Consume, queue="consumed", consumer_tag=f"x{attempt}")
            assert other.expect(commands.Connection.Close).reply_code == 506
    assert running.call(lambda: len(running.queue("consumed").consumers)) == CONSUMERS_MAX
    client.method(1, commands.Basic.Cancel, consumer_tag="c0")
    client.expect(commands.Basic.CancelOk)
    client.method(1, commands.Basic.Consume, queue="consumed", consumer_tag="again")
    client.expect(commands.Basic.ConsumeOk)
    client.method(2, commands.Channel.Close, reply_code=200, reply_text="", class_id=0, method_id=0)
    client.expect(commands.Channel.CloseOk)
    assert running.call(lambda: running.listener.context.consumers_count) == CONSUMERS_MAX - 2
    client.method(1, commands.Queue.Delete, queue="consumed")
    eventually(lambda: running.call(lambda: running.listener.context.consumers_count) == 0)


def test_without_heartbeats_tcp_keepalive_is_on(running: Running, client: Raw) -> None:
    client.open(heartbeat=0)
    found = running.link_of(client.socket)
    assert running.call(lambda: found.transport._socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)) == 1
