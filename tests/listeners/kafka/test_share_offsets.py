"""Start offsets of share groups: durable from the first heartbeat on, and described, altered and deleted by Kafka's
tools."""

from pathlib import Path
from typing import Any

from headrace.listeners.kafka.errors import Code
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.world import Client, World, batch, topic_at, world_at


async def beat(client: Client, epoch: int = 0, member: str = "m") -> int:
    answer = await client.call(
        Api.SHARE_GROUP_HEARTBEAT, 1, group_id="s", member_id=member, member_epoch=epoch, subscribed_topic_names=["t"]
    )
    assert answer.error_code == 0, answer.error_message
    return int(answer.member_epoch)


async def take(world: World, client: Client, member: str = "m") -> list[tuple[int, int]]:
    """The records that the member acquires at once, as (first, last)."""
    topic_id = world.context.topics.id_of(world.broker.streams.get("t"))
    wanted = [{"topic_id": topic_id, "partitions": [{"partition_index": 0}]}]
    answer = await client.call(
        Api.SHARE_FETCH, 1, group_id="s", member_id=member, max_records=100, max_bytes=1 << 20, topics=wanted
    )
    assert answer.error_code == 0
    return [
        (one.first_offset, one.last_offset)
        for topic in answer.responses
        for part in topic.partitions
        for one in part.acquired_records
    ]


async def describe(client: Client, group: str = "s", topics: Any = None) -> Any:
    asked = [{"group_id": group, "topics": topics}]
    [answer] = (await client.call(Api.DESCRIBE_SHARE_GROUP_OFFSETS, 1, groups=asked)).groups
    return answer


async def alter(client: Client, offset: int, topic: str = "t") -> tuple[int, list[int]]:
    parts = [{"partition_index": 0, "start_offset": offset}, {"partition_index": 9, "start_offset": offset}]
    topics = [{"topic_name": topic, "partitions": parts}]
    answer = await client.call(Api.ALTER_SHARE_GROUP_OFFSETS, 0, group_id="s", topics=topics)
    return answer.error_code, [part.error_code for one in answer.responses for part in one.partitions]


async def test_a_share_group_misses_no_record_before_its_first_fetch(tmp_path: Path) -> None:
    """It starts at the end as of its join, not as of the broker's restart."""
    async with topic_at(tmp_path) as (world, client):
        await client.produce("t", batch(b"before"))
        await beat(client)
        await client.produce("t", batch(b"a", b"b", b"c"))
    async with world_at(tmp_path) as world:
        client = await world.client()
        await beat(client)
        assert await take(world, client) == [(1, 3)]


async def test_share_group_offsets_are_described_altered_and_deleted(tmp_path: Path) -> None:
    async with topic_at(tmp_path, partitions=2) as (world, client):
        await client.produce("t", batch(*[b"x"] * 10))
        epoch = await beat(client)
        shown = await describe(client)
        places = [(one.partition_index, one.start_offset, one.lag) for one in shown.topics[0].partitions]
        assert places == [(0, 10, 0), (1, 0, 0)]
        assert await alter(client, 4) == (Code.NON_EMPTY_GROUP, []), "the group has members"
        deleted = await client.call(Api.DELETE_SHARE_GROUP_OFFSETS, 0, group_id="s", topics=[{"topic_name": "t"}])
        assert deleted.error_code == Code.NON_EMPTY_GROUP
        [kept] = (await client.call(Api.DELETE_GROUPS, 2, groups_names=["s"])).results
        assert kept.error_code == Code.NON_EMPTY_GROUP
        assert epoch > 0
        await beat(client, -1)
        assert await alter(client, 4) == (0, [0, Code.UNKNOWN_TOPIC_OR_PARTITION])
        assert (await alter(client, 4, "nowhere"))[1] == [Code.UNKNOWN_TOPIC_OR_PARTITION] * 2
    async with world_at(tmp_path) as world:  # durable
        client = await world.client()
        asked = [{"topic_name": "t", "partitions": [0, 9]}, {"topic_name": "nowhere", "partitions": [0]}]
        topics = (await describe(client, topics=asked)).topics
        assert [(p.start_offset, p.lag, p.error_code) for p in topics[0].partitions] == [
            (4, 6, 0),
            (-1, -1, Code.UNKNOWN_TOPIC_OR_PARTITION),
        ]
        assert topics[1].partitions[0].error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
        await beat(client)
        assert await take(world, client) == [(4, 9)]
        await beat(client, -1)
        deleted = await client.call(Api.DELETE_SHARE_GROUP_OFFSETS, 0, group_id="s", topics=[{"topic_name": "t"}])
        assert (deleted.error_code, deleted.responses[0].error_code) == (0, 0)
        assert (await describe(client)).topics == []


async def test_deleted_records_do_not_count_as_lag(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (_, client):
        await beat(client)
        await client.produce("t", batch(*[b"x"] * 10))
        asked = [{"name": "t", "partitions": [{"partition_index": 0, "offset": 7}]}]
        [deleted] = (await client.call(Api.DELETE_RECORDS, 2, topics=asked)).topics
        assert deleted.partitions[0].low_watermark == 7
        [part] = (await describe(client)).topics[0].partitions
        assert (part.start_offset, part.lag) == (7, 3)


async def test_missing_groups_are_not_found(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (_, client):
        assert (await describe(client, "nobody")).error_code == Code.GROUP_ID_NOT_FOUND
        gone = await client.call(Api.DELETE_SHARE_GROUP_OFFSETS, 0, group_id="s", topics=[])
        assert gone.error_code == Code.GROUP_ID_NOT_FOUND


async def test_altering_offsets_creates_a_missing_share_group(tmp_path: Path) -> None:
    """kadm and Kafka's admin client set the start offsets of a group before a member has joined."""
    async with topic_at(tmp_path) as (world, client):
        await client.produce("t", batch(*[b"x"] * 10))
        assert (await alter(client, 4, "nowhere"))[1] == [Code.UNKNOWN_TOPIC_OR_PARTITION] * 2
        assert (await describe(client)).error_code == Code.GROUP_ID_NOT_FOUND, "it has no offset"
        assert await alter(client, 4) == (0, [0, Code.UNKNOWN_TOPIC_OR_PARTITION])
    async with world_at(tmp_path) as world:
        client = await world.client()
        [shown] = (await client.call(Api.SHARE_GROUP_DESCRIBE, 1, group_ids=["s"])).groups
        assert (shown.error_code, shown.group_state) == (0, "Empty")
        await beat(client)
        assert await take(world, client) == [(4, 9)]


async def test_altering_offsets_of_another_kind_of_group_is_refused(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (_, client):
        joined = await client.call(
            Api.CONSUMER_GROUP_HEARTBEAT, 0, group_id="s", member_id="m", member_epoch=0, rebalance_timeout=60_000,
            subscribed_topic_names=["t"], topic_partitions=[],
        )  # fmt: skip
        assert joined.error_code == 0
        assert await alter(client, 0) == (Code.GROUP_ID_NOT_FOUND, [])


async def test_deleting_offsets_of_an_unread_topic_is_refused(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        await world.topic("t")
        await world.topic("other")
        client = await world.client()
        await beat(client)
        await beat(client, -1)
        topics = [{"topic_name": "t"}, {"topic_name": "other"}]
        for codes in ([0, Code.UNKNOWN_TOPIC_OR_PARTITION], [Code.UNKNOWN_TOPIC_OR_PARTITION] * 2):
            deleted = await client.call(Api.DELETE_SHARE_GROUP_OFFSETS, 0, group_id="s", topics=topics)
            assert [one.error_code for one in deleted.responses] == codes


async def test_a_share_group_is_deleted_with_its_state(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (world, client):
        await beat(client)
        await beat(client, -1)
        [result] = (await client.call(Api.DELETE_GROUPS, 2, groups_names=["s"])).results
        assert result.error_code == 0
        assert (await client.call(Api.LIST_GROUPS, 4)).groups == []
    async with world_at(tmp_path) as world:
        client = await world.client()
        assert (await client.call(Api.LIST_GROUPS, 4)).groups == []


async def test_a_member_without_topics_leaves_no_share_group_behind(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        client = await world.client()
        await beat(client)
        await beat(client, -1)
        assert world.broker.coordination.shares.all() == []
