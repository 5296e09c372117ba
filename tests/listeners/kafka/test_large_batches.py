"""Batches that decompress to much are checked in a thread: other clients are served, and the connection keeps the
order."""

import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from headrace.listeners.kafka import context
from headrace.listeners.kafka.errors import Code
from headrace.record import codec
from headrace.wire.kafka.apis import Api
from headrace.wire.kafka.codec import decode
from headrace.wire.kafka.schema import response_struct
from tests.listeners.kafka.world import SECONDS, Client, Closed, World, batch, topic_at, world_at

GZIP, ZSTD = 1, 4
MB = 1 << 20


class Gate(ThreadPoolExecutor):
    """The checker thread, which works only while the test opens the gate."""

    def __init__(self) -> None:
        super().__init__(1)
        self.opened = threading.Event()
        self.asked = 0

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        def wait_and_work() -> Any:
            assert self.opened.wait(SECONDS)
            return work(*args, **named)

        self.asked += 1
        return super().submit(wait_and_work)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_at(tmp_path) as world:
        await world.topic("t", 2)
        yield world


@pytest.fixture
def gate(world: World) -> Iterator[Gate]:
    gate = Gate()
    world.context.checking.shutdown()
    world.context.checking = gate
    yield gate
    gate.opened.set()


LARGE = bytes(batch(bytes(8 * MB), codec=ZSTD))


def send(client: Client, *parts: tuple[int, bytes], acks: int = -1, topic: bytes = b"t") -> None:
    written = b"".join(struct.pack(">ii", number, len(data)) + data for number, data in parts)
    named = struct.pack(">h", len(topic)) + topic + struct.pack(">i", len(parts))
    client.send(Api.PRODUCE, 8, struct.pack(">hhii", -1, acks, 1000, 1) + named + written)


async def answer(client: Client) -> dict[int, tuple[int, int]]:
    """(error code, offset) by partition."""
    [topic] = decode(response_struct(Api.PRODUCE, 8), await client.receive(), 4).responses
    return {one.index: (one.error_code, one.base_offset) for one in topic.partition_responses}


def sizes(world: World, partition: int = 0) -> list[int]:
    """The values in log order."""
    chunk = world.broker.streams.get("t").partitions[partition].read_now(0)
    return [len(record.value or b"") for record in codec.records(chunk.data)]


async def test_others_are_served_while_a_large_batch_is_decompressed(world: World, gate: Gate) -> None:
    client, other = await world.client(), await world.client()
    send(client, (0, LARGE))
    while not gate.asked:
        await other.call(Api.API_VERSIONS, 3)
    assert (await other.produce("t", batch(b"x"))).error_code == 0
    gate.opened.set()
    assert await answer(client) == {0: (0, 1)}


async def test_nothing_overtakes_a_large_batch_on_its_connection(world: World, gate: Gate) -> None:
    client, other = await world.client(), await world.client()
    send(client, (0, bytes(batch(b"x"))))
    send(client, (0, LARGE))
    for _ in range(200):  # more than the limit of unanswered requests
        send(client, (0, bytes(batch(b"y"))))
    assert await answer(client) == {0: (0, 0)}
    while not gate.asked:
        await other.call(Api.API_VERSIONS, 3)
    for _ in range(20):
        await other.call(Api.API_VERSIONS, 3)
    assert sizes(world) == [1]
    gate.opened.set()
    for offset in range(1, 202):
        assert await answer(client) == {0: (0, offset)}
    assert sizes(world) == [1, 8 * MB] + [1] * 200


async def test_batches_after_a_large_one_in_a_request_keep_their_order(world: World, gate: Gate) -> None:
    client = await world.client()
    gate.opened.set()
    small = bytes(batch(b"x"))
    send(client, (1, small), (0, LARGE), (0, small), (1, small), (9, small))
    assert await answer(client) == {0: (0, 1), 1: (0, 1), 9: (Code.UNKNOWN_TOPIC_OR_PARTITION, -1)}
    assert sizes(world) == [8 * MB, 1] and sizes(world, 1) == [1, 1]
    send(client, (0, LARGE), acks=0)
    send(client, (0, small))
    assert await answer(client) == {0: (0, 3)}


async def test_small_batches_are_checked_on_the_event_loop(world: World, gate: Gate) -> None:
    client = await world.client()
    for number in (0, GZIP, ZSTD):
        assert (await client.produce("t", batch(bytes(500_000), codec=number))).error_code == 0
    assert not gate.asked


async def test_a_large_request_is_checked_in_the_thread_compressed_or_not(world: World, gate: Gate) -> None:
    client = await world.client()
    gate.opened.set()
    await world.topic("wide", batch_bytes_max=64 * MB)
    assert (await client.produce("wide", batch(bytes(9 * MB)))).error_code == 0
    assert gate.asked == 1


async def test_the_bytes_that_wait_for_the_checker_thread_are_bounded(
    world: World, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "CHECKING_BYTES_MAX", 16 * MB)
    await world.topic("wide", batch_bytes_max=64 * MB)
    large = bytes(batch(bytes(9 * MB)))
    clients, small = [await world.client() for _ in range(4)], await world.client()
    for client, asked in zip(clients, (1, 2, 2, 2), strict=True):
        for _ in range(2):
            send(client, (0, large), topic=b"wide")
        while gate.asked < asked:
            await small.call(Api.API_VERSIONS, 3)
        if client is clients[0]:
            assert not any(one.is_sending for one in world.listener.connections), "its next request is not read"
    while sum(one.is_sending for one in world.listener.connections) < 2:
        await small.call(Api.API_VERSIONS, 3)
    for _ in range(50):
        assert (await small.produce("t", batch(b"x"))).error_code == 0
    assert gate.asked == 2
    gate.opened.set()
    assert [[await answer(client) for _ in range(2)] for client in clients]
    assert world.broker.streams.get("wide").partitions[0].end_offset == 8


async def test_slow_recompression_runs_in_the_checker_thread(world: World, gate: Gate) -> None:
    client = await world.client()
    gate.opened.set()
    await world.topic("packed", compression="gzip", timestamp_type="append")
    assert (await client.produce("packed", batch(bytes(1000)))).error_code == 0
    assert gate.asked == 0
    for number in (0, ZSTD, GZIP):
        result = await client.produce("packed", batch(bytes(700_000), codec=number))
        assert result.error_code == 0 and result.log_append_time > 0
    assert gate.asked == 2, "batches with the topic's codec are kept"
    chunk = world.broker.streams.get("packed").partitions[0].read_now(0)
    infos = codec.scan(chunk.data)
    assert [info.codec for info in infos] == [GZIP] * 4
    assert all(info.max_timestamp > 1_700_000_000_000 for info in infos)


async def test_an_invalid_large_batch_is_refused_and_the_connection_stays_open(world: World, gate: Gate) -> None:
    client = await world.client()
    gate.opened.set()
    torn = bytearray(LARGE)
    torn[-1] ^= 1
    small = bytes(batch(b"x"))
    send(client, (0, bytes(torn)), (1, small))
    assert await answer(client) == {0: (Code.CORRUPT_MESSAGE, -1), 1: (0, 0)}
    bomb = bytes(batch(*[bytes(MB)] * 129, codec=ZSTD))
    send(client, (0, bomb), (1, small))
    assert await answer(client) == {0: (Code.MESSAGE_TOO_LARGE, -1), 1: (0, 1)}
    assert gate.asked == 1, "one is found invalid before it is decompressed"


async def test_too_much_at_once_is_throttled_even_with_a_small_decompression_limit(
    tmp_path: Path,
) -> None:
    """The limit is less than the event loop decompresses of a request: the rest left for the thread was negative."""
    async with topic_at(tmp_path, partitions=20, decompressed_bytes_max=64 << 10) as (_, client):
        data = bytes(batch(bytes(60_000), codec=GZIP))
        send(client, *((number, data) for number in range(20)))
        found = await answer(client)
        assert [found[number][0] for number in range(20)] == [0] * 17 + [Code.THROTTLING_QUOTA_EXCEEDED] * 3
        send(client, *((number, data) for number in range(17, 20)))
        assert [code for code, _ in (await answer(client)).values()] == [0] * 3


async def test_a_throttled_batch_is_stored_before_the_next_one_of_its_producer(tmp_path: Path) -> None:
    """The partition did not know the producer yet: the second batch was accepted, and the first was then out of
    order."""
    async with topic_at(tmp_path, partitions=20, decompressed_bytes_max=64 << 10) as (_, client):

        async def sent(sequence: int, numbers: range) -> list[int]:
            options = {"producer_id": 7, "producer_epoch": 0, "base_sequence": sequence}
            data = bytes(batch(bytes(60_000), codec=GZIP, **options))
            send(client, *((number, data) for number in numbers))
            return [code for code, _ in (await answer(client)).values()]

        assert (await sent(0, range(20))).count(Code.THROTTLING_QUOTA_EXCEEDED) == 3
        assert await sent(1, range(17, 20)) == [Code.OUT_OF_ORDER_SEQUENCE_NUMBER] * 3
        assert await sent(0, range(17, 20)) == await sent(1, range(17, 20)) == [0] * 3


async def test_a_topic_deleted_during_the_check_stores_nothing(world: World, gate: Gate) -> None:
    client, other = await world.client(), await world.client()
    send(client, (0, LARGE))
    while not gate.asked:
        await other.call(Api.API_VERSIONS, 3)
    await world.broker.streams.delete("t")
    await world.topic("t", 2)
    gate.opened.set()
    assert await answer(client) == {0: (Code.UNKNOWN_TOPIC_OR_PARTITION, -1)}
    assert world.broker.streams.get("t").partitions[0].end_offset == 0


async def test_a_batch_is_stored_even_if_its_client_disconnects_during_the_check(world: World, gate: Gate) -> None:
    client, other = await world.client(), await world.client()
    send(client, (0, LARGE))
    while not gate.asked:
        await other.call(Api.API_VERSIONS, 3)
    client.close()
    gate.opened.set()
    while not sizes(world):
        await other.call(Api.API_VERSIONS, 3)
    assert sizes(world) == [8 * MB]


async def test_requests_after_one_that_fails_by_a_bug_are_not_stored(
    world: World, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    client, other = await world.client(), await world.client()
    monkeypatch.setattr(gate, "submit", lambda *_: ThreadPoolExecutor.submit(gate, fail))
    sent: list[bytes] = []
    with monkeypatch.context() as together:  # in one read, so that it waits in the connection, not in the socket
        together.setattr(client, "send_bytes", sent.append)
        send(client, (0, LARGE))
        send(client, (0, bytes(batch(b"behind it"))))
    client.send_bytes(b"".join(sent))
    with pytest.raises(Closed):
        await client.receive()
    assert (await other.produce("t", batch(b"of another"))).base_offset == 0


async def test_by_default_a_batch_may_decompress_to_what_the_broker_can_serve(tmp_path: Path) -> None:
    """A batch of 122 KB that held a record of 120 MB was accepted, and reading it took a gigabyte."""
    async with world_at(tmp_path) as world:
        await world.topic("t")
        client = await world.client()
        limit = world.broker.config.decompressed_bytes_max
        assert limit == 32 * MB
        for compression in (GZIP, ZSTD):
            send(client, (0, bytes(batch(bytes(limit), codec=compression))))
            assert await answer(client) == {0: (Code.MESSAGE_TOO_LARGE, -1)}
        send(client, (0, bytes(batch(bytes(limit - 100), codec=GZIP))))
        assert await answer(client) == {0: (0, 0)}


async def test_a_batch_stored_under_a_larger_limit_is_fetched_under_a_smaller_one(tmp_path: Path) -> None:
    data = bytes(batch(bytes(40 * MB), codec=GZIP))
    async with world_at(tmp_path, decompressed_bytes_max=64 * MB) as world:
        await world.topic("t")
        assert (await (await world.client()).produce("t", data)).error_code == 0
    async with world_at(tmp_path) as world:
        client = await world.client()
        found = await client.fetch("t")
        assert found.error_code == 0 and bytes(found.records)[61:] == data[61:]
        assert (await client.produce("t", data)).error_code == Code.MESSAGE_TOO_LARGE
