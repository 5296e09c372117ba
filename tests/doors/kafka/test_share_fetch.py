"""What a share fetch waits for, and that it hears of it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.doors.kafka import share
from headrace.wire.kafka.apis import Api
from tests.doors.kafka.test_share_offsets import beat
from tests.doors.kafka.world import batch, world_at


async def test_what_comes_while_another_partition_is_read_from_disk_is_handed_out_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    when_loaded = share.when_loaded

    async def slowly(read: Callable[[], Any]) -> Any:
        nonlocal looks
        looks += 1
        found = await when_loaded(read)
        if looks == 2:  # of the second partition, and the first one has been looked at
            await writer.produce("t", bytes(batch(b"x")))
        return found

    async with world_at(tmp_path, read_wait_ms_max=280_000) as world:
        await world.topic("t", 2)
        client, writer = await world.client(), await world.client()
        await beat(client)
        monkeypatch.setattr(share, "when_loaded", slowly)
        topic_id = world.door.topics.id_of(world.broker.streams.get("t"))
        wanted = [{"topic_id": topic_id, "partitions": [{"partition_index": number} for number in (0, 1)]}]
        limits = {"max_wait": 280_000, "min_bytes": 1, "max_bytes": 1 << 20, "max_records": 100}
        answer = await client.call(Api.SHARE_FETCH, 1, group_id="s", member_id="m", topics=wanted, **limits)
        [part] = answer.responses[0].partitions
        assert (part.partition_index, [one.first_offset for one in part.acquired_records]) == (0, [0])
