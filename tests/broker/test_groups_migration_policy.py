"""Which live groups change their protocol: Kafka's `group.consumer.migration.policy`."""

import pytest

from headrace.broker.groups.classic.members import GroupState
from headrace.errors import GroupNotFound
from tests.broker.group_world import World
from tests.broker.mixed_clients import (
    BOTH,
    PARTITIONS,
    ClassicClient,
    NewClient,
    classic_of,
    classic_pair,
    group_of,
    settle,
)


@pytest.mark.parametrize("policy", ["downgrade", "disabled"])
def test_a_classic_group_stays_one_where_no_upgrade_is_allowed(policy: str) -> None:
    world = World({"t": PARTITIONS}, migration_policy=policy)
    pair = classic_pair(world)
    with pytest.raises(GroupNotFound):
        NewClient(world, "n").beat()
    settle(*pair)
    assert classic_of(world).state is GroupState.STABLE
    assert [len(one.owned) for one in pair] == [3, 3]


@pytest.mark.parametrize("policy", ["downgrade", "disabled"])
def test_an_empty_classic_group_is_taken_over_by_the_new_protocol_all_the_same(policy: str) -> None:
    world = World({"t": PARTITIONS}, migration_policy=policy)
    for one in classic_pair(world):
        one.stop()
    new = NewClient(world, "n")
    settle(new)
    assert len(new.owned) == PARTITIONS


@BOTH
@pytest.mark.parametrize("policy", ["upgrade", "disabled"])
def test_classic_members_stay_in_a_consumer_group_that_may_not_downgrade(policy: str, cooperative: bool) -> None:
    world = World({"t": PARTITIONS}, migration_policy=policy)
    new = NewClient(world, "n")
    pair = [ClassicClient(world, cooperative=cooperative) for _ in range(2)]
    settle(new, *pair)
    new.stop()
    settle(*pair)
    assert len(group_of(world).members) == 2
    assert [len(one.owned) for one in pair] == [3, 3]
    world.restart()
    settle(*pair)
    for one in pair:
        one.commit()
    newer = NewClient(world, "n2")
    settle(*pair, newer)
    assert [len(one.owned) for one in (*pair, newer)] == [2, 2, 2]


def test_classic_members_that_were_kept_are_a_classic_group_once_that_is_allowed() -> None:
    world = World({"t": PARTITIONS}, migration_policy="upgrade")
    new, pair = NewClient(world, "n"), [ClassicClient(world) for _ in range(2)]
    settle(new, *pair)
    new.stop()
    settle(*pair)
    world.settings = World(migration_policy="bidirectional").settings
    world.restart()
    pair[1].stop()
    settle(pair[0])
    assert classic_of(world).state is GroupState.STABLE
    assert len(pair[0].owned) == PARTITIONS


def test_the_migration_policy_allows_each_direction_separately() -> None:
    for policy, (up, down) in {
        "bidirectional": (True, True), "upgrade": (True, False), "downgrade": (False, True), "disabled": (False, False),
    }.items():  # fmt: skip
        settings = World(migration_policy=policy).settings
        assert (settings.can_upgrade, settings.can_downgrade) == (up, down)
