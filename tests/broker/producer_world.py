"""A broker, and what a producer sends to the first partition of its topic `t`."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from headrace.broker.broker import Broker
from headrace.broker.streams.partition import Partition
from headrace.config import Config
from headrace.record import codec


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Broker]:
    broker = await Broker.open(Config(data_dir=str(folder), http=None, amqp=None, kafka=None))
    try:
        yield broker
    finally:
        await broker.close()


def batch(value: bytes, key: bytes | None = None, **options: Any) -> bytearray:
    return codec.build([(key, value, (), 1)], timestamp_ms=1, **options)


async def append(broker: Broker, data: bytearray) -> int:
    log = broker.streams.get("t").partitions[0].log
    ticket = await broker.coordination.producers.append(Partition(0, log), data, codec.validate(data))
    return int(ticket.base_offset)
