"""A thousand partitions in one session and hundreds of connections: bounded, and nothing is left behind."""

import asyncio
import gc
from pathlib import Path

import pytest
from kio.index import load_request_schema

from headrace.doors.kafka import connection
from headrace.wire.kafka.apis import Api
from tests.doors.kafka.world import batch, make, world_at
from tests.wire.kafka.test_schema_codec import written

PARTITIONS = 1000
CONNECTIONS = 300


def produce_body(topic: str, data: bytes) -> bytes:
    parts = [{"index": 0, "records": bytes(data)}]
    topics = [{"name": topic, "partition_data": parts}]
    return written(make(load_request_schema(Api.PRODUCE, 9), {"acks": -1, "timeout": 1000, "topic_data": topics}))


async def test_a_session_of_a_thousand_partitions_says_only_what_is_new(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        await world.topic("wide", PARTITIONS)
        client = await world.client()
        parts = [
            {"partition": n, "fetch_offset": 0, "partition_max_bytes": 1 << 20} for n in range(PARTITIONS)
        ]
        asked = {"max_wait": 0, "min_bytes": 1, "max_bytes": 1 << 24}
        first = await client.call(
            Api.FETCH, 12, **asked, session_epoch=0, topics=[{"topic": "wide", "partitions": parts}]
        )
        assert len(first.responses[0].partitions) == PARTITIONS
        asked["session_id"], asked["max_wait"] = first.session_id, 20
        for epoch in (1, 2, 3):
            idle = await client.call(Api.FETCH, 12, **asked, session_epoch=epoch, topics=[])
            assert idle.responses == []
        writer = await world.client()
        await writer.produce("wide", batch(b"news"), partition=777)
        woken = await client.call(Api.FETCH, 12, **asked, session_epoch=4, topics=[])
        [part] = woken.responses[0].partitions
        assert part.partition_index == 777
        log = world.broker.streams.get("wide").partitions[5].log
        assert len(log._waiters) <= 1, "one watch for all those fetches"


async def test_r5_connections_that_go_leave_nothing_behind(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        await world.topic("t")
        for _ in range(2):
            clients = [await world.client() for _ in range(CONNECTIONS)]
            for client in clients:
                client.send(Api.API_VERSIONS, 3, b"\1\1\0")
            for client in clients:
                assert await client.receive()
                client.close()
        keeper = await world.client()
        while len(world.door.connections) > 1:
            await keeper.call(Api.API_VERSIONS, 3)
        gc.collect()
        assert len(world.door.sessions) == len(world.door.share_sessions) == 0
        assert not world.door._tasks


async def test_producers_share_the_memory_that_waits_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each may have little waiting, so that all of them together do not have much; everything is stored."""
    monkeypatch.setattr(connection, "DOOR_BYTES_WAITING_MAX", 4 << 20)
    async with world_at(tmp_path) as world:
        await world.topic("t")
        clients = [await world.client() for _ in range(8)]
        data = batch(b"x" * 900_000)
        body = produce_body("t", data)
        for client in clients:
            for _ in range(4):
                client.send(Api.PRODUCE, 9, body)
        most = 0
        while world.broker.streams.get("t").partitions[0].end_offset < 32:
            most = max(most, sum(one._waiting_bytes for one in world.door.connections))
            await asyncio.sleep(0)
        for client in clients:
            for _ in range(4):
                assert await client.receive()
        # One request of each is always taken, and the one that fills a share is taken whole.
        assert most <= 8 * 2 * (len(body) + 100)
        assert world.door.heavy == 0
