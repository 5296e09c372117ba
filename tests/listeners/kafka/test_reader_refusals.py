"""Edge cases of readers: the responses that Apache Kafka 4.3.1 gave to the same requests."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.listeners.kafka.errors import Code
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.world import Client, World, batch

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def end_of_epoch(client: Client, topic: str, epoch: int) -> tuple[int, int, int]:
    wanted = [{"partition": 0, "current_leader_epoch": -1, "leader_epoch": epoch}]
    answer = await client.call(
        Api.OFFSET_FOR_LEADER_EPOCH, 4, replica_id=-1, topics=[{"topic": topic, "partitions": wanted}]
    )
    [part] = answer.topics[0].partitions
    return part.error_code, part.leader_epoch, part.end_offset


async def test_a_reader_of_an_empty_log_sees_no_truncation(world: World, client: Client) -> None:
    """A consumer that gets no epoch resets to the end, and skips records that were written meanwhile."""
    topic = await world.topic("waited-at")
    log = world.broker.streams.get(topic).partitions[0].log
    assert await end_of_epoch(client, topic, 0) == (0, 0, 0)
    log.epoch = 7  # as if it had been killed
    assert await end_of_epoch(client, topic, 0) == (0, 0, 0)
    await client.produce(topic, batch(b"a", b"b"))
    assert log.epochs == [(7, 0)]
    assert await end_of_epoch(client, topic, 0) == (0, 0, 0)
    assert await end_of_epoch(client, topic, 7) == (0, 7, 2)


async def test_an_epoch_before_the_first_record_ends_at_the_log_start(world: World, client: Client) -> None:
    topic = await world.topic("trimmed")
    log = world.broker.streams.get(topic).partitions[0].log
    log.epoch = 7
    await client.produce(topic, batch(b"a"))
    await client.produce(topic, batch(b"b"))
    before = [{"name": topic, "partitions": [{"partition_index": 0, "offset": 1}]}]
    assert (await client.call(Api.DELETE_RECORDS, 2, topics=before)).topics[0].partitions[0].low_watermark == 1
    assert await end_of_epoch(client, topic, 3) == (0, 3, 1)


@pytest.mark.parametrize(
    ("timestamp", "since"), [(-1, 1), (-2, 1), (-3, 7), (-4, 8), (-5, 9), (-6, 11), (-7, 1000), (-1000, 1000)]
)
async def test_special_timestamps_need_the_version_that_defines_them(
    world: World, client: Client, timestamp: int, since: int
) -> None:
    topic = await world.topic(f"places{timestamp}")
    await client.produce(topic, batch(b"a"))
    for version in range(1, 11):
        wanted: dict[str, Any] = {"partition_index": 0, "timestamp": timestamp}
        answer = await client.call(
            Api.LIST_OFFSETS, version, replica_id=-1, topics=[{"name": topic, "partitions": [wanted]}]
        )
        [part] = answer.topics[0].partitions
        assert part.error_code == (0 if version >= since else Code.UNSUPPORTED_VERSION), version


async def session_fetch(
    client: Client, topic: str, session: int, epoch: int, *numbers: int, forgotten: tuple[int, ...] = ()
) -> SimpleNamespace:
    wanted = [{"partition": number, "fetch_offset": 0, "partition_max_bytes": 1 << 20} for number in numbers]
    return await client.call(
        Api.FETCH, 12, max_wait=0, min_bytes=0, max_bytes=1 << 20, session_id=session, session_epoch=epoch,
        topics=[{"topic": topic, "partitions": wanted}] if wanted else [],
        forgotten_topics_data=[{"topic": topic, "partitions": list(forgotten)}] if forgotten else [],
    )  # fmt: skip


async def test_a_fetch_with_a_wrong_session_epoch_gets_an_error(world: World, client: Client) -> None:
    topic = await world.topic("sessions")
    session = (await session_fetch(client, topic, 0, 0, 0)).session_id
    assert session > 0
    wrong = await session_fetch(client, topic, session, 5)
    assert (wrong.error_code, wrong.session_id) == (Code.INVALID_FETCH_SESSION_EPOCH, 0)
    assert (await session_fetch(client, topic, session, 1)).error_code == 0, "the session still exists"


async def test_a_partition_both_added_and_forgotten_is_forgotten(world: World, client: Client) -> None:
    topic = await world.topic("both", 2)
    for number in range(2):
        await client.produce(topic, batch(b"a"), partition=number)
    session = (await session_fetch(client, topic, 0, 0, 0, 1)).session_id
    answer = await session_fetch(client, topic, session, 1, 0, forgotten=(0,))
    assert [part.partition_index for one in answer.responses for part in one.partitions] == [1]
