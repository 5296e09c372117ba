"""Requests of a connection take effect in order, also when the client does not wait for the responses."""

from pathlib import Path
from typing import Any

import pytest

from headrace.wire.kafka.apis import Api, has_header_tags
from headrace.wire.kafka.codec import decode
from headrace.wire.kafka.schema import request_entity, response_struct
from tests.listeners.kafka.world import make, world_at
from tests.wire.kafka.test_schema_codec import written


def request(api: Api, version: int, fields: dict[str, Any]) -> bytes:
    return written(make(request_entity(api, version), fields))


@pytest.mark.parametrize("version", [7, 8])
async def test_a_pipelined_offset_fetch_sees_the_commit_before_it(tmp_path: Path, version: int) -> None:
    async with world_at(tmp_path) as world:
        topic = await world.topic("t")
        client = await world.client()
        asked: dict[str, Any] = {"group_id": "g", "topics": [{"name": topic, "partition_indexes": [0]}]}
        fetch = request(Api.OFFSET_FETCH, version, asked if version < 8 else {"groups": [asked]})
        for offset in range(20):
            partitions = [{"partition_index": 0, "committed_offset": offset}]
            committed = {"group_id": "g", "topics": [{"name": topic, "partitions": partitions}]}
            client.send(Api.OFFSET_COMMIT, 8, request(Api.OFFSET_COMMIT, 8, committed))
            client.send(Api.OFFSET_FETCH, version, fetch)
            await client.receive()
            data = await client.receive()
            shape = response_struct(Api.OFFSET_FETCH, version)
            found = decode(shape, data, 4 + has_header_tags(Api.OFFSET_FETCH, version))
            topics = found.topics if version < 8 else found.groups[0].topics
            assert topics[0].partitions[0].committed_offset == offset
