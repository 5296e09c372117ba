"""A topic that is deleted and made again under its name is another one, whoever still speaks of the first."""

import asyncio
from pathlib import Path

from headrace.doors.kafka.errors import Code
from headrace.wire.kafka.apis import Api
from tests.doors.kafka.world import World, world_at


def topic_id(world: World) -> bytes:
    return world.door.topics.id_of(world.broker.streams.get("t"))


async def make_anew(world: World) -> bytes:
    await world.broker.streams.delete("t")
    await world.topic("t")
    return topic_id(world)


async def test_deleting_a_topic_by_its_id_spares_the_one_that_was_made_meanwhile(tmp_path: Path) -> None:
    """Both were asked to delete the first; the second waited behind somebody who made it anew."""
    async with world_at(tmp_path) as world:
        await world.topic("t")
        client = await world.client()
        first = topic_id(world)
        async with world.broker.streams._changing:  # what comes now waits in this order
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
