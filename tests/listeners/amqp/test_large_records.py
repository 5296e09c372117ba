"""Large records of Kafka clients over AMQP: decompressed outside the event loop, and delivered without a copy."""

import asyncio
import threading
from typing import Any

import pytest

from headrace.record import codec
from headrace.record.batch import recompress
from headrace.record.compression import payload
from headrace.record.compression.codecs import decompress
from tests.listeners.amqp.running import PATIENCE_S, Running, eventually

GZIP = 1
VALUE = bytes(range(256)) * (20 << 12)  # 20 MB


def store(running: Running, name: str, value: bytes = VALUE) -> None:
    broker = running.server.broker

    async def append() -> None:
        stream = broker.streams.find(name) or await broker.streams.create(name)
        batch = codec.build([(b"k", value, (("h", b"v"),), 1)], codec=GZIP, timestamp_ms=1)
        await stream.partitions[0].append(batch)

    asyncio.run_coroutine_threadsafe(append(), running.loop).result(PATIENCE_S)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the threads that have decompressed much."""
    found: set[str] = set()

    def watched(*args: Any) -> bytes:
        data = decompress(*args)
        if len(data) > 1 << 20:
            found.add(threading.current_thread().name)
        return data

    monkeypatch.setattr(payload, "decompress", watched)
    monkeypatch.setattr(recompress, "decompress", watched)
    return found


@pytest.mark.parametrize("consumers", [1, 4])
def test_consumers_of_a_stream_receive_a_large_record(running: Running, threads: set[str], consumers: int) -> None:
    name = f"large-{consumers}"
    store(running, name)
    store(running, name, b"small")
    got: list[list[bytes]] = [[] for _ in range(consumers)]
    channels = [running.channel() for _ in range(consumers)]
    for channel, bodies in zip(channels, got, strict=True):
        channel.basic_qos(prefetch_count=10)

        def received(_c: Any, _m: Any, _p: Any, body: bytes, bodies: list[bytes] = bodies) -> None:
            bodies.append(body)

        channel.basic_consume(name, received, arguments={"x-stream-offset": "first"})
    for channel, bodies in zip(channels, got, strict=True):
        while len(bodies) < 2:
            channel.connection.process_data_events(0.05)
    assert got == [[VALUE, b"small"]] * consumers
    assert threads == {"headrace-loader"}


@pytest.mark.parametrize("how", ["get", "consume"])
def test_a_queue_delivers_a_large_record_of_a_kafka_client(
    running: Running, name: str, threads: set[str], how: str
) -> None:
    channel = running.channel()
    channel.queue_declare(name, durable=True)
    store(running, name)
    store(running, name, b"small")
    if how == "get":
        first, second = (channel.basic_get(name, auto_ack=True) for _ in range(2))
        assert (first[2], second[2]) == (VALUE, b"small") and first[1].headers == {"h": "v"}
    else:
        got: list[bytes] = []
        channel.basic_consume(name, lambda _c, _m, _p, body: got.append(body), auto_ack=True)
        eventually(lambda: channel.connection.process_data_events(0.05) or len(got) == 2)
        assert got == [VALUE, b"small"]
    assert threads == {"headrace-loader"}
