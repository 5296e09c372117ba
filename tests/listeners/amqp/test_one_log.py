"""Queues and topics share one log: records written by one listener are read by the others."""

import asyncio
from typing import Any

import pika

from headrace.record import codec
from tests.listeners.amqp.running import PATIENCE_S, Running, depth, eventually, take


def publish(running: Running, stream: str, value: bytes, headers: tuple[tuple[str, bytes], ...] = ()) -> None:
    """Publish a record without AMQP, as the HTTP listener does."""
    broker = running.server.broker

    async def work() -> None:
        await broker.publish(broker.streams.get(stream), [(b"k", value, headers, None, -1)])

    asyncio.run_coroutine_threadsafe(work(), running.loop).result(PATIENCE_S)


def test_a_record_published_to_the_stream_of_a_queue_reaches_its_consumers(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name, durable=True)
    channel.basic_publish("", name, b"by amqp")
    depth(channel, name)
    publish(running, name, b"by http", (("a", b"text"), ("b", b"\xff\xfe")))
    channel.basic_publish("", name, b"by amqp again")
    got: list[tuple[bytes, Any]] = []
    channel.basic_consume(name, lambda _c, m, p, body: got.append((body, (m.routing_key, p.headers))), auto_ack=True)
    eventually(lambda: channel.connection.process_data_events(0.05) or len(got) == 3)
    assert [body for body, _ in got] == [b"by amqp", b"by http", b"by amqp again"]
    assert got[1][1] == ("k", {"a": "text", "b": b"\xff\xfe"})


def test_a_message_published_over_amqp_is_a_record_with_its_properties(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name, durable=True)
    channel.confirm_delivery()
    channel.basic_publish("", name, b"body", pika.BasicProperties(message_id="m", headers={"x": 1}))
    log = running.server.broker.streams.get(name).partitions[0].log
    (record,) = running.call(lambda: codec.records(log.read(0).data))
    assert (record.key, record.value) == (name.encode(), b"body")
    assert dict(record.headers)["amqp.exchange"] == b""


def test_a_topic_can_be_used_as_a_stream_queue(running: Running) -> None:
    broker = running.server.broker

    async def create() -> None:
        await broker.streams.create("clicks")

    asyncio.run_coroutine_threadsafe(create(), running.loop).result(PATIENCE_S)
    publish(running, "clicks", b"1")
    channel = running.channel()
    channel.basic_publish("", "clicks", b"2")
    assert depth(channel, "clicks") == 2
    channel.basic_qos(prefetch_count=10)
    got: list[bytes] = []
    channel.basic_consume("clicks", lambda _c, _m, _p, body: got.append(body), arguments={"x-stream-offset": "first"})
    eventually(lambda: channel.connection.process_data_events(0.05) or len(got) == 2)
    assert got == [b"1", b"2"]


def test_a_queue_declared_on_a_topic_starts_at_the_end_of_the_topic(running: Running) -> None:
    broker = running.server.broker

    async def create() -> None:
        await broker.streams.create("orders")

    asyncio.run_coroutine_threadsafe(create(), running.loop).result(PATIENCE_S)
    publish(running, "orders", b"before")
    channel = running.channel()
    channel.queue_declare("orders", durable=True, arguments={"x-queue-type": "quorum"})
    publish(running, "orders", b"after")
    assert take(channel, "orders")[2] == b"after"
    channel.queue_delete("orders")
    assert broker.streams.find("orders") is not None


def test_consumers_continue_after_the_records_deleted_from_the_log(running: Running, name: str) -> None:
    channel = running.channel()
    channel.queue_declare(name, durable=True)
    channel.confirm_delivery()
    for n in range(10):
        channel.basic_publish("", name, b"%d" % n)
    broker = running.server.broker

    async def delete() -> None:
        await broker.shard.maintenance.starts.delete_before(broker.streams.get(name).partitions[0].log, 5)

    asyncio.run_coroutine_threadsafe(delete(), running.loop).result(PATIENCE_S)
    assert depth(channel, name) == 5
    assert take(channel, name, auto_ack=True)[2] == b"5"
    got: list[bytes] = []
    channel.basic_consume(name, lambda _c, _m, _p, body: got.append(body), auto_ack=True)
    channel.basic_publish("", name, b"later")
    eventually(lambda: channel.connection.process_data_events(0.05) or b"later" in got)
    assert got == [b"6", b"7", b"8", b"9", b"later"]
