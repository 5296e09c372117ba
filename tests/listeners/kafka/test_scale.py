"""Scale: a thousand partitions in one session and a thousand connections cost nothing while idle and leave no trace."""

import asyncio
import gc
import resource
from pathlib import Path
from typing import Any

import pytest
from kio.index import load_request_schema

from headrace.listeners.kafka import request_pipeline
from headrace.listeners.kafka.data import fetch
from headrace.record.types import Buffer
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.world import batch, make, topic_at, world_at
from tests.wire.kafka.test_schema_codec import written

PARTITIONS = 1000
CONNECTIONS = 300
LONG_POLLS = 1000


def produce_body(topic: str, data: Buffer) -> bytes:
    parts = [{"index": 0, "records": bytes(data)}]
    topics = [{"name": topic, "partition_data": parts}]
    return written(make(load_request_schema(Api.PRODUCE, 9), {"acks": -1, "timeout": 1000, "topic_data": topics}))


async def test_a_session_of_a_thousand_partitions_returns_only_changes(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        await world.topic("wide", PARTITIONS)
        client = await world.client()
        parts = [{"partition": n, "fetch_offset": 0, "partition_max_bytes": 1 << 20} for n in range(PARTITIONS)]
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


async def test_closed_kafka_connections_leave_no_state_behind(tmp_path: Path) -> None:
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
        while len(world.listener.connections) > 1:
            await keeper.call(Api.API_VERSIONS, 3)
        gc.collect()
        assert len(world.context.fetch_sessions.by_id) == len(world.context.share_sessions.by_key) == 0
        assert not world.context._tasks


async def test_producers_share_the_memory_of_requests_that_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets a small share, so that all together stay within the limit; everything is stored."""
    monkeypatch.setattr(request_pipeline, "LISTENER_BYTES_WAITING_MAX", 4 << 20)
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
            most = max(most, sum(one._waiting_bytes for one in world.listener.connections))
            await asyncio.sleep(0)
        for client in clients:
            for _ in range(4):
                assert await client.receive()
        # One request of each is always accepted, and the one that exceeds a share is accepted completely.
        assert most <= 8 * 2 * (len(body) + 100)
        assert world.listener.pipelines.heavy == 0


async def test_spare_buffers_are_released_when_memory_is_short_or_they_are_unused(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (world, client):
        [spare] = [one for one in world.broker.pressure.holders if one.name == "kafka_buffers"]

        def shed() -> None:
            spare.shed(1 << 30)

        def trim_twice() -> None:
            world.listener._trim()
            world.listener._trim()

        for give_back in (shed, trim_twice):
            await client.produce("t", batch(b"x" * 900_000))
            assert spare.held_bytes() > 0, "kept for the next request"
            give_back()
            assert spare.held_bytes() == 0


async def test_a_thousand_long_polls_cost_nothing_until_their_record_arrives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fetch reads when it arrives and when its own partition fires, regardless of other traffic."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4 * LONG_POLLS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4 * LONG_POLLS), hard))
    looks = 0
    look = fetch.Fetch._read_all

    def counted(self: fetch.Fetch) -> Any:
        nonlocal looks
        looks += 1
        return look(self)

    monkeypatch.setattr(fetch.Fetch, "_read_all", counted)
    wanted = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20}
    asked = {"max_wait": 280_000, "min_bytes": 1, "max_bytes": 1 << 24, "session_epoch": -1}
    topics = [{"topic": "quiet", "partitions": [wanted]}]
    body = written(make(load_request_schema(Api.FETCH, 12), {**asked, "topics": topics}))
    async with world_at(tmp_path, read_wait_ms_max=280_000) as world:  # no fetch times out during the test
        await world.topic("quiet")
        await world.topic("busy")
        clients = [await world.client() for _ in range(LONG_POLLS)]
        for client in clients:
            client.send(Api.FETCH, 12, body)
        writer = await world.client()
        while looks < LONG_POLLS:
            await writer.call(Api.API_VERSIONS, 3)
        for _ in range(50):
            await writer.produce("busy", batch(b"elsewhere"))
        assert looks == LONG_POLLS
        await writer.produce("quiet", batch(b"the news"))
        for client in clients:
            assert b"the news" in await client.receive()
        assert looks == 2 * LONG_POLLS
