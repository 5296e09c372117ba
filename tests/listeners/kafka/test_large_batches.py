"""What unfolds to much is checked in a thread: others are served meanwhile, its own connection keeps the order."""

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
from tests.listeners.kafka.world import SECONDS, Client, Closed, World, batch, world_at

GZIP, ZSTD = 1, 4
MB = 1 << 20


class Gate(ThreadPoolExecutor):
    """The listener's thread, which works when it is let."""

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
    """By partition, the code and the offset."""
    [topic] = decode(response_struct(Api.PRODUCE, 8), await client.receive(), 4).responses
    return {one.index: (one.error_code, one.base_offset) for one in topic.partition_responses}


def sizes(world: World, partition: int = 0) -> list[int]:
    """Of the values, in the log's order."""
    chunk = world.broker.streams.get("t").partitions[partition].read_now(0)
    return [len(record.value or b"") for record in codec.records(chunk.data)]


async def test_others_are_served_while_a_large_batch_is_unfolded(world: World, gate: Gate) -> None:
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
    for _ in range(200):  # more than may be unanswered
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


async def test_what_comes_behind_a_large_batch_in_one_request_stays_behind_it(world: World, gate: Gate) -> None:
    client = await world.client()
    gate.opened.set()
    small = bytes(batch(b"x"))
    send(client, (1, small), (0, LARGE), (0, small), (1, small), (9, small))
    assert await answer(client) == {0: (0, 1), 1: (0, 1), 9: (Code.UNKNOWN_TOPIC_OR_PARTITION, -1)}
    assert sizes(world) == [8 * MB, 1] and sizes(world, 1) == [1, 1]
    send(client, (0, LARGE), acks=0)
    send(client, (0, small))
    assert await answer(client) == {0: (0, 3)}


async def test_small_batches_are_checked_where_they_come(world: World, gate: Gate) -> None:
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


async def test_what_waits_for_the_thread_is_bounded(world: World, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
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
            assert not any(one.is_sending for one in world.listener.connections), "its next one is not read"
    while sum(one.is_sending for one in world.listener.connections) < 2:
        await small.call(Api.API_VERSIONS, 3)
    for _ in range(50):
        assert (await small.produce("t", batch(b"x"))).error_code == 0
    assert gate.asked == 2
    gate.opened.set()
    assert [[await answer(client) for _ in range(2)] for client in clients]
    assert world.broker.streams.get("wide").partitions[0].end_offset == 8


async def test_what_takes_long_to_pack_is_packed_in_the_thread(world: World, gate: Gate) -> None:
    client = await world.client()
    gate.opened.set()
    await world.topic("packed", compression="gzip", timestamp_type="append")
    assert (await client.produce("packed", batch(bytes(1000)))).error_code == 0
    assert not gate.asked
    for number in (0, ZSTD, GZIP):
        result = await client.produce("packed", batch(bytes(700_000), codec=number))
        assert result.error_code == 0 and result.log_append_time > 0
    assert gate.asked == 2, "what is packed already is left as it is"
    chunk = world.broker.streams.get("packed").partitions[0].read_now(0)
    infos = codec.scan(chunk.data)
    assert [info.codec for info in infos] == [GZIP] * 4
    assert all(info.max_timestamp > 1_700_000_000_000 for info in infos)


async def test_a_large_batch_that_is_broken_is_refused_and_the_connection_lives(world: World, gate: Gate) -> None:
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
    assert gate.asked == 1, "the one is seen to be torn before it is unfolded"


async def test_who_sends_too_much_at_once_is_told_to_come_again_however_little_a_batch_may_unfold_to(
    tmp_path: Path,
) -> None:
    """Less than the loop unfolds of a request: what was left of it for the thread was less than nothing."""
    async with world_at(tmp_path, decompressed_bytes_max=64 << 10) as world:
        await world.topic("t", 20)
        client = await world.client()
        data = bytes(batch(bytes(60_000), codec=GZIP))
        send(client, *((number, data) for number in range(20)))
        found = await answer(client)
        assert [found[number][0] for number in range(20)] == [0] * 17 + [Code.THROTTLING_QUOTA_EXCEEDED] * 3
        send(client, *((number, data) for number in range(17, 20)))
        assert [code for code, _ in (await answer(client)).values()] == [0] * 3


async def test_d6_what_a_producer_was_told_to_send_again_comes_before_what_it_sent_next(tmp_path: Path) -> None:
    """Nothing was known of it in that partition yet: the second batch was taken, and the first was out of order."""
    async with world_at(tmp_path, decompressed_bytes_max=64 << 10) as world:
        await world.topic("t", 20)
        client = await world.client()

        async def sent(sequence: int, numbers: range) -> list[int]:
            options = {"producer_id": 7, "producer_epoch": 0, "base_sequence": sequence}
            data = bytes(batch(bytes(60_000), codec=GZIP, **options))
            send(client, *((number, data) for number in numbers))
            return [code for code, _ in (await answer(client)).values()]

        assert (await sent(0, range(20))).count(Code.THROTTLING_QUOTA_EXCEEDED) == 3
        assert await sent(1, range(17, 20)) == [Code.OUT_OF_ORDER_SEQUENCE_NUMBER] * 3
        assert await sent(0, range(17, 20)) == await sent(1, range(17, 20)) == [0] * 3


async def test_a_topic_that_is_deleted_meanwhile_takes_nothing(world: World, gate: Gate) -> None:
    client, other = await world.client(), await world.client()
    send(client, (0, LARGE))
    while not gate.asked:
        await other.call(Api.API_VERSIONS, 3)
    await world.broker.streams.delete("t")
    await world.topic("t", 2)
    gate.opened.set()
    assert await answer(client) == {0: (Code.UNKNOWN_TOPIC_OR_PARTITION, -1)}
    assert world.broker.streams.get("t").partitions[0].end_offset == 0


async def test_a_client_that_is_gone_meanwhile_has_sent_it_all_the_same(world: World, gate: Gate) -> None:
    client, other = await world.client(), await world.client()
    send(client, (0, LARGE))
    while not gate.asked:
        await other.call(Api.API_VERSIONS, 3)
    client.close()
    gate.opened.set()
    while not sizes(world):
        await other.call(Api.API_VERSIONS, 3)
    assert sizes(world) == [8 * MB]


async def test_what_waits_behind_one_that_our_bug_ends_is_not_stored(
    world: World, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    client, other = await world.client(), await world.client()
    monkeypatch.setattr(gate, "submit", lambda *_: ThreadPoolExecutor.submit(gate, fail))
    sent: list[bytes] = []
    with monkeypatch.context() as together:  # in one read: it waits here, not in the socket
        together.setattr(client, "send_bytes", sent.append)
        send(client, (0, LARGE))
        send(client, (0, bytes(batch(b"behind it"))))
    client.send_bytes(b"".join(sent))
    with pytest.raises(Closed):
        await client.receive()
    assert (await other.produce("t", batch(b"of another"))).base_offset == 0
