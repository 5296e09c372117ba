"""Broker configs: the defaults of topics change at run time, the others are read-only."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.config import in_force
from headrace.listeners.kafka.admin.config_types import (
    APPEND,
    BROKER,
    DELETE,
    SET,
    SOURCE_CLUSTER,
    SOURCE_DEFAULT,
    SOURCE_NODE,
    SOURCE_STATIC,
    SOURCE_TOPIC,
    SUBTRACT,
    TOPIC,
)
from headrace.listeners.kafka.errors import Code
from headrace.log.settings import StreamSettings
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.world import Client, World, world_at

RETENTION = "log.retention.ms"
WEEK_MS = str(7 * 24 * 3600 * 1000)


@pytest_asyncio.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with world_at(tmp_path) as opened:
        await opened.topic("t")
        await opened.topic("own", retention_ms=5000)
        yield opened


async def alter(
    client: Client, node: str, name: str, value: str | None, operation: int = SET, *, validate_only: bool = False
) -> tuple[int, str | None]:
    one = {"name": name, "config_operation": operation, "value": value}
    resource = {"resource_type": BROKER, "resource_name": node, "configs": [one]}
    asked = {"resources": [resource], "validate_only": validate_only}
    [answer] = (await client.call(Api.INCREMENTAL_ALTER_CONFIGS, 1, **asked)).responses
    return answer.error_code, answer.error_message


async def described(client: Client, kind: int, name: str) -> dict[str, Any]:
    asked = [{"resource_type": kind, "resource_name": name, "configuration_keys": None}]
    [answer] = (await client.call(Api.DESCRIBE_CONFIGS, 4, resources=asked, include_synonyms=True)).results
    assert answer.error_code == 0
    return {one.name: one for one in answer.configs}


async def synonyms(client: Client, kind: int, name: str, config: str) -> list[tuple[str, str, int]]:
    found = (await described(client, kind, name))[config]
    values = [(one.name, one.value, one.source) for one in found.synonyms]
    assert (found.value, found.config_source) == values[0][1:]
    return values


def retention_of(world: World, topic: str) -> int:
    stream = world.broker.streams.get(topic)
    assert stream.partitions[0].log.settings == stream.settings, "the log has the settings, too"
    return stream.settings.retention_ms


async def test_a_changed_default_applies_at_once_to_topics_without_their_own(world: World) -> None:
    """Every change of a broker config was refused."""
    client = await world.client()
    assert await alter(client, "1", RETENTION, "100000") == (0, None)
    assert (retention_of(world, "t"), retention_of(world, "own")) == (100_000, 5000)
    await world.topic("later")
    assert retention_of(world, "later") == 100_000
    of_broker = [(RETENTION, "100000", SOURCE_NODE), (RETENTION, WEEK_MS, SOURCE_DEFAULT)]
    assert await synonyms(client, BROKER, "1", RETENTION) == of_broker
    assert await synonyms(client, TOPIC, "t", "retention.ms") == of_broker
    assert await synonyms(client, TOPIC, "own", "retention.ms") == [("retention.ms", "5000", SOURCE_TOPIC), *of_broker]
    [shown] = [one for one in in_force(world.broker.config) if one.name == "retention_ms"]
    assert (shown.value, shown.origin) == ("100s", "changed at run time")


async def test_a_value_of_the_node_overrides_the_one_of_the_cluster(world: World) -> None:
    client = await world.client()
    assert await alter(client, "", RETENTION, "200000") == (0, None)
    assert retention_of(world, "t") == 200_000
    assert await alter(client, "1", RETENTION, "100000") == (0, None)
    assert retention_of(world, "t") == 100_000
    assert await synonyms(client, BROKER, "1", RETENTION) == [
        (RETENTION, "100000", SOURCE_NODE),
        (RETENTION, "200000", SOURCE_CLUSTER),
        (RETENTION, WEEK_MS, SOURCE_DEFAULT),
    ]
    cluster = await described(client, BROKER, "")
    assert list(cluster) == [RETENTION] and cluster[RETENTION].value == "200000", "only what was set for the cluster"
    assert await alter(client, "1", RETENTION, None, DELETE) == (0, None)
    assert retention_of(world, "t") == 200_000
    assert await alter(client, "", RETENTION, None, DELETE) == (0, None)
    assert retention_of(world, "t") == int(WEEK_MS)
    assert await described(client, BROKER, "") == {}


async def test_changes_survive_a_restart_and_override_the_configuration(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        await world.topic("t")
        assert await alter(await world.client(), "", RETENTION, "100000") == (0, None)
        assert await alter(await world.client(), "1", "message.max.bytes", "2147483647") == (0, None)
    async with world_at(tmp_path, stream=StreamSettings(retention_ms=7), origins={"retention_ms": "a flag"}) as world:
        client = await world.client()
        assert retention_of(world, "t") == 100_000
        found = [(RETENTION, "100000", SOURCE_CLUSTER), (RETENTION, "7", SOURCE_STATIC)]
        assert await synonyms(client, BROKER, "1", RETENTION) == found
        assert (await described(client, BROKER, "1"))["message.max.bytes"].value == "2147483647", "as it was set"
        resource = {"resource_type": BROKER, "resource_name": "", "configs": [{"name": "log.roll.ms", "value": "9000"}]}
        [answer] = (await client.call(Api.ALTER_CONFIGS, 2, resources=[resource])).responses
        assert answer.error_code == 0
        assert list(await described(client, BROKER, "")) == ["log.roll.ms"], "AlterConfigs replaces all"
        assert retention_of(world, "t") == 7


async def test_configs_that_cannot_change_are_read_only_and_refused(world: World) -> None:
    client = await world.client()
    all_configs = await described(client, BROKER, "1")
    read_only = {name for name, one in all_configs.items() if one.read_only}
    assert {"num.partitions", "node.id", "log.dirs", "compression.type"} <= read_only
    assert RETENTION not in read_only and "message.max.bytes" not in read_only
    for name in (*read_only, "no.such.config"):
        refused = (Code.INVALID_REQUEST, f"Cannot update these configs dynamically: [{name}]")
        assert await alter(client, "1", name, "5") == refused
        assert await alter(client, "1", name, None, DELETE) == (0, None), "as in Kafka: there is nothing to delete"


@pytest.mark.parametrize(
    ("node", "name", "value", "operation", "code", "message"),
    [
        ("1", RETENTION, "x", SET, 42, "Invalid value x for configuration log.retention.ms: Not a number of type LONG"),
        ("1", RETENTION, "5", APPEND, 40, "Config value append is not allowed for config key: log.retention.ms"),
        ("2", RETENTION, "5", SET, 42, "Unexpected broker id, expected 1, but received 2"),
        ("x", RETENTION, "5", SET, 42, "Node id must be an integer, but it is: x"),
        ("1", "message.max.bytes", "-1", SET, 42, None),
        ("1", "log.cleanup.policy", "nonsense", APPEND, 42, None),
    ],
)
async def test_an_invalid_change_changes_nothing(
    world: World, node: str, name: str, value: str, operation: int, code: int, message: str | None
) -> None:
    client = await world.client()
    found = await alter(client, node, name, value, operation)
    assert found[0] == code and message in (None, found[1])
    assert world.broker.config.stream == StreamSettings()
    for wrong in ("2", "x"):
        asked = [{"resource_type": BROKER, "resource_name": wrong, "configuration_keys": None}]
        [answer] = (await client.call(Api.DESCRIBE_CONFIGS, 4, resources=asked)).results
        assert answer.error_code == Code.INVALID_REQUEST


async def test_validate_only_and_lists(world: World) -> None:
    client = await world.client()
    assert await alter(client, "1", RETENTION, "5", validate_only=True) == (0, None)
    assert (await alter(client, "1", RETENTION, "x", validate_only=True))[0] == Code.INVALID_REQUEST
    assert retention_of(world, "t") == int(WEEK_MS)
    assert await alter(client, "1", "log.cleanup.policy", "compact", APPEND) == (0, None)
    assert world.broker.streams.get("t").settings.cleanup_policy == "delete,compact"
    assert await alter(client, "1", "log.cleanup.policy", "delete", SUBTRACT) == (0, None)
    assert world.broker.streams.get("t").settings.cleanup_policy == "compact"


async def test_a_default_that_contradicts_a_topic_is_refused(world: World) -> None:
    client = await world.client()
    await world.broker.streams.configure("own", {"compaction_lag_max": 1000})
    assert (await alter(client, "1", "log.cleaner.min.compaction.lag.ms", "2000"))[0] == Code.INVALID_REQUEST
    assert world.broker.config.stream == StreamSettings()
