"""What members of all groups together may have the broker keep, however many groups they spread over."""

from collections.abc import Callable
from typing import Any

import pytest

from headrace.broker.groups.consumer.group import LEAVE_EPOCH, Heartbeat
from headrace.broker.groups.member_budget import MEMBER_BYTES, MemberMemory
from headrace.errors import HeadraceError, MemberIdRequired, MembersFull
from tests.broker.group_world import World

MB = 1 << 20
LARGE = (("range", bytes(MB)),)


@pytest.fixture
def world() -> World:
    return World({"t": 1}, members_bytes_max=10 * MB)


def held(world: World) -> int:
    return world.groups.member_budget.held_bytes()


def fill(join: Callable[[int], object]) -> int:
    """Joins until there is no room; how many did."""
    for count in range(100):
        try:
            join(count)
        except MembersFull:
            return count
    raise AssertionError("there is no end to it")


def test_metadata_of_all_groups_together_are_bounded(world: World) -> None:
    count = fill(lambda number: world.join(f"g{number}", protocols=LARGE).result)
    assert 2 <= count <= 10
    assert held(world) <= 10 * MB
    assert world.join("small").result.leader, "a small member is still accepted"


def test_a_member_that_is_refused_leaves_no_group_behind(world: World) -> None:
    count = fill(lambda number: world.join(f"g{number}", protocols=LARGE).result)
    assert len(world.groups.listing()) == count


def test_the_memory_of_a_member_that_leaves_is_freed(world: World) -> None:
    fill(lambda number: world.join(f"g{number}", protocols=LARGE).result)
    world.timers.advance(11)  # no member has sent a heartbeat for a session
    assert held(world) == 0
    world.join("g", protocols=LARGE).result  # noqa: B018


def test_a_member_that_joins_again_is_counted_once(world: World) -> None:
    joined = world.join("g", protocols=LARGE).result
    before = held(world)
    for _ in range(20):
        world.join("g", joined.member_id, protocols=LARGE).result  # noqa: B018
    assert held(world) == before
    world.join("g", joined.member_id).result  # noqa: B018
    assert held(world) < MEMBER_BYTES + 1000, "less is always taken"


def test_a_member_may_not_grow_over_the_bound(world: World) -> None:
    joined = world.join("g").result
    with pytest.raises(MembersFull):
        world.join("g", joined.member_id, protocols=(("range", bytes(6 * MB)),)).result  # noqa: B018
    assert world.sync("g", joined).result.protocol == "range", "it is what it was"


def test_ids_given_out_and_not_used_are_counted(world: World) -> None:
    def ask(number: int) -> None:
        try:
            world.join(f"g{number}", id_required=True, client_id="x" * 1000).result  # noqa: B018
        except MemberIdRequired:
            pass

    world.groups.member_budget.bytes_max = 20 * MEMBER_BYTES
    assert fill(ask) < 20
    world.timers.advance(11)
    assert held(world) == 0


def test_assignments_are_counted_and_one_too_large_is_refused(world: World) -> None:
    joined = world.join("g").result
    with pytest.raises(MembersFull):
        world.sync("g", joined, {joined.member_id: bytes(6 * MB)}).result  # noqa: B018
    strangers = {f"unknown{number}": bytes(MB) for number in range(20)}
    world.sync("g", joined, {**strangers, joined.member_id: bytes(MB)}).result  # noqa: B018
    assert 2 * MB < held(world) < 3 * MB


def test_consumer_protocol_members_have_the_same_memory_limit(world: World) -> None:
    names = frozenset(f"{number:0200}" for number in range(5000))

    def beat(number: int) -> None:
        world.groups.heartbeat(f"g{number}", Heartbeat(member_id="m", epoch=0, topics=names))

    count = fill(beat)
    assert 2 <= count <= 10
    assert held(world) <= 10 * MB
    with pytest.raises(MembersFull):
        world.join("classic", protocols=(("range", bytes(4 * MB)),)).result  # noqa: B018
    for number in range(count):
        world.groups.heartbeat(f"g{number}", Heartbeat(member_id="m", epoch=LEAVE_EPOCH))
    assert held(world) == 0


def test_a_member_that_names_no_topic_but_a_pattern_is_counted(world: World) -> None:
    world.groups.heartbeat("g", Heartbeat(member_id="m", epoch=0, pattern="t.*"))
    assert held(world) > MEMBER_BYTES
    world.groups.heartbeat("g", Heartbeat(member_id="m", epoch=LEAVE_EPOCH))
    assert held(world) == 0


@pytest.mark.parametrize("says", [{"pattern": ".*"}, {"topics": frozenset({"wide"})}], ids=["pattern", "names"])
def test_the_assignments_of_consumer_protocol_members_are_counted(world: World, says: dict[str, Any]) -> None:
    """Three characters of each made the broker keep the partitions of all topics, for every group."""
    world.topics = {"t": 1, "wide": 10_000}
    count = fill(lambda number: world.groups.heartbeat(f"g{number}", Heartbeat(member_id="m", epoch=0, **says)))
    assert 2 <= count <= 10
    before = held(world)
    assert before > count * MB
    world.groups.heartbeat("g0", Heartbeat(member_id="other", epoch=0, **says))
    assert held(world) < before + 2 * MEMBER_BYTES, "what two of a group share is assigned once"
    world.groups.heartbeat("narrow", Heartbeat(member_id="m", epoch=0, topics=frozenset({"t"})))
    with pytest.raises(MembersFull):
        world.groups.heartbeat("narrow", Heartbeat(member_id="m", epoch=1, **says))
    before = held(world)
    world.restart()
    assert held(world) == before
    world.timers.advance(100)
    assert held(world) == 0


def test_memory_is_counted_correctly_after_a_restart_and_a_change_of_protocol(world: World) -> None:
    subscription = b"\0\0\0\0\0\1\0\1t\xff\xff\xff\xff"
    joined = world.join("g", protocols=(("range", subscription), ("other", bytes(MB)))).result
    world.sync("g", joined).result  # noqa: B018
    before = held(world)
    assert before > 2 * MB
    world.restart()
    assert held(world) == before
    world.groups.heartbeat("g", Heartbeat(member_id="m", epoch=0, topics=frozenset({"t"})))
    assert 2 * MB < held(world) < before + 2 * MEMBER_BYTES
    world.groups.heartbeat("g", Heartbeat(member_id="m", epoch=LEAVE_EPOCH))
    assert before <= held(world) < before + MEMBER_BYTES, "what it holds is its assignment now"
    world.timers.advance(100)
    assert held(world) == 0


def test_a_group_changes_its_protocol_although_two_copies_exceed_the_memory_limit(world: World) -> None:
    subscription = b"\0\0\0\0\0\1\0\1t\xff\xff\xff\xff"
    joined = world.join("g", protocols=(("range", subscription), ("other", bytes(3 * MB)))).result
    world.sync("g", joined).result  # noqa: B018
    before = held(world)
    newcomer = Heartbeat(member_id="m", epoch=0, topics=frozenset({"t"}))
    world.groups.member_budget.bytes_max = before
    with pytest.raises(MembersFull):
        world.groups.heartbeat("g", newcomer)
    assert held(world) == before, "a refused member changes nothing"
    world.groups.member_budget.bytes_max = 10 * MB
    world.groups.heartbeat("g", newcomer)
    assert held(world) < before + 2 * MEMBER_BYTES


def test_a_join_does_not_recount_all_members(world: World) -> None:
    """A walk over all members for each of them would be a quadratic start of a large group."""
    looked = 0
    keep = world.groups.member_budget.keep

    def counted(one: MemberMemory, size: int) -> None:
        nonlocal looked
        looked += 1
        keep(one, size)

    world.groups.member_budget.keep = counted  # type: ignore[method-assign]
    for _ in range(200):
        answer = world.join("g")
        assert answer.value is None or not isinstance(answer.value, HeadraceError)
    assert looked < 1000
