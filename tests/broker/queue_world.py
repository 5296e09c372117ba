"""Helpers for tests of queues in a broker without listeners."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.broker.broker import Broker
from headrace.broker.queues.queue import Queue
from headrace.broker.routing.exchanges import DELAYED
from headrace.broker.types.message import Message
from headrace.broker.vhosts.vhost import VirtualHost
from headrace.clock import ManualClock
from headrace.config import Config
from headrace.errors import StorageError
from headrace.log.settings import LogSettings
from headrace.record.amqp.properties import edit


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Broker]:
    """A broker with a manual clock: nothing expires or becomes due unless the test advances it."""
    log = LogSettings(journal_file_bytes=8 << 20)  # quick to make
    config = Config(data_dir=str(folder), http=None, amqp=None, kafka=None, log=log)
    made = await Broker.open(config, clock=ManualClock())
    try:
        yield made
    finally:
        if not made.shard.is_closed:
            await made.close()


async def declare(host: VirtualHost, name: str, *, durable: bool = True, auto_delete: bool = False,
                  **arguments: object) -> Queue:  # fmt: skip
    named = {key.replace("_", "-"): value for key, value in arguments.items()}
    return await host.declare_queue(
        name, durable=durable, exclusive=False, auto_delete=auto_delete, arguments=named, owner=None
    )


async def declare_exchange(host: VirtualHost, name: str, kind: str = "direct", **options: Any) -> Any:
    wanted: dict[str, Any] = {"durable": True, "auto_delete": False, "internal": False, "arguments": {}} | options
    return await host.declare_exchange(name, kind, **wanted)


def say(queue: Queue, *bodies: bytes) -> list[bool]:
    now = queue.vhost.clock.now_ms()
    return [queue.publish(Message("", queue.name, b"\0\0", body), now) for body in bodies]


def bodies(queue: Queue) -> list[bytes]:
    found = []
    while (taken := queue.get()) is not None:
        found.append(taken[2].body)
    return found


async def until(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def pass_time(broker: Broker) -> None:
    assert isinstance(broker.clock, ManualClock)
    broker.clock.advance(1.0)


def refuse(*_: object, **__: object) -> Any:
    raise StorageError("no room")


class Refusing:
    """Stands in for a call that fails for lack of disk space; records the result of `seen` at each call."""

    def __init__(self, seen: Callable[[], int]) -> None:
        self.times: list[int] = []
        self._seen = seen

    def __call__(self) -> Any:
        self.times.append(self._seen())
        refuse()


async def delayed(host: VirtualHost, *texts: bytes) -> Queue:
    exchange = await declare_exchange(host, "x", DELAYED, arguments={"x-delayed-type": "fanout"})
    queue = await declare(host, "q")
    await host.bind("x", queue, "", {})
    for body in texts:
        properties = edit(b"\0\0", headers={"x-delay": 50})
        assert host.delays.route(exchange, Message("x", "", properties, body), host.clock.now_ms(), [""]).waits_in
    await host.flushes.wait_all_durable()
    await until(lambda: host.delays.waiting("x") == len(texts))
    return queue
