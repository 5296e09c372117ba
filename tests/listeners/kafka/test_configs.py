"""Topic configs: concurrent changes, and requests that change nothing."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from headrace.listeners.kafka.admin.config_types import APPEND, BROKER, CLIENT_METRICS, GROUP, SUBTRACT, TOPIC
from headrace.listeners.kafka.errors import Code
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.world import Client, World, world_at


async def alter(client: Client, operation: int, value: str) -> Any:
    config = {"name": "cleanup.policy", "config_operation": operation, "value": value}
    resource = {"resource_type": TOPIC, "resource_name": "t", "configs": [config]}
    answer = await client.call(Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=[resource], validate_only=False)
    return answer.responses[0]


async def test_concurrent_changes_of_a_list_are_applied_one_after_the_other(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        await world.topic("t", cleanup_policy="compact")
        streams = world.broker.streams
        changes = []
        async with streams._changing:  # later requests wait in this order
            for operation, value in ((APPEND, "delete"), (SUBTRACT, "compact")):
                changes.append(asyncio.ensure_future(alter(await world.client(), operation, value)))
                while len(streams._changing._waiters or ()) < len(changes) and not changes[-1].done():
                    await asyncio.sleep(0.001)
        answers = [await change for change in changes]
        assert [answer.error_code for answer in answers] == [0, 0], answers
        assert streams.get("t").settings.cleanup_policy == "delete"


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_at(tmp_path) as opened:
        await opened.topic("t", retention_ms=5000)
        yield opened


NULL = [{"name": "retention.ms", "value": None}]
TWICE = [{"name": "retention.ms", "value": value} for value in ("1000", "2000")]


async def test_a_null_value_or_a_duplicate_key_changes_nothing(world: World) -> None:
    """Once a null value deleted the config, and the last of two values won."""
    client = await world.client()
    for api in (Api.ALTER_CONFIGS, Api.INCREMENTAL_ALTER_CONFIGS):
        for configs in (NULL, TWICE):
            for kind, name in ((TOPIC, "retention.ms"), (GROUP, "share.record.lock.duration.ms")):
                named = [{**one, "name": name} for one in configs]
                resource = {"resource_type": kind, "resource_name": "t", "configs": named}
                [answer] = (await client.call(api, 1, resources=[resource])).responses
                assert answer.error_code == Code.INVALID_REQUEST, (api, configs)
    assert world.broker.streams.get("t").settings.retention_ms == 5000
    topic = {"name": "new", "num_partitions": 1, "replication_factor": 1, "configs": NULL}
    [answer] = (await client.call(Api.CREATE_TOPICS, 7, topics=[topic])).topics
    assert answer.error_code == Code.INVALID_CONFIG


async def test_a_topic_named_twice_in_alter_configs_is_not_changed(world: World) -> None:
    client = await world.client()
    twice = [{"resource_type": TOPIC, "resource_name": "t", "configs": [one]} for one in TWICE]
    answers = (await client.call(Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=twice)).responses
    assert {one.error_code for one in answers} == {Code.INVALID_REQUEST}
    assert world.broker.streams.get("t").settings.retention_ms == 5000


async def test_no_configuration_keys_means_all_configs(world: World) -> None:
    client = await world.client()
    no_keys: list[str] = []
    asked = [{"resource_type": TOPIC, "resource_name": "t", "configuration_keys": keys} for keys in (no_keys, None)]
    none, null = (await client.call(Api.DESCRIBE_CONFIGS, 4, resources=asked)).results
    assert none.configs == null.configs != []


async def test_altering_unsupported_resources_is_refused(world: World) -> None:
    """kafka-client-metrics reported a subscription as created that did not exist."""
    client = await world.client()
    interval = [{"name": "interval.ms", "value": "1000"}]
    for kind in (CLIENT_METRICS, BROKER, 99):
        resource = {"resource_type": kind, "resource_name": "1", "configs": interval}
        [answer] = (await client.call(Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=[resource])).responses
        assert answer.error_code == Code.INVALID_REQUEST
    asked = [{"resource_type": kind, "resource_name": "x", "configuration_keys": None} for kind in (CLIENT_METRICS, 99)]
    metrics, unknown = (await client.call(Api.DESCRIBE_CONFIGS, 4, resources=asked)).results
    assert (metrics.error_code, metrics.configs) == (0, [])
    assert unknown.error_code == Code.INVALID_REQUEST


async def test_every_config_has_documentation_on_request_only(world: World) -> None:
    client = await world.client()
    for kind, name in ((TOPIC, "t"), (BROKER, "1"), (GROUP, "g")):
        resource = {"resource_type": kind, "resource_name": name, "configuration_keys": None}
        asked = await client.call(Api.DESCRIBE_CONFIGS, 4, resources=[resource], include_documentation=True)
        assert [one.name for one in asked.results[0].configs if not one.documentation] == []
        assert len(asked.results[0].configs) > 10
        plain = await client.call(Api.DESCRIBE_CONFIGS, 4, resources=[resource])
        assert {one.documentation for one in plain.results[0].configs} == {None}
