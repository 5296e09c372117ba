"""The classic group protocol: joins, generations, time-outs, static members; on a clock that stands still."""

from collections.abc import Iterator

import pytest

from headrace.broker.groups.classic.members import GroupState, JoinResult
from headrace.broker.groups.timers import ForgivingTimers
from headrace.errors import (
    FencedInstance,
    GroupFull,
    GroupNotEmpty,
    IllegalGeneration,
    InconsistentProtocol,
    InvalidGroupId,
    InvalidSessionTimeout,
    MemberIdRequired,
    RebalanceInProgress,
    UnknownMember,
)
from tests.broker.group_world import World


@pytest.fixture
def world() -> World:
    return World()


def test_the_first_member_is_the_leader_and_gets_the_partitions_that_it_assigns(world: World) -> None:
    joined = world.join("g").result
    assert joined.leader == joined.member_id
    assert joined.generation == 1
    assert joined.members == ((joined.member_id, None, b"metadata"),)
    synced = world.sync("g", joined, {joined.member_id: b"mine"}).result
    assert synced.assignment == b"mine"
    assert world.classic("g").state is GroupState.STABLE


def test_a_second_member_waits_until_the_first_has_joined_again(world: World) -> None:
    [first] = world.stable("g", 1)
    second = world.join("g")
    assert second.waiting
    with pytest.raises(RebalanceInProgress):
        world.groups.known_classic("g").heartbeat(first.member_id, None, first.generation)
    again = world.join("g", first.member_id).result
    assert again.generation == second.result.generation == 2
    assert len(again.members) == 2
    assert second.result.members == (), "only the leader sees the others"


def test_followers_wait_for_the_leaders_assignment(world: World) -> None:
    first, second = (one for one in world.stable("g", 2))
    leader, follower = (first, second) if first.leader == first.member_id else (second, first)
    assert world.classic("g").state is GroupState.STABLE
    assert world.sync("g", follower).result.assignment == follower.member_id.encode()
    assert world.sync("g", leader).result.assignment == leader.member_id.encode()


def test_a_pause_of_the_broker_is_not_the_silence_of_its_members(world: World) -> None:
    """A stopped process, or a machine asleep: its timers are all due before it has read a heartbeat."""
    loop = world.timers
    world.timers = ForgivingTimers(loop)  # type: ignore[assignment]
    world.groups = world.open()
    first, _second = world.stable("g", 2)
    group = world.groups.known_classic("g")
    world.clock.advance(3600)
    loop.advance(0)
    assert len(group.members) == 2
    group.heartbeat(first.member_id, None, first.generation)  # it was in the socket
    loop.advance(5)
    assert list(group.members) == [first.member_id], "silent members are removed"
    loop.advance(11)
    assert not group.members, "a timer that is on time is not put off"


def test_a_member_that_stops_beating_is_removed_and_the_rest_rebalance(world: World) -> None:
    first, second = world.stable("g", 2)
    group = world.groups.known_classic("g")
    for _ in range(4):
        world.timers.advance(3)
        try:
            group.heartbeat(first.member_id, None, first.generation)
        except RebalanceInProgress:
            break
    with pytest.raises(UnknownMember):
        group.heartbeat(second.member_id, None, second.generation)
    again = world.join("g", first.member_id).result
    assert [member_id for member_id, _, _ in again.members] == [first.member_id]


def test_a_member_that_does_not_join_in_time_is_removed(world: World) -> None:
    first, second = world.stable("g", 2)
    again = world.join("g", first.member_id, protocols=(("range", b"changed"),))
    group = world.groups.known_classic("g")
    for _ in range(12):  # the second beats on, but never joins
        world.timers.advance(5)
        if not again.waiting:
            break
        with pytest.raises(RebalanceInProgress):
            group.heartbeat(second.member_id, None, second.generation)
    assert [member_id for member_id, _, _ in again.result.members] == [first.member_id]


def test_without_the_leaders_sync_the_followers_start_over(world: World) -> None:
    [first] = world.stable("g", 1)
    waiting = world.join("g")
    again = world.join("g", first.member_id).result
    follower = world.sync("g", waiting.result)
    assert again.leader == first.member_id
    world.timers.advance(61)  # neither sync nor heartbeat from the leader
    with pytest.raises((RebalanceInProgress, UnknownMember)):
        assert follower.result


def test_leaving_starts_a_rebalance_and_the_last_one_empties_the_group(world: World) -> None:
    first, second = world.stable("g", 2)
    group = world.classic("g")
    group.leave(second.member_id, None)
    assert world.classic("g").state is GroupState.PREPARING
    group.leave(first.member_id, None)
    assert group.state is GroupState.EMPTY
    assert group.generation == first.generation + 1


def test_clients_that_support_it_get_a_member_id_to_join_with(world: World) -> None:
    with pytest.raises(MemberIdRequired) as caught:
        assert world.join("g", id_required=True).result
    assert not world.groups.known_classic("g").members, "the group has no members yet"
    joined = world.join("g", caught.value.member_id, id_required=True).result
    assert joined.member_id == caught.value.member_id


def test_an_id_that_was_given_out_and_never_used_is_forgotten(world: World) -> None:
    with pytest.raises(MemberIdRequired) as caught:
        assert world.join("g", id_required=True).result
    world.timers.advance(11)
    with pytest.raises(UnknownMember):
        assert world.join("g", caught.value.member_id, id_required=True).result


def test_an_invented_member_id_is_refused(world: World) -> None:
    world.stable("g", 1)
    with pytest.raises(UnknownMember):
        assert world.join("g", "forged").result


@pytest.mark.parametrize("timeout_ms", [-1, 0, 999, 30 * 60 * 1000 + 1])
def test_session_timeouts_outside_the_limits_are_refused(world: World, timeout_ms: int) -> None:
    with pytest.raises(InvalidSessionTimeout):
        assert world.join("g", session_timeout_ms=timeout_ms).result


def test_members_without_a_common_protocol_do_not_meet(world: World) -> None:
    world.stable("g", 1)
    with pytest.raises(InconsistentProtocol):
        assert world.join("g", protocols=(("roundrobin", b""),)).result
    with pytest.raises(InconsistentProtocol):
        assert world.join("g", protocol_type="connect").result
    with pytest.raises(InconsistentProtocol):
        assert world.join("other", protocols=()).result


class Asked(tuple[tuple[str, bytes], ...]):
    """A member's protocols, and how often any member's were looked through."""

    times = 0

    def __iter__(self) -> Iterator[tuple[str, bytes]]:
        Asked.times += 1
        return super().__iter__()


def test_a_join_does_not_compare_the_protocols_of_all_members(world: World) -> None:
    """A group of thousands would take seconds of everybody's time to come up."""
    protocols = Asked((("range", b""), ("sticky", b"")))
    world.join("g", protocols=protocols)
    for _ in range(200):
        world.join("g", protocols=protocols)
    Asked.times = 0
    assert world.join("g", protocols=protocols).waiting
    assert 0 < Asked.times < 10


def test_comparing_the_protocols_of_two_members_is_not_quadratic(world: World) -> None:
    """Two requests of a hundred thousand names each would stop the broker for minutes."""
    first = world.join("g", protocols=Asked((f"a{number}", b"") for number in range(1000))).result
    Asked.times = 0
    answer = world.join("g", protocols=Asked((f"b{number}", b"") for number in range(1000)))
    assert isinstance(answer.value, InconsistentProtocol)
    world.join("g", protocols=Asked((f"a{number}", b"") for number in reversed(range(1000))))
    assert not world.join("g", first.member_id, protocols=Asked((f"a{n}", b"") for n in range(1000))).waiting
    assert 0 < Asked.times < 100


def test_a_protocol_that_only_a_former_member_lacked_is_common_again(world: World) -> None:
    first = world.join("g", protocols=(("range", b""), ("sticky", b""))).result
    second = world.join("g", protocols=(("range", b""),))
    assert isinstance(world.join("g", protocols=(("sticky", b""),)).value, InconsistentProtocol)
    again = world.join("g", first.member_id, protocols=(("range", b""), ("sticky", b""))).result
    world.groups.known_classic("g").leave(second.result.member_id, None)
    third = world.join("g", protocols=(("sticky", b""),))
    assert third.waiting
    world.join("g", again.member_id, protocols=(("range", b""), ("sticky", b"")))
    assert third.result.protocol == "sticky"


def test_the_protocol_most_members_want_is_chosen(world: World) -> None:
    both = (("range", b"r"), ("roundrobin", b"rr"))
    swapped = (both[1], both[0])
    first = world.join("g", protocols=both).result
    second, third = world.join("g", protocols=swapped), world.join("g", protocols=swapped)
    again = world.join("g", first.member_id, protocols=both)
    assert {one.result.protocol for one in (second, third, again)} == {"roundrobin"}


def test_a_generation_that_is_over_is_not_served(world: World) -> None:
    [joined] = world.stable("g", 1)
    group = world.classic("g")
    with pytest.raises(IllegalGeneration):
        group.heartbeat(joined.member_id, None, joined.generation - 1)
    with pytest.raises(IllegalGeneration):
        group.check_commit(joined.member_id, None, joined.generation + 1)


def test_a_static_member_that_restarts_keeps_its_place_without_a_rebalance(world: World) -> None:
    first = world.join("g", instance_id="one").result
    world.sync("g", first, {first.member_id: b"mine"})
    again = world.join("g", instance_id="one").result
    assert again.generation == first.generation
    assert again.member_id != first.member_id
    assert world.sync("g", again).result.assignment == b"mine"
    with pytest.raises(FencedInstance):
        world.groups.known_classic("g").heartbeat(first.member_id, "one", first.generation)


def static_pair(world: World, protocols: tuple[tuple[str, bytes], ...] = (("range", b"metadata"),)) -> list[JoinResult]:
    """The leader "one" and "two", between join and sync."""
    first = world.join("g", instance_id="one", protocols=protocols).result
    world.sync("g", first)
    second = world.join("g", instance_id="two", protocols=protocols)
    again = world.join("g", first.member_id, instance_id="one", protocols=protocols).result
    assert again.leader == first.member_id
    return [again, second.result]


def assign(world: World, leader: JoinResult) -> None:
    """To each its instance's name."""
    world.sync("g", leader, {member_id: str(name).encode() for member_id, name, _ in leader.members})


def test_a_static_leader_that_rejoins_starts_a_rebalance(world: World) -> None:
    """Its topics got more partitions. Its metadata did not change, and the new partitions were not assigned."""
    leader, _ = static_pair(world)
    assign(world, leader)
    again = world.join("g", leader.member_id, instance_id="one")
    assert again.waiting
    world.join("g", instance_id="two")
    assert again.result.generation == leader.generation + 1
    assert len(again.result.members) == 2


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_static_member_that_restarts_with_other_metadata_keeps_its_place(world: World, name: str) -> None:
    """Java's have a generation and partitions in them, which a new process does not."""
    leader, _ = static_pair(world)
    assign(world, leader)
    again = world.join("g", instance_id=name, protocols=(("range", b"other"),)).result
    assert again.generation == leader.generation
    assert world.sync("g", again).result.assignment == name.encode()
    world.restart()
    assert world.classic("g").members[again.member_id].protocols == (("range", b"other"),)


def test_a_static_member_that_restarts_with_another_preferred_protocol_starts_a_rebalance(world: World) -> None:
    both = (("range", b"r"), ("roundrobin", b"rr"))
    leader, _ = static_pair(world, both)
    assert leader.protocol == "range"
    assign(world, leader)
    second = world.join("g", instance_id="two", protocols=both[::-1])
    assert second.result.generation == leader.generation, "one vote each: the leader's decides"
    again = world.join("g", instance_id="one", protocols=both[::-1])
    assert again.waiting
    world.join("g", second.result.member_id, instance_id="two", protocols=both[::-1])
    assert again.result.protocol == "roundrobin"


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_static_member_that_restarts_before_its_assignment_starts_a_rebalance(world: World, name: str) -> None:
    """The leader assigns to its old id; it was left with nothing, in a group that called itself stable."""
    pair = dict(zip(("one", "two"), static_pair(world), strict=True))
    del pair[name]
    [(other_name, other)] = pair.items()
    again = world.join("g", instance_id=name)
    assert again.waiting
    with pytest.raises(RebalanceInProgress):
        assert world.sync("g", other).result
    other_again = world.join("g", other.member_id, instance_id=other_name)
    assign(world, next(one.result for one in (again, other_again) if one.result.members))
    assert world.sync("g", again.result).result.assignment == name.encode()


def test_a_static_leader_that_restarts_does_not_assign(world: World) -> None:
    leader, _ = static_pair(world)
    assign(world, leader)
    first = world.join("g", instance_id="one", can_skip_assignment=True).result
    assert (first.leader, first.skip_assignment, len(first.members)) == (first.member_id, True, 2)
    second = world.join("g", instance_id="one").result  # before JoinGroup 9 it can only be told that another leads
    assert (second.leader, second.skip_assignment, second.members) == (first.member_id, False, ())
    assert world.sync("g", second).result.assignment == b"one"
    assert world.classic("g").leader == second.member_id


def test_absent_static_members_with_a_short_rebalance_timeout_are_not_polled(world: World) -> None:
    """For half an hour, by each of any number of groups, if their sessions are as long."""
    first = world.join("g", instance_id="one", rebalance_timeout_ms=1).result
    world.sync("g", first)
    world.join("g", instance_id="two", rebalance_timeout_ms=1)
    world.join("g", first.member_id, instance_id="one", rebalance_timeout_ms=1)
    group = world.classic("g")
    group.leave("", "two")
    assert group.state is GroupState.PREPARING
    before = world.timers.made
    world.timers.advance(5)
    assert world.timers.made - before < 20
    assert world.join("g", instance_id="one", rebalance_timeout_ms=1).result.generation > first.generation


def test_a_static_member_can_be_removed_by_its_name(world: World) -> None:
    first = world.join("g", instance_id="one").result
    world.sync("g", first)
    assert world.groups.known_classic("g").leave("", "one") == first.member_id
    assert world.classic("g").state is GroupState.EMPTY


def test_a_member_that_joins_again_unchanged_gets_the_generation_it_missed(world: World) -> None:
    first, second = world.stable("g", 2)
    follower = second if first.leader == first.member_id else first
    assert world.join("g", follower.member_id).result.generation == first.generation


def test_a_group_has_a_largest_size() -> None:
    world = World(members_max=2)
    world.stable("g", 2)
    with pytest.raises(GroupFull):
        assert world.join("g").result


def test_a_member_with_an_assigned_id_can_take_the_last_place() -> None:
    world = World(members_max=1)
    with pytest.raises(MemberIdRequired) as required:
        _ = world.join("g", id_required=True).result
    assert world.join("g", required.value.member_id, id_required=True).result.member_id == required.value.member_id
    with pytest.raises(GroupFull):
        _ = world.join("g", id_required=True).result


def test_a_group_must_have_a_name(world: World) -> None:
    with pytest.raises(InvalidGroupId):
        world.join("")


def test_more_members_have_the_initial_delay_to_arrive_in_the_first_generation() -> None:
    world = World(initial_rebalance_delay_ms=3000)
    answers = [world.join("g") for _ in range(3)]
    assert all(answer.waiting for answer in answers)
    world.timers.advance(3)
    assert {answer.result.generation for answer in answers} == {1}


def test_a_group_survives_a_restart_with_its_members(world: World) -> None:
    first, second = world.stable("g", 2)
    world.restart()
    group = world.groups.known_classic("g")
    group.heartbeat(first.member_id, None, first.generation)
    assert world.sync("g", second).result.assignment == second.member_id.encode()
    world.timers.advance(11)  # a restored member has one session to show up
    assert not world.groups.known_classic("g").members


def test_a_restart_between_join_and_sync_does_not_make_a_static_members_empty_place_its_assignment(
    world: World,
) -> None:
    """The group came back stable, with nothing assigned to anybody, and stayed so."""
    world.join("g", instance_id="one")
    again = world.join("g", instance_id="one").result
    world.restart()
    with pytest.raises(UnknownMember):  # it joins again; a fenced one would give up
        assert world.sync("g", again, {again.member_id: b"mine"}).result
    joined = world.join("g", instance_id="one").result
    assert world.sync("g", joined, {joined.member_id: b"mine"}).result.assignment == b"mine"


def test_a_member_that_joined_an_unfinished_rebalance_joins_again_after_a_restart(world: World) -> None:
    first = world.join("g", instance_id="one").result
    world.sync("g", first, {first.member_id: b"mine"})
    world.join("g", instance_id="two")
    world.join("g", instance_id="two")  # before the first hears of it
    world.restart()
    third = world.join("g", instance_id="two")
    assert third.result.generation > first.generation, "not a place in a generation it was never assigned anything in"


def test_a_group_with_members_can_not_be_deleted(world: World) -> None:
    [joined] = world.stable("g", 1)
    with pytest.raises(GroupNotEmpty):
        world.groups.delete("g", lambda error: None)
    world.groups.known_classic("g").leave(joined.member_id, None)
    world.groups.delete("g", lambda error: None)
    assert not world.groups.exists("g")
    world.restart()
    assert not world.groups.exists("g")
