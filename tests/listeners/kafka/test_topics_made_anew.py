"""A topic that is deleted and created again is another topic, also for clients that still use the first."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.streams.streams import Stream
from headrace.listeners.kafka.errors import Code, UnknownTopicId
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.world import Client, World, topic_at, world_at


def topic_id(world: World) -> bytes:
    return world.context.topics.id_of(world.broker.streams.get("t"))


async def make_anew(world: World) -> bytes:
    await world.broker.streams.delete("t")
    await world.topic("t")
    return topic_id(world)


async def test_deleting_a_topic_by_id_spares_its_successor(tmp_path: Path) -> None:
    """Two requests delete the first topic; the second one waited behind a request that created it again."""
    async with topic_at(tmp_path) as (world, client):
        first = topic_id(world)
        async with world.broker.streams._changing:  # later requests wait in this order
            gone = asyncio.ensure_future(world.broker.streams.delete("t"))
            await asyncio.sleep(0)
            made = asyncio.ensure_future(world.broker.streams.create("t"))
            await asyncio.sleep(0)
            deleting = asyncio.ensure_future(
                client.call(Api.DELETE_TOPICS, 6, topics=[{"name": None, "topic_id": first}], timeout=1000)
            )
            while len(world.broker.streams._changing._waiters or ()) < 3:
                await asyncio.sleep(0.001)
        await gone
        await made
        [answer] = (await deleting).responses
        assert answer.error_code == Code.UNKNOWN_TOPIC_ID
        assert world.broker.streams.find("t") is not None


async def consumer_beat(client: Client, epoch: int, **fields: Any) -> Any:
    answer = await client.call(
        Api.CONSUMER_GROUP_HEARTBEAT, 0, group_id="g", member_id="m", member_epoch=epoch, **fields
    )
    assert answer.error_code == 0, answer.error_message
    return answer


async def test_a_consumer_group_member_learns_of_a_recreated_topic(
    tmp_path: Path,
) -> None:
    async with topic_at(tmp_path) as (world, client):
        joined = await consumer_beat(
            client, 0, subscribed_topic_names=["t"], rebalance_timeout=30_000, topic_partitions=[]
        )
        told = joined.assignment.topic_partitions
        assert [one.topic_id for one in told] == [topic_id(world)]
        owned = [{"topic_id": topic_id(world), "partitions": [0]}]
        beat = await consumer_beat(client, joined.member_epoch, topic_partitions=owned)
        again = await make_anew(world)
        beat = await consumer_beat(client, beat.member_epoch, subscribed_topic_names=None, topic_partitions=None)
        assert beat.assignment is not None, "it would read the deleted topic forever"
        assert [(one.topic_id, one.partitions) for one in beat.assignment.topic_partitions] == [(again, [0])]
        await world.broker.streams.delete("t")
        beat = await consumer_beat(client, beat.member_epoch, subscribed_topic_names=None, topic_partitions=None)
        assert beat.assignment is not None
        assert beat.assignment.topic_partitions == [], "nor a deleted topic that is not created again"


async def test_a_share_group_member_learns_of_a_recreated_topic(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (world, client):
        names: dict[str, Any] = {"group_id": "s", "member_id": "m"}
        joined = await client.call(Api.SHARE_GROUP_HEARTBEAT, 1, member_epoch=0, subscribed_topic_names=["t"], **names)
        again = await make_anew(world)
        beat = await client.call(
            Api.SHARE_GROUP_HEARTBEAT, 1, member_epoch=joined.member_epoch, subscribed_topic_names=None, **names
        )
        assert beat.error_code == 0
        assert beat.assignment is not None, "it would read the deleted topic forever"
        assert [(one.topic_id, one.partitions) for one in beat.assignment.topic_partitions] == [(again, [0])]
        log = world.broker.streams.get("t").partitions[0].log
        assert log.id in world.broker.coordination.shares.known("s").partitions, "and has a start offset there"


async def test_an_unknown_topic_id_does_not_search_all_topics_for_each_partition(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its readers request all of its partitions by id until they learn of the deletion."""
    async with world_at(tmp_path) as world:
        topics, streams = world.context.topics, world.broker.streams
        await world.topic("t")
        gone = topics.id_of(streams.get("t"))
        await streams.delete("t")
        looks, listed = 0, topics.all

        def counted() -> list[Stream]:
            nonlocal looks
            looks += 1
            return listed()

        monkeypatch.setattr(topics, "all", counted)
        for _ in range(3):
            with pytest.raises(UnknownTopicId):
                topics.find(gone)
        assert looks <= 1
        await world.topic("t")
        assert topics.find(topics.id_of(streams.get("t"))) is streams.get("t")
