"""The KIP-848 protocol: the broker assigns, and members walk to their target on their own."""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.groups import assign, subscription_patterns
from headrace.broker.groups.assign import ASSIGNORS, assign_range, assign_uniform
from headrace.broker.groups.consumer.group import Answer, ConsumerGroup, Heartbeat
from headrace.broker.groups.subscription_patterns import compile_pattern
from headrace.errors import (
    FencedMemberEpoch,
    InvalidInput,
    InvalidPattern,
    StaleMemberEpoch,
    UnknownMember,
    UnreleasedInstance,
    UnsupportedAssignor,
)
from tests.broker.group_world import World


@pytest.fixture
def world() -> World:
    return World({"t": 4})


class Client:
    """A consumer that follows its assignment: revokes, takes over and reports its partitions."""

    def __init__(self, group: ConsumerGroup, name: str, **values: Any) -> None:
        self.group = group
        self.name = name
        self.epoch = 0
        self.owned: frozenset[tuple[str, int]] = frozenset()
        self.values = {"topics": frozenset({"t"}), "rebalance_timeout_ms": 30_000, **values}
        self.take(group.heartbeat(Heartbeat(member_id=name, epoch=0, **self.values)))

    def beat(self, *, report: bool = True) -> None:
        owned = self.owned if report else None
        self.take(self.group.heartbeat(Heartbeat(member_id=self.name, epoch=self.epoch, owned=owned)))

    def take(self, answer: Answer) -> None:
        self.epoch = answer.epoch
        if answer.assignment is not None:
            self.owned = answer.assignment

    def leave(self) -> None:
        self.group.heartbeat(Heartbeat(member_id=self.name, epoch=-1))


def settle(*clients: Client) -> None:
    for _ in range(10):
        for client in clients:
            client.beat()
            held = [which for one in clients for which in one.owned]
            assert len(held) == len(set(held)), "no partition has two owners at any step"


def test_a_lone_member_gets_everything_at_once(world: World) -> None:
    client = Client(world.groups.consumer("g"), "a")
    assert client.owned == {("t", number) for number in range(4)}
    assert client.epoch == 1
    assert world.groups.consumer("g").state == "Stable"


def test_a_second_member_gets_partitions_only_after_the_first_has_revoked_them(world: World) -> None:
    group = world.groups.consumer("g")
    first = Client(group, "a")
    second = Client(group, "b")
    assert second.owned == frozenset(), "all is still with the first"
    assert group.state == "Reconciling"
    first.beat(report=False)
    assert len(first.owned) == 2, "told to give up two"
    second.beat()
    assert second.owned == frozenset(), "the first has not said that it did"
    first.beat()
    second.beat()
    assert len(second.owned) == 2
    settle(first, second)
    assert group.state == "Stable"
    assert first.epoch == second.epoch == 2


def test_the_partitions_of_a_member_that_left_are_reassigned(world: World) -> None:
    group = world.groups.consumer("g")
    first, second = Client(group, "a"), Client(group, "b")
    settle(first, second)
    second.leave()
    first.beat()
    assert len(first.owned) == 4


def test_a_member_that_stops_beating_loses_its_partitions(world: World) -> None:
    group = world.groups.consumer("g")
    first, second = Client(group, "a"), Client(group, "b")
    settle(first, second)
    for _ in range(5):
        world.timers.advance(10)
        first.beat()
    assert len(first.owned) == 4
    with pytest.raises(UnknownMember):
        second.beat()


def test_a_member_that_does_not_revoke_is_removed_after_its_rebalance_timeout(world: World) -> None:
    group = world.groups.consumer("g")
    first, second = Client(group, "a"), Client(group, "b")
    for _ in range(6):
        group.heartbeat(Heartbeat(member_id="a", epoch=1))  # beats, and never reports what it owns
        second.beat()
        world.timers.advance(5)
    with pytest.raises(UnknownMember):
        first.beat()
    second.beat()
    assert len(second.owned) == 4


def test_new_partitions_and_topics_reach_the_members(world: World) -> None:
    group = world.groups.consumer("g")
    client = Client(group, "a", topics=frozenset({"t", "later"}))
    world.topics["t"] = 6
    client.beat()
    assert len(client.owned) == 6
    world.topics["later"] = 1
    client.beat()
    assert ("later", 0) in client.owned


def test_a_pattern_follows_the_topics_that_match(world: World) -> None:
    group = world.groups.consumer("g")
    client = Client(group, "a", topics=frozenset(), pattern="log-.*")
    assert client.owned == frozenset()
    world.topics["log-1"] = 2
    client.beat()
    assert client.owned == {("log-1", 0), ("log-1", 1)}


def test_an_answer_that_was_lost_is_given_again(world: World) -> None:
    group = world.groups.consumer("g")
    client = Client(group, "a")
    world.topics["t"] = 5
    lost = group.heartbeat(Heartbeat(member_id="a", epoch=client.epoch, owned=client.owned))
    assert lost.epoch == 2
    client.beat()  # still at epoch 1
    assert client.epoch == 2
    assert len(client.owned) == 5


def test_an_epoch_that_never_was_is_fenced(world: World) -> None:
    group = world.groups.consumer("g")
    Client(group, "a")
    with pytest.raises(FencedMemberEpoch):
        group.heartbeat(Heartbeat(member_id="a", epoch=7))
    with pytest.raises(UnknownMember):
        group.heartbeat(Heartbeat(member_id="forged", epoch=1))
    with pytest.raises(StaleMemberEpoch):
        group.check_commit("a", 0)
    group.check_commit("a", 1)


def test_an_assignor_we_lack_is_refused(world: World) -> None:
    with pytest.raises(UnsupportedAssignor):
        Client(world.groups.consumer("g"), "a", assignor="mine")


def test_a_static_member_that_left_for_a_moment_keeps_its_partitions(world: World) -> None:
    group = world.groups.consumer("g")
    first, second = Client(group, "a", instance_id="one"), Client(group, "b")
    settle(first, second)
    epoch = group.epoch
    with pytest.raises(UnreleasedInstance):
        Client(group, "thief", instance_id="one")
    group.heartbeat(Heartbeat(member_id="a", instance_id="one", epoch=-2))
    back = Client(group, "a2", instance_id="one")
    assert back.owned == first.owned
    settle(back, second)
    assert group.epoch == epoch


def test_a_static_member_rejoins_with_its_old_id(world: World) -> None:
    """Java keeps its id when it was away for longer than max.poll.interval.ms; it was never let in again."""
    group = world.groups.consumer("g")
    first, second = Client(group, "a", instance_id="one"), Client(group, "b")
    settle(first, second)
    epoch = group.epoch
    group.heartbeat(Heartbeat(member_id="a", instance_id="one", epoch=-2))
    back = Client(group, "a", instance_id="one")
    assert back.owned == first.owned
    settle(back, second)
    assert group.epoch == epoch
    with pytest.raises(UnreleasedInstance):
        Client(group, "thief", instance_id="one")


def test_an_instance_is_free_again_when_the_session_of_its_member_is_over(world: World) -> None:
    group = world.groups.consumer("g")
    Client(group, "a", instance_id="one")
    world.timers.advance(40)
    with pytest.raises(UnreleasedInstance):
        Client(group, "b", instance_id="one")
    world.timers.advance(10)
    assert len(Client(group, "b", instance_id="one").owned) == 4


def test_a_static_member_that_joins_twice_gets_its_own_place(world: World) -> None:
    """Its answer was lost, or it was fenced: unreleased would be the end of a Java consumer."""
    group = world.groups.consumer("g")
    first, second = Client(group, "a", instance_id="one"), Client(group, "b")
    settle(first, second)
    again = Client(group, "a", instance_id="one")
    assert (again.epoch, again.owned) == (first.epoch, first.owned)
    settle(again, second)


@pytest.mark.parametrize("instance_id", [None, "one", "free", "left"])
def test_a_member_does_not_join_again_as_another_instance(world: World, instance_id: str | None) -> None:
    """It was let in and not known as that one; or took the place of one that left, its own still in its name."""
    group = world.groups.consumer("g")
    Client(group, "a", instance_id="one")
    Client(group, "gone", instance_id="left")
    group.heartbeat(Heartbeat(member_id="gone", instance_id="left", epoch=-2))
    Client(group, "b", instance_id="two")
    with pytest.raises(InvalidInput):
        Client(group, "b", instance_id=instance_id)
    assert set(group.members) == {"a", "b", "gone"}


@pytest.mark.parametrize("member_id", ["a", "a2"])
def test_a_static_member_that_rejoins_has_nothing_to_revoke(world: World, member_id: str) -> None:
    group = world.groups.consumer("g")
    first = Client(group, "a", instance_id="one")
    second = Client(group, "b")
    first.beat(report=False)  # told to give up two
    group.heartbeat(Heartbeat(member_id="a", instance_id="one", epoch=-2))
    second.beat()
    assert len(second.owned) == 2, "a member that left blocks no partition"
    back = Client(group, member_id, instance_id="one")
    assert (len(back.owned), back.epoch) == (2, group.epoch)
    with pytest.raises(FencedMemberEpoch):
        group.heartbeat(Heartbeat(member_id=member_id, epoch=first.epoch, owned=frozenset()))
    settle(back, second)


topics = st.dictionaries(st.sampled_from("abcd"), st.integers(1, 8), max_size=4)
members = st.dictionaries(st.sampled_from("xyzuvw"), st.frozensets(st.sampled_from("abcde")), max_size=6)


@given(members, topics, st.sampled_from(sorted(ASSIGNORS)))
def test_every_subscribed_partition_has_one_owner(
    subscriptions: dict[str, frozenset[str]], partitions: dict[str, int], assignor: str
) -> None:
    result = ASSIGNORS[assignor](subscriptions, partitions, {})
    given_out = [which for owned in result.values() for which in owned]
    wanted = {
        (topic, number)
        for topic, count in partitions.items()
        if any(topic in topics for topics in subscriptions.values())
        for number in range(count)
    }
    assert len(given_out) == len(set(given_out))
    assert set(given_out) == wanted
    assert all(topic in subscriptions[member] for member, owned in result.items() for topic, _ in owned)


@given(st.integers(1, 7), topics, st.integers(1, 7))
def test_the_uniform_assignor_is_balanced_and_moves_as_few_partitions_as_possible(
    before: int, partitions: dict[str, int], after: int
) -> None:
    everything = frozenset("abcd")
    held = assign_uniform({f"m{n}": everything for n in range(before)}, partitions, {})
    result = assign_uniform({f"m{n}": everything for n in range(after)}, partitions, held)
    sizes = [len(owned) for owned in result.values()]
    assert max(sizes) - min(sizes) <= 1
    if after >= before:
        kept = sum(len(result[member] & owned) for member, owned in held.items())
        total = sum(partitions.values())
        least, rest = divmod(total, after)
        must_keep = sum(min(len(owned), least) for owned in held.values())
        assert kept >= must_keep
        assert rest >= 0


def test_range_gives_neighbours_to_the_same_member() -> None:
    everything = frozenset({"a", "b"})
    result = assign_range({"m1": everything, "m2": everything}, {"a": 3, "b": 3}, {})
    assert result["m1"] == {("a", 0), ("a", 1), ("b", 0), ("b", 1)}


def test_a_second_member_of_a_large_topic_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first one held was sorted anew for every partition that moved: 16 s, with ten thousand of them."""
    compared = 0

    def counted(values: Iterable[Any], **options: Any) -> list[Any]:
        nonlocal compared
        given = list(values)
        compared += len(given)
        return sorted(given, **options)

    monkeypatch.setattr(assign, "sorted", counted, raising=False)
    both = {"a": frozenset({"t"}), "b": frozenset({"t"})}
    result = assign_uniform(both, {"t": 1000}, {"a": {("t", number) for number in range(1000)}})
    assert sorted(len(held) for held in result.values()) == [500, 500]
    assert compared < 10_000


def test_a_heartbeat_without_changes_examines_no_topic_and_no_other_member(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a hundred members that subscribe to a thousand topics by pattern, each took half a second, of everybody."""
    world.topics.update({f"log-{number}": 1 for number in range(10)})
    tried: list[str] = []

    class Counted:
        def __init__(self, pattern: str) -> None:
            self._pattern = compile_pattern(pattern)

        def fullmatch(self, name: str) -> bool:
            tried.append(name)
            return self._pattern.fullmatch(name)

    monkeypatch.setattr(subscription_patterns, "compile_pattern", Counted)
    group = world.groups.consumer("g")
    clients = [Client(group, name, topics=frozenset(), pattern="log-.*") for name in "abc"]
    settle(*clients)
    assert len(tried) == len(world.topics), "each topic once, not once for each member"
    tried.clear()
    monkeypatch.setattr(ConsumerGroup, "_taken", lambda *_: 1 // 0)
    for client in clients:
        client.beat()
    assert tried == []
    monkeypatch.undo()
    world.topics["log-new"] = 1
    settle(*clients)
    assert ("log-new", 0) in set().union(*(client.owned for client in clients))


@pytest.mark.parametrize("pattern", [r"((a))\1", "(", "x" * 600, "(?<=a)b", "((a{100}){100}){100}"])
def test_patterns_that_re2_does_not_take_are_refused(pattern: str) -> None:
    with pytest.raises(InvalidPattern):
        compile_pattern(pattern)


@pytest.mark.parametrize("pattern", [r"^(a+)+$", r"(a|a)*b", r"(.*)*b", ".*.*.*.*.*b"])
def test_patterns_that_could_run_for_hours_elsewhere_do_not_here(pattern: str) -> None:
    """Python's engine would not come back within the life of the machine: the test would hang."""
    assert not compile_pattern(pattern).fullmatch("a" * 249 + "!")


@pytest.mark.parametrize("pattern", ["log-.*", "^orders$", "(eu|us)-orders", "a{2,3}", "[a-z]+-[0-9]+", ""])
def test_patterns_people_write_are_taken(pattern: str) -> None:
    assert compile_pattern(pattern) is not None
