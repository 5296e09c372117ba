"""A group goes from the classic protocol to the new one while its members are restarted one by one."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.groups.classic.consumer_protocol import encode_assignment
from headrace.broker.groups.classic.group import ClassicGroup
from headrace.broker.groups.consumer.group import ConsumerGroup, Heartbeat
from headrace.errors import (
    GroupFull,
    GroupNotFound,
    HeadraceError,
    IllegalGeneration,
    InconsistentProtocol,
    InvalidInput,
    InvalidSessionTimeout,
    MemberIdRequired,
    RebalanceInProgress,
    StaleMemberEpoch,
    UnknownMember,
)
from tests.broker.group_world import World
from tests.broker.mixed_clients import (
    BOTH,
    GROUP,
    PARTITIONS,
    AnyClient,
    ClassicClient,
    NewClient,
    check_owners,
    classic_of,
    classic_pair,
    group_of,
    join_again,
    mixed,
    refused_sync,
    settle,
    subscription,
)


@pytest.fixture
def world() -> World:
    return World({"t": PARTITIONS})


# From classic to new.


@BOTH
def test_classic_members_keep_their_partitions_when_the_first_consumer_protocol_member_joins(
    world: World, cooperative: bool
) -> None:
    pair = classic_pair(world, cooperative=cooperative)
    held = [one.owned for one in pair]
    new = NewClient(world, "n")
    new.beat()
    group = group_of(world)
    assert new.owned == frozenset(), "all of it is in use"
    assert [frozenset(group.members[one.member_id].assigned) for one in pair] == held
    for one in pair:
        one.commit()
        with pytest.raises(RebalanceInProgress):
            one.beat()
        one.commit()


@BOTH
def test_classic_members_revoke_the_partitions_that_a_consumer_protocol_member_gets(
    world: World, cooperative: bool
) -> None:
    pair, new = mixed(world, cooperative=cooperative)
    assert [len(one.owned) for one in (*pair, new)] == [2, 2, 2]
    group = group_of(world)
    assert group.state == "Stable"
    for one in pair:
        one.beat()
        assert one.generation == group.epoch
        one.commit()
    new.commit()


def test_a_cooperative_member_keeps_its_remaining_partitions_during_a_rebalance(world: World) -> None:
    pair = classic_pair(world, cooperative=True)
    before = pair[0].owned
    new = NewClient(world, "n")
    new.beat()
    pair[0].step()  # its heartbeat is answered with rejoin
    pair[0].step()
    assert pair[0].owned < before, "at the generation it had"
    assert pair[0].wants_join
    with pytest.raises(RebalanceInProgress):
        pair[0].beat()
    new.beat()
    assert not new.owned, "it has not said that it gave anything up"
    pair[0].step()
    pair[0].beat()
    new.beat()
    assert len(new.owned) == 1


@BOTH
def test_a_waiting_member_gets_its_partitions_when_all_of_them_are_free(world: World, cooperative: bool) -> None:
    pair, new = mixed(world, cooperative=cooperative)
    new.stop()
    settle(*pair)
    assert [len(one.owned) for one in pair] == [3, 3]
    holder = NewClient(world, "h")
    settle(*pair, holder)
    late = ClassicClient(world, cooperative=cooperative)
    late.step()
    late.step()
    assert late.owned == frozenset()
    late.beat()  # nothing to do yet
    for one in (*pair, holder):
        for _ in range(4):
            one.step()
    with pytest.raises(RebalanceInProgress):
        late.beat()
    settle(late, *pair, holder)
    assert sorted(len(one.owned) for one in (late, *pair, holder)) == [1, 1, 2, 2]


def test_a_new_classic_member_may_join_a_group_of_the_new_protocol(world: World) -> None:
    new, old = NewClient(world, "n"), ClassicClient(world)
    settle(new, old)
    assert [len(new.owned), len(old.owned)] == [3, 3]
    joined = world.join(GROUP, protocols=(("range", subscription()),)).result
    assert (joined.leader, joined.members, joined.protocol) == ("", (), "range")


def test_an_id_is_required_where_the_client_can_take_one(world: World) -> None:
    NewClient(world, "n").beat()
    protocols = (("range", subscription()),)
    with pytest.raises(MemberIdRequired) as required:
        _ = world.join(GROUP, id_required=True, protocols=protocols).result
    joined = world.join(GROUP, required.value.member_id, id_required=True, protocols=protocols).result
    assert joined.member_id == required.value.member_id


@pytest.mark.parametrize("cooperative", [False, True])
def test_a_rebalance_in_progress_continues_in_the_consumer_protocol(world: World, cooperative: bool) -> None:
    pair = classic_pair(world, cooperative=cooperative)
    third = ClassicClient(world, cooperative=cooperative)
    third.step()
    third.step()  # waits in its join for the others
    pair[0].step()
    pair[0].step()  # so does the first
    new = NewClient(world, "n")
    new.beat()
    assert not new.owned, "the second has not given up anything, and the first may not have"
    settle(*pair, third, new)
    assert sorted(len(one.owned) for one in (*pair, third, new)) == [1, 1, 2, 2]


def test_members_between_join_and_sync_keep_the_partitions_they_claim(world: World) -> None:
    pair = classic_pair(world, cooperative=True)
    third = ClassicClient(world, cooperative=True)
    for one in (third, third, *pair, *pair):
        one.step()
    leader = next(one for one in pair if one.member_id == classic_of(world).leader)
    follower = next(one for one in pair if one is not leader)
    if follower._syncing is None:
        follower.step()
    new = NewClient(world, "n")
    new.beat()
    check_owners([*pair, third, new])
    settle(*pair, third, new)
    assert sorted(len(one.owned) for one in (*pair, third, new)) == [1, 1, 2, 2]


@pytest.mark.parametrize(
    "values",
    [
        {"protocol_type": "connect"},
        {"protocols": (("range", b"metadata"),)},
        {"protocols": (("range", b""),)},
        {"protocols": (("range", subscription(version=0)[:-5]),)},
        {"protocols": (("own", b"metadata"), ("range", subscription()))},
    ],
)
def test_members_whose_bytes_are_not_a_consumers_stay_in_their_classic_group(
    world: World, values: dict[str, Any]
) -> None:
    joined = world.join(GROUP, **values).result
    with pytest.raises(GroupNotFound, match="stays classic"):
        NewClient(world, "n").beat()
    assert joined.member_id in classic_of(world).members
    world.groups.known_classic(GROUP).heartbeat(joined.member_id, None, joined.generation)


def assigned_with_user_data(world: World, assignor: str) -> None:
    joined = world.join(GROUP, protocols=((assignor, subscription()),)).result
    assignment = encode_assignment([("t", 0)], 1)[:-4] + b"\0\0\0\1x"
    world.sync(GROUP, joined, {joined.member_id: assignment})


def test_user_data_in_an_assignment_keeps_the_group_classic(world: World) -> None:
    assigned_with_user_data(world, "stream")
    with pytest.raises(GroupNotFound, match="stays classic"):
        NewClient(world, "n").beat()


def test_the_user_data_of_librdkafka_does_not_prevent_an_upgrade(world: World) -> None:
    assigned_with_user_data(world, "cooperative-sticky")
    NewClient(world, "n").beat()
    assert len(group_of(world).members) == 2


@pytest.mark.parametrize("bad", [{"topics": None}, {"rack_id": "x" * 2000}])
def test_a_join_that_is_refused_leaves_the_classic_group_as_it_was(world: World, bad: dict[str, Any]) -> None:
    pair = classic_pair(world)
    with pytest.raises(InvalidInput):
        NewClient(world, "n", **bad).beat()
    for one in pair:
        one.beat()
    world.timers.advance(9)
    for one in pair:
        one.beat()
    world.timers.advance(9)
    assert len(classic_of(world).members) == 2


def test_a_full_group_accepts_no_consumer_protocol_member() -> None:
    world = World({"t": PARTITIONS}, members_max=2)
    pair = classic_pair(world, id_required=False)
    with pytest.raises(GroupFull):
        NewClient(world, "n").beat()
    for one in pair:
        one.beat()


@pytest.mark.parametrize("epoch", [-1, 3])
def test_a_member_that_a_classic_group_does_not_know_joins_again(world: World, epoch: int) -> None:
    classic_pair(world)
    with pytest.raises(UnknownMember):
        world.groups.heartbeat(GROUP, Heartbeat(member_id="n", epoch=epoch))
    assert len(classic_of(world).members) == 2


# What is refused in a group of both.


def test_requests_of_a_classic_member_are_held_to_its_epoch(world: World) -> None:
    pair, _ = mixed(world)
    group, one = world.groups.known_classic(GROUP), pair[0]
    with pytest.raises(IllegalGeneration):
        group.heartbeat(one.member_id, None, one.generation - 1)
    with pytest.raises(IllegalGeneration):
        world.groups.check_commit(GROUP, one.member_id, None, one.generation - 1)
    with pytest.raises(UnknownMember):
        group.heartbeat("unknown", None, one.generation)
    assert isinstance(refused_sync(world, one, generation=one.generation - 1), IllegalGeneration)
    assert isinstance(refused_sync(world, one, protocol="sticky"), InconsistentProtocol)
    assert isinstance(refused_sync(world, one, protocol_type="connect"), InconsistentProtocol)


def test_a_sync_after_a_change_of_the_group_is_answered_with_rejoin(world: World) -> None:
    pair, _ = mixed(world)
    NewClient(world, "other").beat()
    assert isinstance(refused_sync(world, pair[0]), RebalanceInProgress)


def test_a_consumer_protocol_member_may_not_use_classic_requests(world: World) -> None:
    _, new = mixed(world)
    with pytest.raises(UnknownMember):
        world.groups.known_classic(GROUP).heartbeat(new.member_id, None, new.epoch)
    with pytest.raises(StaleMemberEpoch):
        world.groups.check_commit(GROUP, new.member_id, None, new.epoch - 1)


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ({"protocol_type": "connect"}, InconsistentProtocol),
        ({"protocols": (("roundrobin", subscription()),)}, InconsistentProtocol),
        ({"protocols": ()}, InconsistentProtocol),
        ({"protocols": (("range", b"?"),)}, InconsistentProtocol),
        ({"session_timeout_ms": 1}, InvalidSessionTimeout),
        ({"client_id": "x" * 2000}, InvalidInput),
        ({"protocols": (("range", subscription() + bytes(1 << 20)),)}, InvalidInput),
    ],
)
def test_a_classic_member_that_does_not_fit_is_refused(
    world: World, values: dict[str, Any], refused: type[HeadraceError]
) -> None:
    mixed(world)
    with pytest.raises(refused):
        _ = world.join(GROUP, **{"protocols": (("range", subscription()),), **values}).result
    assert len(group_of(world).members) == 3


def test_a_classic_member_is_removed_after_its_own_session_timeout(world: World) -> None:
    pair = classic_pair(world, session_timeout_ms=20_000)
    new = NewClient(world, "n")
    settle(*pair, new)
    world.timers.advance(15)
    pair[0].beat()
    world.timers.advance(10)
    assert set(group_of(world).members) == {pair[0].member_id, "n"}
    settle(pair[0], new)
    assert [len(pair[0].owned), len(new.owned)] == [3, 3]


def test_a_classic_member_that_does_not_join_again_in_time_is_removed(world: World) -> None:
    pair = classic_pair(world, rebalance_timeout_ms=30_000)
    new = NewClient(world, "n")
    new.beat()
    for _ in range(4):
        with pytest.raises(RebalanceInProgress):
            pair[1].beat()
        world.timers.advance(7)
        pair[0].step()
        new.step()
    assert len(group_of(world).members) == 3
    world.timers.advance(2)
    assert set(group_of(world).members) == {pair[0].member_id, "n"}


def test_a_classic_member_that_does_not_sync_in_time_is_removed(world: World) -> None:
    new = NewClient(world, "n")
    new.beat()
    joined = world.join(GROUP, protocols=(("range", subscription()),), rebalance_timeout_ms=15_000).result
    for _ in range(2):
        world.timers.advance(7)  # it beats, and waits for what the first has to give up
        world.groups.known_classic(GROUP).heartbeat(joined.member_id, None, joined.generation)
    world.timers.advance(2)
    assert set(group_of(world).members) == {"n"}


# Any order.


WHAT = ["step", "step", "step", "swap", "crash", "restart", "grow"]


@given(
    st.lists(st.tuples(st.sampled_from(WHAT), st.integers(0, 2)), max_size=60),
    st.booleans(),
    st.booleans(),
)
def test_in_any_order_of_events_every_partition_has_exactly_one_owner(
    ops: list[tuple[str, int]], cooperative: bool, static: bool
) -> None:
    world = World({"t": PARTITIONS})
    names = map("new-{}".format, itertools.count())

    def start(index: int, *, new: bool) -> AnyClient:
        instance_id = f"i{index}" if static else None
        if new:
            return NewClient(world, next(names), instance_id=instance_id)
        return ClassicClient(world, cooperative=cooperative, instance_id=instance_id)

    clients = [start(index, new=False) for index in range(3)]
    settle(*clients, rounds=6)
    for what, index in ops:
        if what == "step":
            clients[index].step()
        elif what in ("swap", "crash"):
            if what == "swap":
                clients[index].stop()
            clients[index] = start(index, new=isinstance(clients[index], ClassicClient))
        elif what == "grow" and world.topics["t"] < PARTITIONS + 2:
            world.topics["t"] += 1
        elif what == "restart" and isinstance(world.groups.find(GROUP), ConsumerGroup):
            world.restart()
        check_owners(clients)
    for _ in range(20):  # those that crashed are found out
        world.timers.advance(5)
        settle(*clients, rounds=4)
    if isinstance(world.groups.find(GROUP), ClassicGroup):
        join_again(clients[0])  # that there are more partitions a leader has to see itself
        clients.append(start(3, new=False))
        settle(*clients)
    assert frozenset().union(*(one.owned for one in clients)) == {("t", number) for number in range(world.topics["t"])}
    for one in clients:
        one.commit()
