"""Groups of the KIP-848 protocol over a restart: members keep their epochs and partitions without joining again."""

from typing import Any

import msgspec
import pytest

from headrace.broker.groups.consumer.group import Heartbeat
from headrace.broker.groups.consumer.store import CONSUMER_GROUPS, MEMBERS, POSITIONS, SavedConsumer
from headrace.errors import DiskFull, HeadraceError, InvalidInput, UnknownMember, UnreleasedInstance
from tests.broker.group_world import Answer as Told
from tests.broker.group_world import World
from tests.broker.test_groups_consumer import Client, settle

TABLES = (CONSUMER_GROUPS, MEMBERS, POSITIONS)


@pytest.fixture
def world() -> World:
    return World({"t": 4})


def restart(world: World, *clients: Client) -> None:
    world.restart()
    for client in clients:
        client.group = world.groups.consumer(client.group.group_id)


def stored(world: World) -> int:
    return sum(len(world.journal.items(table)) for table in TABLES)


def kept(world: World) -> Told[str]:
    """Told "kept" when what the group is now would survive a crash."""
    told: Told[str] = Told()
    world.groups.when_kept("g", lambda error: told("kept" if error is None else error))
    return told


def test_members_do_not_notice_a_restart(world: World) -> None:
    group = world.groups.consumer("g")
    first, second = Client(group, "a", rack_id="r", assignor="range"), Client(group, "b")
    settle(first, second)
    before = [(one.epoch, one.owned) for one in (first, second)]
    restart(world, first, second)
    group = world.groups.consumer("g")
    assert group.state == "Stable"
    assert (group.members["a"].rack_id, group.assignor) == ("r", "range")
    for one in (first, second):
        world.groups.check_commit("g", one.name, None, one.epoch)
        told = group.heartbeat(Heartbeat(member_id=one.name, epoch=one.epoch))
        assert told.assignment is None, "nothing new"
    settle(first, second)
    assert [(one.epoch, one.owned) for one in (first, second)] == before


def test_a_restart_after_any_step_of_a_rebalance_gives_no_partition_two_owners(world: World) -> None:
    group = world.groups.consumer("g")
    clients = [Client(group, "a")]
    for name in "bc":
        restart(world, *clients)
        clients.append(Client(world.groups.consumer("g"), name))
        for _ in range(6):
            for client in clients:
                restart(world, *clients)
                client.beat()
                held = [which for one in clients for which in one.owned]
                assert len(held) == len(set(held))
    assert sorted(len(one.owned) for one in clients) == [1, 1, 2]
    assert world.groups.consumer("g").state == "Stable"
    restart(world, *clients)
    clients.pop().leave()
    restart(world, *clients)
    settle(*clients)
    assert [len(one.owned) for one in clients] == [2, 2]


def test_a_heartbeat_that_changes_nothing_writes_nothing(world: World) -> None:
    client = Client(world.groups.consumer("g"), "a")
    world.journal.hold = True
    client.beat()
    client.beat(report=False)
    restart(world, client)
    client.beat()
    assert world.journal.staged == []
    assert kept(world).result == "kept"


def test_a_member_only_gets_assignments_that_are_durable(world: World) -> None:
    world.journal.hold = True
    group = world.groups.consumer("g")
    Client(group, "a")
    told = kept(world)
    again = Client(group, "a")  # the same once more: nothing to write, and still not durable
    assert again.epoch == 1
    both = (told, kept(world))
    assert all(one.waiting for one in both)
    world.journal.sync()
    assert [one.result for one in both] == ["kept", "kept"]


def test_a_change_refused_by_a_full_disk_is_written_with_the_next_heartbeat(world: World) -> None:
    group = world.groups.consumer("g")
    first, second = Client(group, "a"), Client(group, "b")
    world.journal.hold = True
    second.leave()
    told = kept(world)
    world.journal.sync(DiskFull("no room"))
    with pytest.raises(HeadraceError, match="no room"):
        _ = told.result
    world.journal.hold = False
    first.beat()
    assert kept(world).result == "kept"
    restart(world, first)
    first.beat()
    assert len(first.owned) == 4
    assert list(world.groups.consumer("g").members) == ["a"]


def test_a_member_that_does_not_return_after_a_restart_is_removed_after_one_session(world: World) -> None:
    group = world.groups.consumer("g")
    first, second = Client(group, "a"), Client(group, "b")
    settle(first, second)
    world.timers.advance(40)
    restart(world, first, second)
    world.timers.advance(40)
    first.beat()
    assert len(first.owned) == 2, "sessions begin anew"
    world.timers.advance(10)
    first.beat()
    assert len(first.owned) == 4
    with pytest.raises(UnknownMember):
        second.beat()


def test_after_a_restart_a_member_that_does_not_revoke_is_also_removed(world: World) -> None:
    group = world.groups.consumer("g")
    first, second = Client(group, "a"), Client(group, "b")
    first.beat(report=False)  # told to give up two
    restart(world, first, second)
    for _ in range(7):
        world.timers.advance(5)
        second.beat()
    assert len(second.owned) == 4
    with pytest.raises(UnknownMember):
        first.beat()


def test_an_answer_that_a_crash_took_is_given_again(world: World) -> None:
    client = Client(world.groups.consumer("g"), "a")
    world.topics["t"] = 5
    world.groups.consumer("g").heartbeat(Heartbeat(member_id="a", epoch=client.epoch, owned=client.owned))
    restart(world, client)
    client.beat()  # still at epoch 1
    assert (client.epoch, len(client.owned)) == (2, 5)


def test_an_instance_is_held_through_a_restart(world: World) -> None:
    group = world.groups.consumer("g")
    first, second = Client(group, "a", instance_id="one"), Client(group, "b")
    settle(first, second)
    restart(world, first, second)
    group = world.groups.consumer("g")
    with pytest.raises(UnreleasedInstance):
        Client(group, "thief", instance_id="one")
    group.heartbeat(Heartbeat(member_id="a", instance_id="one", epoch=-2))
    restart(world, first, second)
    back = Client(world.groups.consumer("g"), "a2", instance_id="one")
    assert back.owned == first.owned
    restart(world, back, second)
    assert set(world.groups.consumer("g").members) == {"a2", "b"}
    settle(back, second)


def test_a_subscription_pattern_has_the_same_meaning_after_a_restart(world: World) -> None:
    world.topics |= {"log-1": 2, "log-secret": 2}
    shown: dict[str, Any] = {"topics": frozenset(), "pattern": "log-.*", "may_read": lambda topic: topic == "log-1"}
    group = world.groups.consumer("g")
    one, two = Client(group, "a", **shown), Client(group, "b", topics=frozenset({"log-secret"}))
    restart(world, one, two)
    world.topics["log-2"] = 1
    two.beat()
    group = world.groups.consumer("g")
    assert group.epoch == two.epoch, "nothing has changed for the one that is heard of"
    assert {topic for topic, _ in group.target["a"]} == {"log-1"}
    shown["may_read"] = lambda topic: topic != "log-secret"
    told = group.heartbeat(Heartbeat(member_id="a", epoch=one.epoch, may_read=shown["may_read"]))
    assert told.assignment is not None
    assert {topic for topic, _ in told.assignment} == {"log-1", "log-2"}


def test_after_a_restart_a_member_gets_the_partitions_of_a_recreated_topic(world: World) -> None:
    client = Client(world.groups.consumer("g"), "a")
    del world.topics["t"]
    world.groups.topic_deleted("t")
    world.topics["t"] = 4
    restart(world, client)
    told = client.group.heartbeat(Heartbeat(member_id="a", epoch=client.epoch))
    assert told.assignment is not None
    assert len(told.assignment) == 4


def test_a_group_that_is_deleted_leaves_nothing(world: World) -> None:
    group = world.groups.consumer("g")
    first, second = Client(group, "a", instance_id="one"), Client(group, "b")
    settle(first, second)
    group.heartbeat(Heartbeat(member_id="a", instance_id="one", epoch=-2))
    back = Client(group, "a2", instance_id="one")
    restart(world, back, second)
    back.leave()
    second.leave()
    world.groups.delete("g", lambda error: None)
    assert stored(world) == 0


def test_a_group_that_becomes_a_classic_one_leaves_nothing(world: World) -> None:
    Client(world.groups.consumer("g"), "a").leave()
    assert stored(world) == 1, "its epoch"
    world.stable("g", 1)
    assert stored(world) == 0
    world.restart()
    assert len(world.groups.known_classic("g").members) == 1


@pytest.mark.parametrize("damage", [b"", b"\xc1", b"\x93\x01\x01\xa1x", None])
@pytest.mark.parametrize("table", TABLES)
def test_a_group_with_unreadable_state_starts_empty(world: World, table: str, damage: bytes | None) -> None:
    group = world.groups.consumer("g")
    settle(Client(group, "a"), Client(group, "b"))
    key = next(iter(world.journal.tables[table]))
    if damage is None:
        del world.journal.tables[table][key]
    else:
        world.journal.tables[table][key] = damage
    world.restart()
    with pytest.raises(UnknownMember):
        world.groups.consumer("g").heartbeat(Heartbeat(member_id="a", epoch=2))
    client = Client(world.groups.consumer("g"), "c")
    assert len(client.owned) == 4
    restart(world, client)
    client.beat()
    assert len(client.owned) == 4
    client.leave()
    world.groups.delete("g", lambda error: None)
    assert stored(world) == 0


@pytest.mark.parametrize("unknown", [{"assignor": "of-tomorrow"}, {"pattern": "("}])
def test_a_stored_member_with_unknown_settings_joins_again(world: World, unknown: dict[str, str]) -> None:
    Client(world.groups.consumer("g"), "a")
    [(key, value)] = world.journal.items(MEMBERS)
    saved = msgspec.structs.replace(msgspec.msgpack.decode(value, type=SavedConsumer), **unknown)
    world.journal.tables[MEMBERS][key] = msgspec.msgpack.encode(saved)
    world.restart()
    assert len(Client(world.groups.consumer("g"), "a").owned) == 4


@pytest.mark.parametrize(
    "large", [{"instance_id": "x" * 2000}, {"topics": frozenset(f"{n:0200}" for n in range(6000))}]
)
def test_a_member_too_large_to_be_stored_is_refused(world: World, large: dict[str, Any]) -> None:
    group = world.groups.consumer("g")
    with pytest.raises(InvalidInput):
        Client(group, "a", **large)
    with pytest.raises(InvalidInput):
        Client(group, "a" * 2000)
    assert not group.members
