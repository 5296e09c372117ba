"""aio-pika: robust connections, publisher confirms, iterators, RPC."""

import asyncio
from typing import Any

import aio_pika
import pytest
from aio_pika.patterns import RPC

from tests.listeners.amqp.running import PATIENCE_S, Running

pytestmark = pytest.mark.filterwarnings("ignore")


def url(running: Running) -> str:
    return f"amqp://guest:guest@127.0.0.1:{running.port}/"


async def test_publish_with_confirms_and_iterate(running: Running) -> None:
    async with await aio_pika.connect(url(running)) as connection:
        channel = await connection.channel()
        await channel.set_qos(prefetch_count=10)
        exchange = await channel.declare_exchange("aio", aio_pika.ExchangeType.TOPIC, durable=True)
        queue = await channel.declare_queue("aio", durable=True)
        await queue.bind(exchange, "a.#")
        messages = [aio_pika.Message(b"%d" % n, delivery_mode=2, headers={"n": n}) for n in range(200)]
        await asyncio.gather(*(exchange.publish(message, "a.b") for message in messages))
        got = []
        async with queue.iterator() as iterator:
            async for message in iterator:
                async with message.process():
                    got.append((message.body, message.headers["n"]))
                if len(got) == 200:
                    break
        assert got == [(b"%d" % n, n) for n in range(200)]


async def test_a_robust_connection_reconnects_after_a_broker_restart(running: Running) -> None:
    connection = await aio_pika.connect_robust(url(running), reconnect_interval=0.1)
    async with connection:
        channel = await connection.channel()
        queue = await channel.declare_queue("robust", durable=True)
        await channel.default_exchange.publish(aio_pika.Message(b"before", delivery_mode=2), "robust")
        port = running.port
        await asyncio.to_thread(running.stop)
        await asyncio.to_thread(running.start)
        assert running.port == port
        async with asyncio.timeout(PATIENCE_S):
            while True:
                try:
                    await channel.default_exchange.publish(aio_pika.Message(b"after", delivery_mode=2), "robust")
                    break
                except (aio_pika.exceptions.AMQPError, RuntimeError, ConnectionError):
                    await asyncio.sleep(0.1)
            first = await queue.get(timeout=PATIENCE_S)
            second = await queue.get(timeout=PATIENCE_S)
        assert (first.body, second.body) == (b"before", b"after")


async def test_rpc_answers(running: Running) -> None:
    async def multiply(*, x: int, y: int) -> int:
        return x * y

    async with await aio_pika.connect(url(running)) as connection:
        channel = await connection.channel()
        rpc = await RPC.create(channel)
        await rpc.register("multiply", multiply, auto_delete=True)
        results: list[Any] = [await rpc.proxy.multiply(x=n, y=n) for n in range(5)]
        assert results == [0, 1, 4, 9, 16]


async def test_transactions_roll_back(running: Running) -> None:
    async with await aio_pika.connect(url(running)) as connection:
        channel = await connection.channel(publisher_confirms=False)
        queue = await channel.declare_queue(exclusive=True)
        transaction = channel.transaction()
        await transaction.select()
        await channel.default_exchange.publish(aio_pika.Message(b"never"), queue.name)
        await transaction.rollback()
        await channel.default_exchange.publish(aio_pika.Message(b"kept"), queue.name)
        await transaction.commit()
        message = await queue.get(timeout=PATIENCE_S)
        assert message.body == b"kept"
