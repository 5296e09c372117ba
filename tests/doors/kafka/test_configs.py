"""Settings of topics that several clients change at once."""

import asyncio
from pathlib import Path
from typing import Any

from headrace.doors.kafka.configs import APPEND, SUBTRACT, TOPIC
from headrace.wire.kafka.apis import Api
from tests.doors.kafka.world import Client, world_at


async def alter(client: Client, operation: int, value: str) -> Any:
    config = {"name": "cleanup.policy", "config_operation": operation, "value": value}
    resource = {"resource_type": TOPIC, "resource_name": "t", "configs": [config]}
    answer = await client.call(Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=[resource], validate_only=False)
    return answer.responses[0]


async def test_of_two_who_change_a_list_at_once_the_second_changes_what_the_first_has_left(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        await world.topic("t", cleanup_policy="compact")
        streams = world.broker.streams
        changes = []
        async with streams._changing:  # what comes now waits in this order
            for operation, value in ((APPEND, "delete"), (SUBTRACT, "compact")):
                changes.append(asyncio.ensure_future(alter(await world.client(), operation, value)))
                while len(streams._changing._waiters or ()) < len(changes) and not changes[-1].done():
                    await asyncio.sleep(0.001)
        answers = [await change for change in changes]
        assert [answer.error_code for answer in answers] == [0, 0], answers
        assert streams.get("t").settings.cleanup_policy == "delete"
