"""The shop: a publisher and a worker over AMQP, and an audit that reads all orders again over Kafka."""

import asyncio
import contextlib
import json
import random
import ssl
import struct
from collections.abc import Callable, Coroutine, Iterator, Mapping
from typing import Any

from pamqp import commands

from headrace.demo.amqp import AmqpClient
from headrace.demo.kafka import KafkaClient
from headrace.errors import HeadraceError

EXCHANGE, QUEUE, DEAD, GROUP = "shop", "orders", "orders.dead", "audit"
PRODUCTS = {"bread": 3.2, "cheese": 7.9, "olives": 4.5, "wine": 12.0, "coffee": 6.8, "honey": 5.4}
REGIONS = ("north", "south", "east", "west")
KEPT_MS = 3_600_000
DEAD_MAX = 1000  # a demo that runs overnight must not fill the disk with dead letters
BAD_SHARE = 0.03
RETRY_S = 2.0
Say = Callable[[str], object]


def orders(chance: random.Random) -> Iterator[tuple[str, bytes]]:
    """Endless (routing key, body); a few bodies are not valid orders."""
    number = 0
    while True:
        number += 1
        product = chance.choice(list(PRODUCTS))
        region = chance.choice(REGIONS)
        quantity = chance.choices((1, 2, 3, 6, 12), (50, 25, 12, 8, 5))[0]
        order = {
            "order": number,
            "product": product,
            "quantity": quantity,
            "amount": round(PRODUCTS[product] * quantity, 2),
            "customer": f"customer-{chance.randrange(200):03d}",
            "region": region,
        }
        body = json.dumps(order).encode()
        if chance.random() < BAD_SHARE:
            half, ghost = body[: len(body) // 2], b'{"product": "ghost", "amount": "much"}'
            body = chance.choice((b"not an order at all", half, ghost))
        yield f"order.{region}.{product}", body


def is_good(body: bytes) -> bool:
    try:
        order = json.loads(body)
        return isinstance(order["amount"], int | float) and order["product"] in PRODUCTS
    except (ValueError, KeyError, TypeError):
        return False


Login = tuple[str, str] | None


class Shop:
    def __init__(
        self,
        amqp: tuple[str, int],
        kafka: tuple[str, int] | None,
        *,
        rate: float,
        say: Say,
        login: Login,
        tls: Mapping[str, ssl.SSLContext] | None = None,  # by listener, for those that use TLS
    ) -> None:
        self._amqp, self._kafka, self._login = amqp, kafka, login
        self._tls = tls or {}
        self._rate = rate
        self._say = say
        self.published = self.worked = self.died = self.audited = 0

    async def run(self) -> None:
        """Runs until cancelled, and reconnects when the broker comes back."""
        await self._set_up()
        parts = [self._retry(self._publish), self._retry(self._work)]
        if self._kafka is not None:
            parts.append(self._retry(self._audit))
        await asyncio.gather(*parts)

    async def _retry(self, part: Callable[[], Coroutine[Any, Any, None]]) -> None:
        while True:
            with contextlib.suppress(HeadraceError, ConnectionError, asyncio.IncompleteReadError, struct.error):
                await part()
            await asyncio.sleep(RETRY_S)

    async def _set_up(self) -> None:
        client = await AmqpClient.connect(*self._amqp, "demo: set-up", self._login, self._tls.get("amqp"))
        try:
            await client.call(commands.Exchange.Declare, exchange=EXCHANGE, exchange_type="topic", durable=True)
            await client.call(commands.Queue.Declare, queue=DEAD, durable=True, arguments={"x-max-length": DEAD_MAX})
            arguments = {
                "x-dead-letter-exchange": "",
                "x-dead-letter-routing-key": DEAD,
                "x-retain-ms": KEPT_MS,
            }
            await client.call(commands.Queue.Declare, queue=QUEUE, durable=True, arguments=arguments)
            await client.call(commands.Queue.Bind, queue=QUEUE, exchange=EXCHANGE, routing_key="order.#")
        finally:
            await client.close()
        self._say(f"exchange {EXCHANGE!r} routes orders to queue {QUEUE!r}; rejected ones go to {DEAD!r}")

    async def _publish(self) -> None:
        client = await AmqpClient.connect(*self._amqp, "demo: publisher", self._login, self._tls.get("amqp"))
        try:
            await client.call(commands.Confirm.Select)
            chance = random.Random()
            for key, body in orders(chance):
                await client.publish(EXCHANGE, key, body, {"content_type": "application/json", "app_id": "demo"})
                await client.wait_for_confirms(100)
                self.published += 1
                # At random intervals, so that the rates vary.
                await asyncio.sleep(chance.expovariate(self._rate))
        finally:
            await client.close()

    async def _work(self) -> None:
        client = await AmqpClient.connect(*self._amqp, "demo: worker", self._login, self._tls.get("amqp"))
        try:
            await client.call(commands.Basic.Qos, prefetch_count=20)
            await client.call(commands.Basic.Consume, queue=QUEUE, consumer_tag="demo-worker")
            gone = asyncio.ensure_future(client.closed())
            while not gone.done():
                ready = asyncio.ensure_future(client.deliveries.get())
                await asyncio.wait({ready, gone}, return_when=asyncio.FIRST_COMPLETED)
                if not ready.done():
                    ready.cancel()
                    return
                delivery = ready.result()
                if is_good(delivery.body):
                    client.ack(delivery.tag)
                    self.worked += 1
                else:
                    client.reject(delivery.tag)
                    self.died += 1
        finally:
            await client.close()

    async def _audit(self) -> None:
        """Reads the queue's log as a Kafka topic, from the first message, once a second."""
        assert self._kafka is not None
        client = await KafkaClient.connect(*self._kafka, self._login, self._tls.get("kafka"))
        try:
            offset = max(0, await client.committed(GROUP, QUEUE))
            while True:
                fetched = await client.fetch(QUEUE, offset)
                if fetched.error == 1:  # OFFSET_OUT_OF_RANGE: retention deleted it
                    offset = max(0, await client.start(QUEUE))
                if fetched.records:
                    offset = fetched.records[-1].offset + 1
                    self.audited += len(fetched.records)
                    await client.commit(GROUP, QUEUE, offset)
                await asyncio.sleep(1.0)
        finally:
            await client.close()
