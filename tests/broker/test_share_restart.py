"""A share group over a restart of the broker: its members and the delivery state of each record."""

from pathlib import Path

import pytest

from headrace.broker.groups.config_store import GroupConfigs
from headrace.broker.groups.member_budget import MemberBudget
from headrace.broker.groups.share.groups import ShareGroups
from headrace.broker.groups.share.members import ShareMember
from headrace.broker.groups.share.partition import Acquired
from headrace.clock import ManualClock
from headrace.errors import FencedMemberEpoch, GroupFull, GroupNotEmpty, InvalidInput, UnknownMember
from tests.broker.group_world import ManualTimers
from tests.broker.test_share_races import opened


def beat(shares: ShareGroups, epoch: int = 0, member_id: str = "m") -> tuple[ShareMember, bool]:
    topics = frozenset({"t"}) if epoch == 0 else None
    return shares.members.heartbeat("s", member_id, epoch, client_id="c", client_host="/h", rack_id=None, topics=topics)


async def test_a_share_group_member_continues_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as (broker, shares):
        await broker.streams.create("t", 2)
        member, _ = beat(shares)
        epoch, assigned = member.epoch, member.assigned
        assert len(assigned) == 2
    async with opened(tmp_path) as (_, shares):
        [kept] = shares.known("s").members.values()
        assert (kept.client_id, kept.client_host, kept.topics) == ("c", "/h", frozenset({"t"}))
        member, is_news = beat(shares, epoch)
        assert (member.epoch, member.assigned, is_news) == (epoch, assigned, False)
        with pytest.raises(GroupNotEmpty):
            await shares.delete("s")


async def test_a_member_that_left_is_not_back_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as (broker, shares):
        await broker.streams.create("t")
        beat(shares)
        beat(shares, -1)
    async with opened(tmp_path) as (_, shares):
        assert shares.find("s") is None


async def test_after_a_restart_a_member_gets_its_changed_assignment(tmp_path: Path) -> None:
    async with opened(tmp_path) as (broker, shares):
        await broker.streams.create("t")
        epoch = beat(shares)[0].epoch
        await broker.streams.delete("t")
    async with opened(tmp_path) as (broker, shares):
        await broker.streams.create("t")
        member, is_news = beat(shares, epoch)
        assert is_news
        assert member.epoch > epoch


async def test_a_member_that_sends_no_heartbeat_after_a_restart_is_removed_after_its_session(tmp_path: Path) -> None:
    async with opened(tmp_path) as (broker, shares):
        await broker.streams.create("t")
        beat(shares)
        beat(shares, member_id="silent")
        clock = ManualClock()
        timers = ManualTimers(clock)
        after = ShareGroups(
            broker.shard, clock, timers, lambda: {"t": 1}, MemberBudget(1 << 20), GroupConfigs(broker.shard)
        )
        await broker.shard.group().commit()
        after.load()
        timers.advance(40)
        beat(after, after.known("s").members["m"].epoch)
        timers.advance(10)
        assert list(after.known("s").members) == ["m"]
        after.close()


async def test_how_often_a_record_was_tried_outlives_a_restart(tmp_path: Path) -> None:
    """Also if no delivery was ever acknowledged, because each consumer disconnected."""
    async with opened(tmp_path) as (broker, shares):
        partition = (await broker.streams.create("t")).partitions[0]
        beat(shares)
        group = shares.known("s")
        await shares.begin(group, [partition])
        share = shares.partition(group, partition.log_id)
        assert share.acquire("m", 0, 2, 2, 10.0)
        shares.release("s", "m")
        for _ in range(4):
            assert share.acquire("m", 0, 1, 1, 10.0)
            shares.release("s", "m")
        assert share.available(0, 2) == 1, "the first was tried often enough"
    async with opened(tmp_path) as (broker, shares):
        share = shares.partition(shares.known("s"), broker.streams.get("t").partitions[0].log_id)
        assert share.start == 1
        assert share.acquire("m", 1, 2, 1, 10.0) == [Acquired(1, 1, 2)]


async def test_locks_that_ended_are_counted_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as (broker, _):
        partition = (await broker.streams.create("t")).partitions[0]
        clock = ManualClock()
        timers = ManualTimers(clock)
        shares = ShareGroups(
            broker.shard, clock, timers, lambda: {"t": 1}, MemberBudget(1 << 20), GroupConfigs(broker.shard)
        )
        group = shares.group("s")
        await shares.begin(group, [partition])
        assert shares.partition(group, partition.log_id).acquire("m", 0, 1, 1, shares.lock_deadline(group))
        timers.advance(31)
        shares.close()
    async with opened(tmp_path) as (broker, after):
        share = after.partition(after.known("s"), broker.streams.get("t").partitions[0].log_id)
        assert share.acquire("m", 0, 1, 1, 10.0) == [Acquired(0, 0, 2)]


async def test_a_member_whose_reply_was_lost_gets_it_again_although_others_joined(tmp_path: Path) -> None:
    async with opened(tmp_path) as (broker, shares):
        await broker.streams.create("t")
        epoch = beat(shares)[0].epoch
        for number in range(5):
            beat(shares, member_id=f"other-{number}")
        await broker.streams.configure("t", {}, partitions=2)
        told, is_news = beat(shares, epoch)
        assert is_news
        again, is_news = beat(shares, epoch)
        assert (again.epoch, is_news) == (told.epoch, True)
        with pytest.raises(FencedMemberEpoch):
            beat(shares, epoch + 1)


async def test_a_refused_member_creates_no_share_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path) as (_, shares):
        for epoch in (3, -1):
            with pytest.raises(UnknownMember):
                beat(shares, epoch)
        with pytest.raises(InvalidInput):
            shares.members.heartbeat("s", "m", 0, client_id="", client_host="", rack_id=None, topics=None)
        with pytest.raises(InvalidInput):
            beat(shares, member_id="m" * 1001)
        assert shares.all() == []
        monkeypatch.setattr("headrace.broker.groups.share.membership.MEMBERS_MAX", 1)
        beat(shares)
        with pytest.raises(GroupFull):
            beat(shares, member_id="other")
        beat(shares)  # it is in


async def test_unknown_topic_names_count_toward_the_memory_limit_even_when_added_later(tmp_path: Path) -> None:
    async with opened(tmp_path) as (broker, _):
        clock, room = ManualClock(), MemberBudget(1 << 20)
        shares = ShareGroups(broker.shard, clock, ManualTimers(clock), dict, room, GroupConfigs(broker.shard))
        epoch = beat(shares)[0].epoch
        before = room.held_bytes()
        shares.members.heartbeat(
            "s", "m", epoch, client_id="c", client_host="/h", rack_id=None, topics=frozenset({"x" * 1000})
        )
        assert room.held_bytes() > before + 1000
        beat(shares, -1)
        assert room.held_bytes() == 0
        shares.close()
