"""Committed offsets: durable before they are answered, whatever the disk does."""

import pytest

from headrace.broker.groups.consumer.group import Heartbeat
from headrace.broker.groups.coordinator import SWEEP_S
from headrace.broker.groups.offsets import CommittedOffset
from headrace.errors import (
    GroupNotFound,
    HeadraceError,
    IllegalGeneration,
    OffsetMetadataTooLarge,
    StorageFailed,
    UnknownMember,
)
from tests.broker.group_world import World


def committed(offset: int, group: str = "g", topic: str = "t", **values: object) -> CommittedOffset:
    fields = {"partition": 0, "log_id": 1, "leader_epoch": 0, "metadata": "", "commit_ms": 1_700_000_000_000}
    return CommittedOffset(group=group, topic=topic, offset=offset, **{**fields, **values})  # type: ignore[arg-type]


def test_an_offset_commit_is_answered_and_visible_only_once_it_is_durable() -> None:
    world = World()
    world.journal.hold = True
    answers: list[HeadraceError | None] = []
    world.groups.commit([committed(5)], answers.append)
    assert answers == []
    assert world.groups.offsets.get("g", "t", 0) is None
    world.journal.sync()
    assert answers == [None]
    assert world.groups.offsets.get("g", "t", 0) == committed(5)


def test_a_commit_that_the_disk_refused_is_not_seen() -> None:
    world = World()
    world.journal.hold = True
    answers: list[HeadraceError | None] = []
    world.groups.commit([committed(5)], answers.append)
    world.journal.sync(StorageFailed("EIO"))
    assert isinstance(answers[0], StorageFailed)
    assert world.groups.offsets.get("g", "t", 0) is None


def test_committed_offsets_survive_a_restart() -> None:
    world = World()
    world.groups.commit([committed(5), committed(9, partition=1)], lambda error: None)
    world.groups.commit([committed(6)], lambda error: None)
    world.restart()
    assert world.groups.offsets.get("g", "t", 0) == committed(6)
    assert world.groups.offsets.get("g", "t", 1) == committed(9, partition=1)


def test_a_consumer_without_a_subscription_may_commit_while_the_group_is_empty() -> None:
    world = World()
    world.groups.check_commit("g", "", None, -1)
    world.stable("g", 1)
    with pytest.raises(UnknownMember):
        world.groups.check_commit("g", "", None, -1)


def test_a_member_of_a_deleted_group_may_not_commit() -> None:
    with pytest.raises(IllegalGeneration):
        World().groups.check_commit("g", "member", None, 3)


def test_text_beside_an_offset_has_a_limit() -> None:
    with pytest.raises(OffsetMetadataTooLarge):
        World().groups.commit([committed(1, metadata="x" * 4097)], lambda error: None)


def test_offsets_of_a_deleted_topic_are_forgotten() -> None:
    world = World()
    world.groups.commit([committed(5), committed(7, topic="other")], lambda error: None)
    world.groups.topic_deleted("t")
    assert world.groups.offsets.get("g", "t", 0) is None
    assert world.groups.offsets.get("g", "other", 0) is not None
    world.restart()
    assert world.groups.offsets.get("g", "t", 0) is None


def test_offsets_of_a_group_without_members_expire() -> None:
    world = World(offsets_retention_ms=3_600_000)
    now = world.clock.now_ms()
    world.groups.commit([committed(5, commit_ms=now)], lambda error: None)
    world.timers.advance(3000)
    assert world.groups.exists("g")
    world.timers.advance(3600)
    assert not world.groups.exists("g")


def test_a_group_that_is_not_there_can_not_be_deleted() -> None:
    with pytest.raises(GroupNotFound):
        World().groups.delete("g", lambda error: None)


def test_offsets_of_the_group_without_a_name_do_not_keep_others_from_expiring() -> None:
    """Old clients commit to it, as Kafka lets them."""
    world = World(offsets_retention_ms=1000)
    for group in ("", "g"):
        world.groups.check_commit(group, "", None, -1)
        world.groups.commit([committed(5, group, commit_ms=world.clock.now_ms())], lambda error: None)
    world.timers.advance(2000)
    assert not world.groups.exists("g")
    assert not world.groups.exists("")


def test_an_empty_group_that_committed_nothing_is_forgotten_soon() -> None:
    """Until then there can be none of another kind under its name."""
    world = World({"t": 1})
    world.stable("classic", 1)
    world.stable("kept", 1)
    world.groups.commit([committed(5, "kept", commit_ms=world.clock.now_ms())], lambda error: None)
    world.groups.heartbeat("new", Heartbeat(member_id="m", epoch=0, topics=frozenset({"t"})))
    world.timers.advance(SWEEP_S - 1)
    assert {one.group_id for one in world.groups.listing()} == {"classic", "new", "kept"}
    world.timers.advance(1)
    assert {one.group_id for one in world.groups.listing()} == {"kept"}
    world.restart()
    assert {one.group_id for one in world.groups.listing()} == {"kept"}
