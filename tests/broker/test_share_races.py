"""Share groups that are changed by two at once: one decided, and waits for the disk."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from headrace.broker.broker import Broker
from headrace.broker.groups.share.group import ShareGroup
from headrace.broker.groups.share.groups import ShareGroups
from headrace.broker.streams.partition import Partition
from headrace.config import Config
from headrace.errors import GroupNotEmpty, GroupNotFound


@asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[tuple[Broker, ShareGroups]]:
    broker = await Broker.open(Config(data_dir=str(folder), http=None, amqp=None, kafka=None))
    try:
        yield broker, broker.coordination.shares
    finally:
        await broker.close()


def beat(shares: ShareGroups, epoch: int = 0) -> None:
    shares.members.heartbeat(
        "s", "m", epoch, client_id="", client_host="", rack_id=None, topics=frozenset({"t"}) if not epoch else None
    )


async def begun(broker: Broker, shares: ShareGroups) -> tuple[ShareGroup, Partition]:
    """A group that has read the topic, and has no members now."""
    partition = (await broker.streams.create("t")).partitions[0]
    beat(shares)
    await shares.begin(shares.known("s"), [partition])
    group = shares.known("s")
    beat(shares, -1)
    return group, partition


async def test_a_share_group_that_two_delete_at_once_is_deleted(tmp_path: Path) -> None:
    async with opened(tmp_path) as (broker, shares):
        await begun(broker, shares)
        results = await asyncio.gather(shares.delete("s"), shares.delete("s"), return_exceptions=True)
        assert [one for one in results if one is not None and not isinstance(one, GroupNotFound)] == []
        assert shares.find("s") is None


@pytest.mark.parametrize("what", ["delete", "forget"])
async def test_a_member_that_joins_during_the_deletion_of_its_group_keeps_its_start_offset(
    tmp_path: Path, what: str
) -> None:
    """The start offset was deleted after the join, so the member missed records before its first fetch."""
    async with opened(tmp_path) as (broker, shares):
        _, partition = await begun(broker, shares)
        change = shares.delete("s") if what == "delete" else shares.forget("s", [partition.log_id])
        deleting = asyncio.ensure_future(change)
        await asyncio.sleep(0)
        beat(shares)
        await shares.begin(shares.group("s"), [partition])  # the heartbeat is answered now
        await asyncio.gather(deleting, return_exceptions=True)
        assert partition.log_id in shares.known("s").partitions
    async with opened(tmp_path) as (_, shares):
        assert partition.log_id in shares.known("s").partitions, "for good"


async def test_a_group_that_got_a_member_while_it_waited_to_be_moved_is_not_moved(tmp_path: Path) -> None:
    async with opened(tmp_path) as (broker, shares):
        group, partition = await begun(broker, shares)
        async with shares._beginning:  # another group begins
            moving = asyncio.ensure_future(shares.move("s", {partition: 0}))
            await asyncio.sleep(0)
            beat(shares)
        held = group.partitions[partition.log_id]
        with pytest.raises(GroupNotEmpty):
            await moving
        assert group.partitions[partition.log_id] is held, "with the locks of its members"
