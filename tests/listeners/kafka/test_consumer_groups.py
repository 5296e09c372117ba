"""Heartbeats of consumer groups (KIP-848): codes that clients expect, and groups that survive a restart."""

from pathlib import Path
from typing import Any

import pytest

from headrace.broker.groups.classic.consumer_protocol import decode_assignment, encode_assignment
from headrace.broker.groups.coordinator import Groups
from headrace.errors import DiskFull
from headrace.listeners.kafka.errors import Code
from headrace.wire.kafka.apis import Api
from tests.broker.mixed_clients import subscription
from tests.listeners.kafka.world import Client, topic_at, world_at


async def beat(client: Client, member_id: str, epoch: int = 0, **fields: Any) -> Any:
    asked = {"rebalance_timeout": 60_000, "subscribed_topic_names": ["t"], "topic_partitions": [], **fields}
    return await client.call(
        Api.CONSUMER_GROUP_HEARTBEAT, 1, group_id="g", member_id=member_id, member_epoch=epoch, **asked
    )


async def join(client: Client, member_id: str = "", metadata: bytes = subscription()) -> Any:
    return await client.call(
        Api.JOIN_GROUP, 3, group_id="g", member_id=member_id, session_timeout=60_000, rebalance_timeout=60_000,
        protocol_type="consumer", protocols=[{"name": "range", "metadata": metadata}],
    )  # fmt: skip


async def sync(client: Client, joined: Any, **assignments: bytes) -> Any:
    who = {"member_id": joined.member_id, "generation_id": joined.generation_id}
    given = [{"member_id": joined.member_id, "assignment": one} for one in assignments.values()]
    return await client.call(Api.SYNC_GROUP, 3, group_id="g", assignments=given, **who)


async def described(client: Client) -> Any:
    [group] = (await client.call(Api.CONSUMER_GROUP_DESCRIBE, 1, group_ids=["g"])).groups
    return group


async def test_an_instance_id_in_use_is_unreleased_until_its_member_leaves(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (world, client):
        assert (await beat(client, "a", instance_id="one")).error_code == Code.NONE
        assert (await beat(client, "b", instance_id="one")).error_code == Code.UNRELEASED_INSTANCE_ID
    async with world_at(tmp_path) as world:
        client = await world.client()
        assert (await beat(client, "b", instance_id="one")).error_code == Code.UNRELEASED_INSTANCE_ID
        assert (await beat(client, "a", -2, instance_id="one")).error_code == Code.NONE
        assert (await beat(client, "b", instance_id="one")).error_code == Code.NONE


async def test_a_member_that_lost_its_instance_id_is_fenced(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (_, client):
        await beat(client, "a", instance_id="one")
        await beat(client, "a", -2, instance_id="one")
        assert (await beat(client, "b", instance_id="one")).error_code == Code.NONE
        assert (await beat(client, "a", 1, instance_id="one")).error_code == Code.FENCED_INSTANCE_ID
        assert (await beat(client, "a", 1, instance_id="two")).error_code == Code.UNKNOWN_MEMBER_ID
        assert (await beat(client, "b", instance_id="two")).error_code == Code.INVALID_REQUEST


async def test_a_group_is_described_the_same_after_a_restart(tmp_path: Path) -> None:
    async with topic_at(tmp_path, partitions=3) as (world, client):
        joined = await beat(client, "a", instance_id="one", rack_id="r", server_assignor="range")
        before = await described(client)
        assert (before.group_state, before.members[0].rack_id) == ("Stable", "r")
    async with world_at(tmp_path) as world:
        client = await world.client()
        assert await described(client) == before
        same = await beat(client, "a", joined.member_epoch, subscribed_topic_names=None, topic_partitions=None)
        assert (same.error_code, same.member_epoch, same.assignment) == (Code.NONE, joined.member_epoch, None)
        assert (await described(client)).group_epoch == before.group_epoch


async def test_a_heartbeat_on_a_full_disk_is_retriable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with topic_at(tmp_path) as (_, client):
        with monkeypatch.context() as broken:
            broken.setattr(Groups, "when_kept", lambda self, group_id, answer: answer(DiskFull("no space left")))
            assert (await beat(client, "a")).error_code == Code.COORDINATOR_NOT_AVAILABLE
        assert (await beat(client, "a")).error_code == Code.NONE


async def test_a_classic_group_is_upgraded_by_a_consumer_member_and_downgraded_without(
    tmp_path: Path,
) -> None:
    async with topic_at(tmp_path, partitions=2) as (_, client):
        joined = await join(client)
        who = {"group_id": "g", "member_id": joined.member_id}
        assert (await sync(client, joined, all=encode_assignment({("t", 0), ("t", 1)}, 0))).error_code == Code.NONE
        new = await beat(client, "n")
        assert (new.error_code, new.assignment.topic_partitions) == (Code.NONE, [])
        generation = {"generation_id": joined.generation_id}
        assert (await client.call(Api.HEARTBEAT, 3, **who, **generation)).error_code == Code.REBALANCE_IN_PROGRESS
        joined = await join(client, joined.member_id)
        assert (joined.generation_id, joined.leader, joined.members) == (new.member_epoch, "", [])
        assert len(decode_assignment((await sync(client, joined)).assignment).partitions) == 1
        kinds = {one.member_id: one.member_type for one in (await described(client)).members}
        assert kinds == {joined.member_id: 0, "n": 1}
        new = await beat(client, "n", new.member_epoch)
        assert len(new.assignment.topic_partitions[0].partitions) == 1
        assert (await beat(client, "n", -1)).error_code == Code.NONE
        generation = {"generation_id": joined.generation_id}
        assert (await client.call(Api.HEARTBEAT, 3, **who, **generation)).error_code == Code.REBALANCE_IN_PROGRESS
        assert (await described(client)).error_code == Code.GROUP_ID_NOT_FOUND
        assert (await join(client, joined.member_id)).leader == joined.member_id


async def test_members_of_both_protocols_leave_with_their_own_request(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (_, client):
        await beat(client, "n")
        members = [(await join(client)).member_id for _ in range(2)]
        one = await client.call(Api.LEAVE_GROUP, 2, group_id="g", member_id=members[0])
        two = await client.call(Api.LEAVE_GROUP, 3, group_id="g", members=[{"member_id": name} for name in members])
        assert one.error_code == Code.NONE
        assert [each.error_code for each in two.members] == [Code.UNKNOWN_MEMBER_ID, Code.NONE]
        assert [each.member_id for each in (await described(client)).members] == ["n"]


async def test_a_classic_group_with_an_unreadable_subscription_is_not_upgraded(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (_, client):
        await join(client, metadata=b"?")
        refused = await beat(client, "n")
        assert refused.error_code == Code.GROUP_ID_NOT_FOUND
        assert "stays classic" in refused.error_message
        assert (await beat(client, "n", 3)).error_code == Code.UNKNOWN_MEMBER_ID


async def test_a_classic_member_on_a_full_disk_gets_a_retriable_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with topic_at(tmp_path) as (_, client):
        await beat(client, "n")
        with monkeypatch.context() as broken:
            broken.setattr(Groups, "when_kept", lambda self, group_id, answer: answer(DiskFull("no space left")))
            assert (await join(client)).error_code == Code.COORDINATOR_NOT_AVAILABLE
        joined = await join(client)
        with monkeypatch.context() as broken:
            broken.setattr(Groups, "when_kept", lambda self, group_id, answer: answer(DiskFull("no space left")))
            assert (await sync(client, joined)).error_code == Code.COORDINATOR_NOT_AVAILABLE
        assert (await sync(client, joined)).error_code == Code.NONE
