"""Group configs under Kafka's names."""

import asyncio
from pathlib import Path

import pytest

from headrace.broker.groups.config import GroupConfig, decode, encode
from headrace.broker.groups.config_store import GroupConfigs
from headrace.broker.groups.consumer.group import Heartbeat
from headrace.broker.groups.member_budget import MemberBudget
from headrace.broker.groups.share.groups import ShareGroups
from headrace.clock import ManualClock
from headrace.listeners.kafka.admin.config_types import GROUP, SOURCE_DEFAULT, TOPIC
from headrace.listeners.kafka.errors import Code
from headrace.listeners.kafka.groups.configs import SETTINGS
from headrace.record import codec as records
from headrace.wire.kafka.apis import Api
from tests.broker.group_world import ManualTimers
from tests.broker.group_world import World as GroupWorld
from tests.listeners.kafka.test_share_offsets import beat, take
from tests.listeners.kafka.world import Client, batch, topic_at, world_at


async def configure(client: Client, api: Api, **values: str | None) -> tuple[int, str | None]:
    changes: list[dict[str, object]] = [
        {"name": name.replace("_", "."), "value": value} for name, value in values.items()
    ]
    if api is Api.INCREMENTAL_ALTER_CONFIGS:
        changes = [{**one, "config_operation": 1 if one["value"] is None else 0} for one in changes]
    asked = [{"resource_type": GROUP, "resource_name": "s", "configs": changes}]
    [answer] = (await client.call(api, 1, resources=asked)).responses
    return answer.error_code, answer.error_message


async def configured(client: Client) -> dict[str, str]:
    """The configs that differ from the defaults."""
    asked = [{"resource_type": GROUP, "resource_name": "s", "configuration_keys": None}]
    [answer] = (await client.call(Api.DESCRIBE_CONFIGS, 4, resources=asked)).results
    assert len(answer.configs) == len(SETTINGS)
    return {one.name: one.value for one in answer.configs if one.config_source != SOURCE_DEFAULT}


async def test_concurrent_changes_of_a_group_are_both_applied(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        configs = world.context.coordination.group_configs
        await asyncio.gather(configs.change("s", {"lock_ms": 20_000}), configs.change("s", {"attempts_max": 7}))
        assert configs.get("s") == GroupConfig(lock_ms=20_000, attempts_max=7)


async def test_group_configs_apply_to_their_group_and_survive_a_restart(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        client = await world.client()
        assert await configured(client) == {}
        change = {"share_auto_offset_reset": "earliest", "share_record_lock_duration_ms": "15000"}
        more = {"share_heartbeat_interval_ms": "7000", "share_delivery_count_limit": "2"}
        more |= {"share_renew_acknowledge_enable": "false"}
        assert await configure(client, Api.INCREMENTAL_ALTER_CONFIGS, **change, **more) == (0, None)
    async with topic_at(tmp_path) as (world, client):
        shown = await configured(client)
        assert shown == {name.replace("_", "."): value for name, value in {**change, **more}.items()}
        await client.produce("t", batch(b"x"))
        joined = await client.call(
            Api.SHARE_GROUP_HEARTBEAT, 1, group_id="s", member_id="m", member_epoch=0, subscribed_topic_names=["t"]
        )
        assert joined.heartbeat_interval == 7000
        assert await take(world, client) == [(0, 0)], "from the start"
        share = next(iter(world.broker.coordination.shares.known("s").partitions.values()))
        assert (share.settings.lock_ms, share.settings.attempts_max) == (15_000, 2)
        assert await configure(client, Api.INCREMENTAL_ALTER_CONFIGS, share_delivery_count_limit=None) == (0, None)
        assert share.settings.attempts_max == 5, "reset at once"
        assert await configure(client, Api.ALTER_CONFIGS, share_session_timeout_ms="50000") == (0, None)
        assert await configured(client) == {"share.session.timeout.ms": "50000"}, "configs that are not named are reset"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("share_auto_offset_reset", "middle"),
        ("share_auto_offset_reset", "by_duration:an hour"),
        ("share_auto_offset_reset", "by_duration:-PT1H"),
        ("share_auto_offset_reset", "by_duration:PT"),
        ("share_auto_offset_reset", "by_duration:"),
        ("share_record_lock_duration_ms", "14999"),
        ("share_delivery_count_limit", "11"),
        ("share_isolation_level", "read_nothing"),
        ("consumer_session_timeout_ms", "44999"),
        ("consumer_heartbeat_interval_ms", "15001"),
        ("share_partition_max_record_locks", "many"),
        ("share_nonsense", "1"),
        ("share_renew_acknowledge_enable", "maybe"),
        ("share_assignment_interval_ms", "15001"),
        ("consumer_assignor_offload_enable", "1"),
    ],
)
async def test_an_invalid_group_config_changes_nothing(tmp_path: Path, name: str, value: str) -> None:
    async with world_at(tmp_path) as world:
        client = await world.client()
        change = {"share_heartbeat_interval_ms": "7000", name: value}
        code, message = await configure(client, Api.INCREMENTAL_ALTER_CONFIGS, **change)
        assert code == Code.INVALID_CONFIG
        assert message
        assert await configured(client) == {}


async def test_lock_durations_are_per_group(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        await world.topic("t")
        await (await world.client()).produce("t", batch(b"x"))
        clock = ManualClock()
        timers = ManualTimers(clock)
        configs = GroupConfigs(world.broker.shard)
        shares = ShareGroups(world.broker.shard, clock, timers, dict, MemberBudget(1 << 20), configs)
        partition = world.broker.streams.get("t").partition(0)
        held = {}
        for group_id, lock_ms in (("slow", 60_000), ("quick", 15_000)):
            await configs.change(group_id, {"start": "earliest", "lock_ms": lock_ms})
            group = shares.group(group_id)
            await shares.begin(group, [partition])
            held[group_id] = shares.partition(group, partition.log_id)
            assert held[group_id].acquire("m", 0, 1, 1, shares.lock_deadline(group))
        for seconds, locked in ((14, [1, 1]), (2, [1, 0]), (40, [1, 0]), (5, [0, 0])):
            timers.advance(seconds)
            assert [one.locked for one in held.values()] == locked
        shares.close()


def test_group_configs_stored_in_the_first_format_are_still_read() -> None:
    assert decode(b"earliest") == GroupConfig(start="earliest")
    assert decode(encode(GroupConfig(lock_ms=20_000))) == GroupConfig(lock_ms=20_000)


async def test_configured_groups_are_listed_before_they_exist(tmp_path: Path) -> None:
    """kafka-configs reports an unlisted group as one without configs."""
    async with topic_at(tmp_path) as (world, client):

        async def listed(version: int, *kinds: int) -> list[str]:
            asked = {"resource_types": list(kinds)} if version else {}
            found = (await client.call(Api.LIST_CONFIG_RESOURCES, version, **asked)).config_resources
            return [one.resource_name for one in found]

        assert await listed(1, GROUP) == []
        await configure(client, Api.INCREMENTAL_ALTER_CONFIGS, share_isolation_level="read_committed")
        assert await listed(1, GROUP) == ["s"]
        assert await listed(1, TOPIC) == ["t"]
        assert set(await listed(1)) == {"t", "s", str(world.context.node_id)}
        assert await listed(0) == [], "version 0 lists client metrics only"
        await configure(client, Api.INCREMENTAL_ALTER_CONFIGS, share_isolation_level=None)
        assert await listed(1, GROUP) == []


async def test_session_timeout_and_heartbeat_interval_of_a_consumer_group_can_be_set(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        client = await world.client()
        told = {"consumer_session_timeout_ms": "50000", "consumer_heartbeat_interval_ms": "7000"}
        assert await configure(client, Api.INCREMENTAL_ALTER_CONFIGS, **told) == (0, None)
    async with topic_at(tmp_path) as (world, client):
        joined = await client.call(
            Api.CONSUMER_GROUP_HEARTBEAT, 1, group_id="s", member_id="m", member_epoch=0, rebalance_timeout=9000,
            subscribed_topic_names=["t"], topic_partitions=[],
        )  # fmt: skip
        assert (joined.error_code, joined.heartbeat_interval) == (0, 7000)


def test_a_consumer_group_member_expires_after_the_groups_session_timeout() -> None:
    world = GroupWorld({"t": 1})
    world.configs["g"] = GroupConfig(consumer_session_timeout_ms=60_000)
    for group in ("g", "other"):
        world.groups.heartbeat(group, Heartbeat(member_id="m", epoch=0, topics=frozenset({"t"})))
    world.timers.advance(50)
    assert [len(world.groups.consumer(group).members) for group in ("g", "other")] == [1, 0]
    world.timers.advance(11)
    assert not world.groups.consumer("g").members


async def test_assignment_configs_are_returned_as_set_and_change_nothing(tmp_path: Path) -> None:
    """They were described as defaults, so tools that compare configs set them again and again. Assignments are computed
    whenever something changes."""
    told = {f"{kind}_assignment_interval_ms": "1000" for kind in ("consumer", "share")}
    told |= {f"{kind}_assignor_offload_enable": "true" for kind in ("consumer", "share")}
    shown = {name.replace("_", "."): value for name, value in told.items()}
    async with world_at(tmp_path) as world:
        client = await world.client()
        for api in (Api.INCREMENTAL_ALTER_CONFIGS, Api.ALTER_CONFIGS):
            assert await configure(client, api, **told) == (0, None)
            assert await configured(client) == shown
    async with world_at(tmp_path) as world:
        assert await configured(await world.client()) == shown


async def test_append_and_subtract_are_refused_for_group_configs(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        client = await world.client()
        for operation in (2, 3):
            change = {"name": "share.isolation.level", "value": "read_committed", "config_operation": operation}
            asked = [{"resource_type": GROUP, "resource_name": "s", "configs": [change]}]
            [answer] = (await client.call(Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=asked)).responses
            assert answer.error_code == Code.INVALID_CONFIG
        assert await configured(client) == {}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("PT0S", 0), ("PT1.5S", 1.5), ("P1D", 86400), ("P2DT3H4M5S", 183845), ("pt10m", 600), ("PT36H", 129600)],
)
def test_a_share_group_starts_at_a_duration_in_the_past(text: str, seconds: float) -> None:
    assert GroupConfig().changed({"start": f"by_duration:{text}"}).start_age_ms == 1000 * seconds


async def test_a_share_group_starts_with_the_records_of_the_last_hour(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (world, client):
        now_ms = world.broker.clock.now_ms()
        for age_ms in (7_200_000, 3_900_000, 1_800_000, 0):
            await client.produce("t", records.build([(None, b"x", (), now_ms - age_ms)]))
        told = {"share_auto_offset_reset": "by_duration:PT1H"}
        assert await configure(client, Api.INCREMENTAL_ALTER_CONFIGS, **told) == (0, None)
        await beat(client)
        assert await take(world, client) == [(2, 3)]


async def test_a_share_group_starts_at_the_end_if_all_records_are_older(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (world, client):
        await client.produce("t", batch(b"old"))
        await configure(client, Api.INCREMENTAL_ALTER_CONFIGS, share_auto_offset_reset="by_duration:PT1S")
        await beat(client)
        assert await take(world, client) == []
        await client.produce("t", batch(b"new"))
        assert await take(world, client) == [(1, 1)]
