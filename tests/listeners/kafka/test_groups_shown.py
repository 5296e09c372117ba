"""Describing and listing groups: DescribeGroups finds only classic groups, ListGroups all kinds."""

from pathlib import Path

import pytest

from headrace.listeners.kafka.errors import Code
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.group_members import (
    beat_consumer,
    beat_share,
    classic_member,
    commit,
    sync_classic,
)
from tests.listeners.kafka.world import Client, World, world_at


async def groups_of_every_kind(world: World) -> Client:
    await world.topic("t")
    client = await world.client()
    await sync_classic(client, "classic", await classic_member(client, "classic"))
    await classic_member(client, "rebalancing")
    await beat_consumer(client, "new")
    await beat_share(client, "share")
    await commit(client, "simple")
    return client


@pytest.mark.parametrize("version", [0, 5, 6])
async def test_describe_groups_finds_only_classic_groups(tmp_path: Path, version: int) -> None:
    async with world_at(tmp_path) as world:
        client = await groups_of_every_kind(world)
        asked = ["new", "share", "nobody"]
        found = (await client.call(Api.DESCRIBE_GROUPS, version, groups=asked)).groups
        code = Code.GROUP_ID_NOT_FOUND if version >= 6 else Code.NONE
        assert [(one.error_code, one.group_state, one.protocol_type, one.members) for one in found] == [
            (code, "Dead", "", [])
        ] * 3
        if version >= 6:
            why = ["is not a classic group", "is not a classic group", "not found"]
            assert [one.error_message for one in found] == [
                f"Group {name} {reason}." for name, reason in zip(asked, why, strict=True)
            ]


async def test_member_metadata_is_described_only_for_a_stable_group(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        client = await groups_of_every_kind(world)
        asked = ["classic", "rebalancing", "simple"]
        found = (await client.call(Api.DESCRIBE_GROUPS, 6, groups=asked)).groups
        assert [one.group_state for one in found] == ["Stable", "CompletingRebalance", "Empty"]
        said = [(bool(one.member_metadata), one.member_assignment) for group in found for one in group.members]
        assert said == [(True, b"mine"), (False, b"")]


@pytest.mark.parametrize(
    ("states", "kinds", "names"),
    [
        ((), (), {"classic", "rebalancing", "new", "share", "simple"}),
        (("stable",), (), {"classic", "new", "share"}),
        (("EMPTY",), (), {"simple"}),
        (("CompletingRebalance", "Dead"), (), {"rebalancing"}),
        (("nonsense",), (), set()),
        ((), ("Classic",), {"classic", "rebalancing", "simple"}),
        ((), ("CONSUMER",), {"new"}),
        ((), ("share", "streams"), {"share"}),
        ((), ("nonsense",), set()),
        (("Stable",), ("classic", "share"), {"classic", "share"}),
    ],
)
async def test_groups_are_listed_by_state_and_kind(
    tmp_path: Path, states: tuple[str, ...], kinds: tuple[str, ...], names: set[str]
) -> None:
    async with world_at(tmp_path) as world:
        client = await groups_of_every_kind(world)
        listed = await client.call(Api.LIST_GROUPS, 5, states_filter=states, types_filter=kinds)
        assert {one.group_id for one in listed.groups} == names
