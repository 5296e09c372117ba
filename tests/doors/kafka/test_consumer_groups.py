"""Heartbeats of the KIP-848 protocol at the door: codes that its clients know, and a group that a restart kept."""

from pathlib import Path
from typing import Any

import pytest

from headrace.broker.groups.coordinator import Groups
from headrace.doors.kafka.errors import Code
from headrace.errors import DiskFull
from headrace.wire.kafka.apis import Api
from tests.doors.kafka.world import Client, world_at


async def beat(client: Client, member_id: str, epoch: int = 0, **fields: Any) -> Any:
    asked = {"rebalance_timeout": 60_000, "subscribed_topic_names": ["t"], "topic_partitions": [], **fields}
    return await client.call(
        Api.CONSUMER_GROUP_HEARTBEAT, 1, group_id="g", member_id=member_id, member_epoch=epoch, **asked
    )


async def described(client: Client) -> Any:
    [group] = (await client.call(Api.CONSUMER_GROUP_DESCRIBE, 1, group_ids=["g"])).groups
    return group


async def test_an_instance_that_is_in_use_is_unreleased_until_it_is_left(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        await world.topic("t")
        client = await world.client()
        assert (await beat(client, "a", instance_id="one")).error_code == Code.NONE
        assert (await beat(client, "b", instance_id="one")).error_code == Code.UNRELEASED_INSTANCE_ID
    async with world_at(tmp_path) as world:
        client = await world.client()
        assert (await beat(client, "b", instance_id="one")).error_code == Code.UNRELEASED_INSTANCE_ID
        assert (await beat(client, "a", -2, instance_id="one")).error_code == Code.NONE
        assert (await beat(client, "b", instance_id="one")).error_code == Code.NONE


async def test_who_lost_its_instance_to_another_is_fenced(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        await world.topic("t")
        client = await world.client()
        await beat(client, "a", instance_id="one")
        await beat(client, "a", -2, instance_id="one")
        assert (await beat(client, "b", instance_id="one")).error_code == Code.NONE
        assert (await beat(client, "a", 1, instance_id="one")).error_code == Code.FENCED_INSTANCE_ID
        assert (await beat(client, "a", 1, instance_id="two")).error_code == Code.UNKNOWN_MEMBER_ID
        assert (await beat(client, "b", instance_id="two")).error_code == Code.INVALID_REQUEST


async def test_a_group_is_described_after_a_restart_as_before(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        await world.topic("t", 3)
        client = await world.client()
        joined = await beat(client, "a", instance_id="one", rack_id="r", server_assignor="range")
        before = await described(client)
        assert (before.group_state, before.members[0].rack_id) == ("Stable", "r")
    async with world_at(tmp_path) as world:
        client = await world.client()
        assert await described(client) == before
        same = await beat(client, "a", joined.member_epoch, subscribed_topic_names=None, topic_partitions=None)
        assert (same.error_code, same.member_epoch, same.assignment) == (Code.NONE, joined.member_epoch, None)
        assert (await described(client)).group_epoch == before.group_epoch


async def test_a_heartbeat_that_the_disk_has_no_room_for_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with world_at(tmp_path) as world:
        await world.topic("t")
        client = await world.client()
        with monkeypatch.context() as broken:
            broken.setattr(Groups, "when_kept", lambda self, group_id, answer: answer(DiskFull("no space left")))
            assert (await beat(client, "a")).error_code == Code.COORDINATOR_NOT_AVAILABLE
        assert (await beat(client, "a")).error_code == Code.NONE
