"""A thousand partitions in one session and hundreds of connections: bounded, and nothing is left behind."""

import gc
from pathlib import Path

from headrace.wire.kafka.apis import Api
from tests.doors.kafka.world import batch, world_at

PARTITIONS = 1000
CONNECTIONS = 300


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
