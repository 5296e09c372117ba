"""Every topic config of Kafka 4.3 is accepted and described as it was set, whether it has an effect here or not."""

import struct
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.vhosts import definitions
from headrace.config import InvalidSetting
from headrace.listeners.kafka.admin.config_types import (
    APPEND,
    DELETE,
    SET,
    SOURCE_DEFAULT,
    SOURCE_TOPIC,
    SUBTRACT,
    TOPIC,
)
from headrace.listeners.kafka.errors import Code
from headrace.record.batch.crc32c import crc32c
from headrace.record.layout import CRC_AT, LENGTH_AT
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.world import Client, batch, world_at

MB = 1 << 20
# The configs that Apache Kafka 4.3.1 described for a topic, each with a value that is not its default there.
GIVEN = {
    "cleanup.policy": "compact",
    "compression.gzip.level": "5",
    "compression.lz4.level": "17",
    "compression.type": "producer",
    "compression.zstd.level": "-131072",
    "delete.retention.ms": "9223372036854775807",
    "file.delete.delay.ms": "1000",
    "flush.messages": "100",
    "flush.ms": "100",
    "follower.replication.throttled.replicas": "0:1,1:1",
    "index.interval.bytes": "0",
    "leader.replication.throttled.replicas": "*",
    "local.retention.bytes": "1000",
    "local.retention.ms": "-1",
    "max.compaction.lag.ms": "9223372036854775806",
    "max.message.bytes": "2147483647",
    "message.timestamp.after.max.ms": "1000",
    "message.timestamp.before.max.ms": "1000",
    "message.timestamp.type": "LogAppendTime",
    "min.cleanable.dirty.ratio": "0.123",
    "min.compaction.lag.ms": "5",
    "min.insync.replicas": "2",
    "preallocate": "true",
    "remote.log.copy.disable": "true",
    "remote.log.delete.on.disable": "true",
    "remote.storage.enable": "false",
    "retention.bytes": "-2",
    "retention.ms": "9223372036854775807",
    "segment.bytes": "1048576",
    "segment.index.bytes": "4096",
    "segment.jitter.ms": "10",
    "segment.ms": "1000",
    "unclean.leader.election.enable": "true",
}


async def create(client: Client, name: str, given: dict[str, str]) -> Any:
    configs = [{"name": config, "value": value} for config, value in given.items()]
    topic = {"name": name, "num_partitions": 1, "replication_factor": 1, "configs": configs}
    [answer] = (await client.call(Api.CREATE_TOPICS, 7, topics=[topic])).topics
    return answer


async def change(client: Client, topic: str, config: str, value: str | None, operation: int = SET) -> int:
    one = {"name": config, "config_operation": operation, "value": value}
    resource = {"resource_type": TOPIC, "resource_name": topic, "configs": [one]}
    [answer] = (await client.call(Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=[resource])).responses
    code: int = answer.error_code
    return code


async def described(client: Client, topic: str, *, source: int = SOURCE_TOPIC) -> dict[str, str]:
    asked = [{"resource_type": TOPIC, "resource_name": topic, "configuration_keys": None}]
    [answer] = (await client.call(Api.DESCRIBE_CONFIGS, 4, resources=asked)).results
    return {one.name: one.value for one in answer.configs if one.config_source == source}


async def test_every_config_is_described_as_set_also_after_a_restart(tmp_path: Path) -> None:
    """Some were refused, so MirrorMaker's topics had default retention; others were described as defaults, so tools
    set them again and again."""
    async with world_at(tmp_path) as world:
        client = await world.client()
        answer = await create(client, "t", GIVEN)
        assert answer.error_code == 0, answer.error_message
        assert {one.name: one.value for one in answer.configs if one.config_source == SOURCE_TOPIC} == GIVEN
        assert await described(client, "t") == GIVEN
        settings = world.broker.streams.get("t").settings
        assert (settings.retention_ms, settings.retention_bytes) == (-1, -1)
        assert (settings.cleanup_policy, settings.timestamp_type) == ("compact", "append")
        assert (settings.compaction_dirty_percent, settings.index_interval) == (12, 1)
    async with world_at(tmp_path) as world:
        client = await world.client()
        assert await described(client, "t") == GIVEN
        resource = {"resource_type": TOPIC, "resource_name": "t", "configs": [{"name": "flush.ms", "value": "7"}]}
        [answer] = (await client.call(Api.ALTER_CONFIGS, 2, resources=[resource])).responses
        assert answer.error_code == 0
        assert await described(client, "t") == {"flush.ms": "7"}, "AlterConfigs replaces all"
        assert await change(client, "t", "flush.ms", None, DELETE) == 0
        assert await described(client, "t") == {}
        assert (await described(client, "t", source=SOURCE_DEFAULT)).keys() >= GIVEN.keys()


async def test_definitions_carry_configs_without_effect(tmp_path: Path) -> None:
    given = {"min.insync.replicas": "2", "retention.ms": "9223372036854775807"}
    async with world_at(tmp_path / "from") as world:
        await create(await world.client(), "t", given)
        exported = await definitions.export(world.broker)
    async with world_at(tmp_path / "to") as world:
        await definitions.import_(world.broker, exported)
        assert await described(await world.client(), "t") == given


async def test_a_setting_changed_over_another_protocol_is_described_with_its_new_value(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        client = await world.client()
        await create(client, "t", {"max.message.bytes": "2147483647", "compression.type": "producer"})
        await world.broker.streams.configure("t", {"batch_bytes_max": 5000, "compression": "gzip"})
        assert await described(client, "t") == {"max.message.bytes": "5000", "compression.type": "gzip"}
        await world.broker.streams.configure("t", {"batch_bytes_max": None, "compression": None})
        assert await described(client, "t") == {"compression.type": "producer"}


async def test_lists_without_effect_are_appended_to_and_subtracted_from(tmp_path: Path) -> None:
    name = "leader.replication.throttled.replicas"
    async with world_at(tmp_path) as world:
        client = await world.client()
        await create(client, "t", {name: "0:1"})
        assert await change(client, "t", name, "1:1,0:1", APPEND) == 0
        assert await described(client, "t") == {name: "0:1,1:1"}
        assert await change(client, "t", name, "0:1", SUBTRACT) == 0
        assert await described(client, "t") == {name: "1:1"}
        assert await change(client, "t", name, "*", APPEND) == Code.INVALID_CONFIG


async def test_a_topic_of_a_kafka_with_tiered_storage_keeps_its_retention(tmp_path: Path) -> None:
    """It was refused, and created with the default retention by the first record that MirrorMaker copied."""
    tiered = {"remote.storage.enable": "true", "local.retention.ms": "1000", "retention.ms": "31536000000"}
    async with world_at(tmp_path) as world:
        client = await world.client()
        assert (await create(client, "t", tiered)).error_code == 0
        assert await described(client, "t") == tiered
        assert world.broker.streams.get("t").settings.retention_ms == 31536000000
        for wrong in (
            {"cleanup.policy": "compact"},
            {"local.retention.ms": "31536000001"},
            {"local.retention.ms": "-1"},
            {"retention.bytes": "5", "local.retention.bytes": "6"},
        ):
            assert (await create(client, "wrong", {**tiered, **wrong})).error_code == Code.INVALID_CONFIG, wrong
        assert await change(client, "t", "retention.ms", "999") == Code.INVALID_CONFIG
        assert await described(client, "t") == tiered


async def test_max_message_bytes_has_kafkas_range_and_the_brokers_limits_apply(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        client = await world.client()
        for value, effective in (("0", 1024), ("2147483647", 64 * MB)):
            assert (await create(client, f"t-{value}", {"max.message.bytes": value})).error_code == 0
            assert await described(client, f"t-{value}") == {"max.message.bytes": value}
            assert world.broker.streams.get(f"t-{value}").settings.batch_bytes_max == effective
        assert (await client.produce("t-0", batch(bytes(2000)))).error_code == Code.MESSAGE_TOO_LARGE
        huge = batch(b"x")
        huge[LENGTH_AT : LENGTH_AT + 4] = struct.pack(">i", 64 * MB)
        huge[CRC_AT : CRC_AT + 4] = crc32c(huge[CRC_AT + 4 :]).to_bytes(4, "big")
        refused = await client.produce("t-2147483647", huge)
        assert refused.error_code == Code.MESSAGE_TOO_LARGE
        assert refused.error_message == "a batch of 67,108,876 bytes is over the limit of 67,108,864"
        for value in ("-1", "2147483648", "1_000", "x", "9" * 1000):
            assert (await create(client, "wrong", {"max.message.bytes": value})).error_code == Code.INVALID_CONFIG


async def test_settings_that_contradict_earlier_ones_are_refused_before_they_are_stored(tmp_path: Path) -> None:
    """They were stored first: the change was refused, and the next start of the broker failed."""
    async with world_at(tmp_path) as world:
        client = await world.client()
        await create(client, "t", {"min.compaction.lag.ms": "1000"})
        assert await change(client, "t", "max.compaction.lag.ms", "999") == Code.INVALID_CONFIG
        with pytest.raises(InvalidSetting):
            await world.broker.streams.configure("t", {"compaction_lag_max": 999})
    async with world_at(tmp_path) as world:
        assert await described(await world.client(), "t") == {"min.compaction.lag.ms": "1000"}


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [
        ("compression.gzip.level", "0", Code.INVALID_CONFIG),
        ("compression.gzip.level", "-1", 0),
        ("compression.gzip.level", "10", Code.INVALID_CONFIG),
        ("compression.lz4.level", "0", Code.INVALID_CONFIG),
        ("compression.lz4.level", "18", Code.INVALID_CONFIG),
        ("compression.zstd.level", "-131073", Code.INVALID_CONFIG),
        ("compression.zstd.level", "23", Code.INVALID_CONFIG),
        ("local.retention.bytes", "-3", Code.INVALID_CONFIG),
        ("local.retention.ms", "-2", 0),
        ("remote.log.copy.disable", "x", Code.INVALID_CONFIG),
        ("remote.storage.enable", "maybe", Code.INVALID_CONFIG),
        ("leader.replication.throttled.replicas", "*,0:1", Code.INVALID_CONFIG),
        ("cleanup.policy", "delete,delete", 0),
        ("cleanup.policy", "compact , delete", 0),
        ("compression.type", "GZIP", Code.INVALID_CONFIG),
        ("segment.ms", "0", Code.INVALID_CONFIG),
        ("remote.log.msk.disable.policy", "x", Code.INVALID_CONFIG),
    ],
)
async def test_values_are_validated_as_kafka_validates_them(tmp_path: Path, name: str, value: str, code: int) -> None:
    async with world_at(tmp_path) as world:
        client = await world.client()
        assert (await create(client, "t", {name: value})).error_code == code
        assert await described(client, "t") == ({name: value} if code == 0 else {})
