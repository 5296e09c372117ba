"""Connections: product, capabilities, secrets and virtual hosts; also some queue arguments."""

import asyncio
import datetime
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pika
import pytest
from pamqp import commands

from tests.listeners.amqp.raw import Raw
from tests.listeners.amqp.running import PATIENCE_S, Running, bodies, depth, eventually


@pytest.fixture
def client(running: Running) -> Iterator[Raw]:
    raw = Raw(running.port)
    yield raw
    raw.close()


@pytest.mark.parametrize(("product", "announced"), [("headrace", "Headrace"), ("rabbitmq", "RabbitMQ")])
def test_the_announced_product_is_configurable_and_the_capabilities_are_fixed(
    tmp_path: Path, product: str, announced: str
) -> None:
    """kombu uses a global prefetch with RabbitMQ below version 4, so that tasks with an ETA do not starve others."""
    broker = Running(tmp_path / "data", amqp_product=product)
    raw = Raw(broker.port)
    try:
        start = raw.start()
        assert start.server_properties["product"] == announced
        assert start.mechanisms == b"PLAIN AMQPLAIN"
        needed = {"publisher_confirms", "basic.nack", "consumer_cancel_notify", "connection.blocked",
                  "exchange_exchange_bindings", "authentication_failure_close"}  # fmt: skip
        assert needed <= {name for name, can in start.server_properties["capabilities"].items() if can}
        if product == "rabbitmq":
            assert int(start.server_properties["version"].split(".")[0]) < 4
    finally:
        raw.close()
        broker.stop()


def test_update_secret_is_accepted_on_an_open_connection(client: Raw) -> None:
    client.open().channel()
    client.method(0, commands.Connection.UpdateSecret, new_secret=b"next", reason="rotation")
    client.expect(commands.Connection.UpdateSecretOk)
    client.channel(2)


def test_virtual_hosts_have_separate_queues_and_an_unknown_one_is_530(running: Running) -> None:
    asyncio.run_coroutine_threadsafe(running.server.broker.vhosts.create("other"), running.loop).result(PATIENCE_S)
    here, there = running.channel(), running.channel(virtual_host="other")
    for channel, body in ((here, b"here"), (there, b"there")):
        channel.queue_declare("same", durable=True)
        channel.basic_publish("", "same", body)
    assert bodies(here, "same") == [b"here"]
    assert bodies(there, "same") == [b"there"]
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError, match="530"):
        running.connect(virtual_host="nowhere")


def test_deleting_a_virtual_host_closes_only_its_connections(running: Running) -> None:
    vhosts = running.server.broker.vhosts
    asyncio.run_coroutine_threadsafe(vhosts.create("brief"), running.loop).result(PATIENCE_S)
    inside, outside = running.connect(virtual_host="brief"), running.connect()
    inside.channel().queue_declare("q", durable=True)
    asyncio.run_coroutine_threadsafe(vhosts.delete("brief"), running.loop).result(PATIENCE_S)
    with pytest.raises(pika.exceptions.ConnectionClosedByBroker) as closed:
        eventually(lambda: inside.process_data_events(0.05))
    assert (closed.value.reply_code, closed.value.reply_text) == (320, "CONNECTION_FORCED - vhost 'brief' is deleted")
    outside.channel().queue_declare("", exclusive=True)
    with pytest.raises(pika.exceptions.ProbableAccessDeniedError, match="530"):
        running.connect(virtual_host="brief")


def test_connections_use_tcp_nodelay(running: Running, client: Raw) -> None:
    client.open().channel()
    found = running.link_of(client.socket)
    assert running.call(lambda: found.transport._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)) == 1


def test_reject_publish_dlx_nacks_and_dead_letters_the_message(running: Running, name: str) -> None:
    channel = running.channel()
    channel.confirm_delivery()
    channel.queue_declare(f"{name}-dead", durable=True)
    arguments = {"x-max-length": 1, "x-overflow": "reject-publish-dlx", "x-dead-letter-exchange": "",
                 "x-dead-letter-routing-key": f"{name}-dead"}  # fmt: skip
    channel.queue_declare(name, durable=True, arguments=arguments)
    channel.basic_publish("", name, b"kept")
    with pytest.raises(pika.exceptions.NackError):
        channel.basic_publish("", name, b"over", mandatory=True)
    assert bodies(channel, name) == [b"kept"]
    _, properties, body = eventually(lambda: try_get(channel, f"{name}-dead"))
    assert body == b"over"
    assert properties.headers["x-first-death-reason"] == "maxlen"


def try_get(channel: Any, queue: str) -> Any:
    found = channel.basic_get(queue, auto_ack=True)
    return found if found[0] is not None else None


def test_x_retain_ms_keeps_messages_after_they_are_acknowledged(running: Running, name: str) -> None:
    channel = running.channel()
    channel.confirm_delivery()
    channel.queue_declare(name, durable=True, arguments={"x-retain-ms": 3_600_000})
    for n in range(3):
        channel.basic_publish("", name, b"%d" % n)
    assert bodies(channel, name) == [b"0", b"1", b"2"]
    assert depth(channel, name) == 0
    log = running.queue(name).view.log
    assert running.call(lambda: (log.start_offset, log.visible_end)) == (0, 3)


def test_a_stream_can_be_read_from_its_end_and_from_a_timestamp(running: Running, name: str) -> None:
    channel = running.channel()
    channel.confirm_delivery()
    channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
    channel.basic_publish("", name, b"old")
    got: dict[str, list[bytes]] = {"next": [], "time": []}

    def on_message(channel: Any, method: Any, _properties: Any, body: bytes) -> None:
        got[method.consumer_tag].append(body)
        channel.basic_ack(method.delivery_tag)

    reader = running.channel()
    reader.basic_qos(prefetch_count=10)
    long_ago = datetime.datetime.now(datetime.UTC) - datetime.timedelta(hours=1)
    for tag, offset in (("next", "next"), ("time", long_ago)):
        reader.basic_consume(
            name,
            on_message,
            arguments={"x-stream-offset": offset},
            consumer_tag=tag,
        )
    channel.basic_publish("", name, b"new")
    eventually(lambda: reader.connection.process_data_events(0.05) or (len(got["next"]), len(got["time"])) == (1, 2))
    assert got == {"next": [b"new"], "time": [b"old", b"new"]}
