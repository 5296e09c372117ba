"""A group of both protocols: back to the classic one, static members in both, and restarts of the broker."""

import msgspec
import pytest

from headrace.broker.groups.classic.members import GroupState
from headrace.broker.groups.consumer.group import Heartbeat
from headrace.broker.groups.consumer.store import MEMBERS
from headrace.errors import (
    FencedInstance,
    IllegalGeneration,
    RebalanceInProgress,
    UnknownMember,
    UnreleasedInstance,
)
from tests.broker.group_world import World
from tests.broker.mixed_clients import (
    BOTH,
    GROUP,
    PARTITIONS,
    ClassicClient,
    NewClient,
    check_owners,
    classic_of,
    classic_pair,
    group_of,
    mixed,
    refused_sync,
    settle,
    subscription,
)


@pytest.fixture
def world() -> World:
    return World({"t": PARTITIONS})


# From new to classic.


@BOTH
def test_the_group_is_classic_again_when_the_last_of_the_new_protocol_leaves(world: World, cooperative: bool) -> None:
    pair, new = mixed(world, cooperative=cooperative)
    generation = pair[0].generation
    new.stop()
    group = classic_of(world)
    assert classic_of(world).state is GroupState.PREPARING
    assert group.generation == generation
    for one in pair:
        one.commit()
        with pytest.raises(RebalanceInProgress):
            one.beat()
    settle(*pair)
    assert group.state is GroupState.STABLE
    assert group.generation == generation + 1
    assert [len(one.owned) for one in pair] == [3, 3]


@BOTH
def test_the_group_is_classic_again_when_the_session_of_the_last_of_the_new_protocol_ends(
    world: World, cooperative: bool
) -> None:
    pair, new = mixed(world, cooperative=cooperative)
    for _ in range(6):
        world.timers.advance(8)
        for one in pair:
            one.step()
    settle(*pair)
    assert [len(one.owned) for one in pair] == [3, 3]
    classic_of(world)
    new.owned = frozenset()  # it noticed, too
    settle(*pair, new)
    assert [len(one.owned) for one in (*pair, new)] == [2, 2, 2], "and when it is back, it is let in"


def test_members_in_the_midst_of_a_change_commit_and_join_again_when_the_group_is_classic_again(world: World) -> None:
    pair = classic_pair(world)
    new = NewClient(world, "n")
    new.beat()
    pair[0].step()
    pair[0].step()  # it is at the new epoch, the other one is not
    assert pair[0].generation != pair[1].generation
    new.stop()
    for one in pair:
        one.commit()
        with pytest.raises(RebalanceInProgress):
            one.beat()
    settle(*pair)
    assert [len(one.owned) for one in pair] == [3, 3]
    with pytest.raises(IllegalGeneration):
        world.groups.check_commit(GROUP, pair[0].member_id, None, pair[0].generation - 1)


def test_a_sync_after_a_downgrade_is_answered_with_rejoin(world: World) -> None:
    new = NewClient(world, "n")
    new.beat()
    joined, one = world.join(GROUP, protocols=(("range", subscription()),)).result, ClassicClient(world)
    one.member_id, one.generation = joined.member_id, joined.generation
    new.stop()
    assert isinstance(refused_sync(world, one), RebalanceInProgress)


def test_after_a_downgrade_a_member_that_does_not_rejoin_is_removed(world: World) -> None:
    pair, new = mixed(world)
    new.stop()
    pair[0].step()
    pair[0].step()
    world.timers.advance(11)
    pair[0].step()
    assert len(pair[0].owned) == PARTITIONS
    assert set(classic_of(world).members) == {pair[0].member_id}


def test_a_group_can_be_upgraded_again_before_all_members_have_rejoined(world: World) -> None:
    pair, new = mixed(world, cooperative=True)
    new.stop()
    again = NewClient(world, "again")
    again.beat()
    check_owners([*pair, again])
    settle(*pair, again)
    assert [len(one.owned) for one in (*pair, again)] == [2, 2, 2]


def test_classic_members_that_leave_do_not_end_the_new_protocol(world: World) -> None:
    pair, new = mixed(world)
    for one in pair:
        one.stop()
    settle(new)
    assert len(new.owned) == PARTITIONS
    new.stop()
    assert not group_of(world).members


# Static members.


@BOTH
def test_a_static_member_keeps_its_partitions_when_it_rejoins_with_the_other_protocol(
    world: World, cooperative: bool
) -> None:
    old = [ClassicClient(world, cooperative=cooperative, instance_id=name) for name in "ab"]
    settle(*old)
    held = [one.owned for one in old]
    old[0].stop()
    new = NewClient(world, "n", instance_id="a")
    settle(new, old[1])
    assert [new.owned, old[1].owned] == held
    with pytest.raises(FencedInstance):
        old[0].beat()
    new.stop()  # for a moment
    assert len(group_of(world).members) == 2
    back = ClassicClient(world, cooperative=cooperative, instance_id="a")
    settle(back, old[1])
    assert len(classic_of(world).members) == 2
    assert [len(back.owned), len(old[1].owned)] == [3, 3]


def test_a_static_member_takes_its_place_from_one_of_the_new_protocol_that_has_not_left(world: World) -> None:
    new, other = NewClient(world, "n", instance_id="a"), NewClient(world, "o")
    settle(new, other)
    held, new.owned = new.owned, frozenset()
    old = ClassicClient(world, instance_id="a")
    settle(old, other)
    assert old.owned == held
    with pytest.raises(FencedInstance):
        new.beat()


def test_a_static_member_of_the_new_protocol_that_has_not_left_keeps_its_place_from_another(world: World) -> None:
    NewClient(world, "n", instance_id="a").beat()
    ClassicClient(world).step()
    with pytest.raises(UnreleasedInstance):
        NewClient(world, "thief", instance_id="a").beat()


def test_a_static_member_is_known_by_its_instance_in_a_group_of_both(world: World) -> None:
    NewClient(world, "n").beat()
    first, second = ClassicClient(world, instance_id="a"), ClassicClient(world, instance_id="a")
    first.step()
    second.step()
    with pytest.raises(FencedInstance):
        first.beat()
    protocols = (("range", subscription()),)
    with pytest.raises(FencedInstance):
        _ = world.join(GROUP, first.member_id, instance_id="a", protocols=protocols).result
    with pytest.raises(UnknownMember):
        _ = world.join(GROUP, first.member_id, instance_id="b", protocols=protocols).result
    with pytest.raises(FencedInstance):
        world.groups.known_classic(GROUP).leave(first.member_id, "a")
    assert world.groups.known_classic(GROUP).leave("", "a") == second.member_id
    assert set(group_of(world).members) == {"n"}


# Restarts.


@BOTH
def test_classic_members_do_not_notice_a_restart(world: World, cooperative: bool) -> None:
    pair, new = mixed(world, cooperative=cooperative)
    before = [(one.owned, one.member_id) for one in (*pair, new)]
    world.restart()
    for one in pair:
        one.beat()
        one.commit()
    settle(*pair, new)
    assert [(one.owned, one.member_id) for one in (*pair, new)] == before
    world.restart()
    new.stop()
    settle(*pair)
    assert [len(one.owned) for one in pair] == [3, 3]
    world.restart()
    assert len(classic_of(world).members) == 2


def test_a_classic_member_only_gets_assignments_that_are_durable(world: World) -> None:
    pair = classic_pair(world)
    world.journal.hold = True
    world.groups.heartbeat(GROUP, Heartbeat(member_id="n", epoch=0, topics=frozenset("t")))
    pair[0].step()
    answer = world.join(GROUP, pair[0].member_id, protocols=(("range", subscription()),))
    assert answer.waiting
    world.journal.sync()
    assert answer.result.generation == group_of(world).epoch


def test_a_crash_in_the_midst_of_the_change_leaves_one_group(world: World) -> None:
    pair = classic_pair(world)
    classic = dict(world.journal.tables["groups"])
    new = NewClient(world, "n")
    new.beat()
    world.journal.tables["groups"] = classic
    world.restart()
    settle(*pair, new)
    assert [len(one.owned) for one in (*pair, new)] == [2, 2, 2]
    assert not world.journal.items("groups")


def test_members_that_an_older_broker_wrote_are_of_the_new_protocol(world: World) -> None:
    new = NewClient(world, "n")
    new.beat()
    [(key, value)] = world.journal.items(MEMBERS)
    world.journal.tables[MEMBERS][key] = msgspec.msgpack.encode(msgspec.msgpack.decode(value)[:8])
    world.restart()
    new.beat()
    assert group_of(world).members["n"].classic is None
