"""A group keeps its kind until it is deleted, and a refused request creates no group."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace

from headrace.listeners.kafka.errors import Code
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.group_members import beat_consumer, beat_share, classic_member, commit, join_classic
from tests.listeners.kafka.world import Client, topic_at, world_at

Join = Callable[[Client, str], Awaitable[SimpleNamespace]]


async def listed(client: Client) -> list[tuple[str, str]]:
    return sorted((one.group_id, one.group_type) for one in (await client.call(Api.LIST_GROUPS, 5)).groups)


async def delete(client: Client, group: str) -> int:
    [result] = (await client.call(Api.DELETE_GROUPS, 2, groups_names=[group])).results
    code: int = result.error_code
    return code


async def commit_in_transaction(client: Client, group: str) -> int:
    producer = await client.call(Api.INIT_PRODUCER_ID, 4, transactional_id="x", transaction_timeout=60_000)
    known = {"producer_id": producer.producer_id, "producer_epoch": producer.producer_epoch}
    who = {"transactional_id": "x", "group_id": group, **known}
    assert (await client.call(Api.ADD_OFFSETS_TO_TXN, 3, **who)).error_code == 0
    topics = [{"name": "t", "partitions": [{"partition_index": 0, "committed_offset": 0}]}]
    answer = await client.call(Api.TXN_OFFSET_COMMIT, 3, **who, generation_id=-1, topics=topics)
    code: int = answer.topics[0].partitions[0].error_code
    return code


async def test_a_share_group_cannot_be_used_as_a_consumer_group(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (_, client):
        for epoch in (0, -1):
            await beat_share(client, "g", epoch)
            assert (await join_classic(client, "g")).error_code == Code.INCONSISTENT_GROUP_PROTOCOL
            assert (await beat_consumer(client, "g")).error_code == Code.GROUP_ID_NOT_FOUND
            assert await commit(client, "g") == Code.GROUP_ID_NOT_FOUND
            assert await commit_in_transaction(client, "g") == Code.GROUP_ID_NOT_FOUND
            assert await listed(client) == [("g", "share")]
        assert await delete(client, "g") == 0
        assert (await beat_consumer(client, "g")).error_code == 0


async def test_a_consumer_group_cannot_be_used_as_a_share_group(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (_, client):
        joined = await classic_member(client, "classic")
        await commit(client, "simple")
        for epoch in (0, -1):
            await beat_consumer(client, "new", epoch)
            for group in ("new", "classic", "simple"):
                assert (await beat_share(client, group)).error_code == Code.GROUP_ID_NOT_FOUND
            assert await listed(client) == [("classic", "classic"), ("new", "consumer"), ("simple", "classic")]
            gone = [{"member_id": joined.member_id}]
            await client.call(Api.LEAVE_GROUP, 4, group_id="classic", members=gone)
        assert await delete(client, "new") == 0
        assert (await beat_share(client, "new")).error_code == 0


async def test_a_heartbeat_of_an_unknown_member_creates_no_group(tmp_path: Path) -> None:
    async with world_at(tmp_path) as world:
        client = await world.client()
        for epoch in (3, -1):
            assert (await beat_consumer(client, "g", epoch)).error_code == Code.UNKNOWN_MEMBER_ID
            assert (await beat_share(client, "g", epoch)).error_code == Code.UNKNOWN_MEMBER_ID
        refused = await client.call(Api.CONSUMER_GROUP_HEARTBEAT, 1, group_id="g", member_id="m", member_epoch=0)
        assert refused.error_code == Code.INVALID_REQUEST, "without a subscription"
        assert await listed(client) == []


async def test_a_refused_join_creates_no_group(tmp_path: Path) -> None:
    """It existed for ten minutes, and blocked a group of another kind."""
    async with world_at(tmp_path) as world:
        client = await world.client()
        range_ = [{"name": "range", "metadata": b""}]
        for session_timeout, protocols, member_id, code in (
            (1, range_, "", Code.INVALID_SESSION_TIMEOUT),
            (10_000, [], "", Code.INCONSISTENT_GROUP_PROTOCOL),
            (10_000, range_, "nobody", Code.UNKNOWN_MEMBER_ID),
        ):
            answer = await client.call(
                Api.JOIN_GROUP, 5, group_id="g", member_id=member_id, session_timeout=session_timeout,
                rebalance_timeout=10_000, protocol_type="consumer", protocols=protocols,
            )  # fmt: skip
            assert answer.error_code == code
        assert await listed(client) == []
        assert (await beat_share(client, "g")).error_code == 0


async def test_an_empty_group_accepts_a_commit_without_a_generation(tmp_path: Path) -> None:
    """From a consumer with manual assignment and any member id. The group has not expired yet, or has offsets."""
    async with topic_at(tmp_path) as (_, client):
        joined = await classic_member(client, "classic")
        await client.call(Api.LEAVE_GROUP, 4, group_id="classic", members=[{"member_id": joined.member_id}])
        for epoch in (0, -1):
            await beat_consumer(client, "new", epoch)
        for group_id in ("classic", "new"):
            assert await commit(client, group_id, 1, "m") == Code.UNKNOWN_MEMBER_ID
            assert await commit(client, group_id, -1, "m") == 0


async def test_a_missing_group_accepts_a_commit_without_a_generation(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (_, client):
        assert await commit(client, "g", 3, "m") == Code.ILLEGAL_GENERATION
        assert await commit(client, "g", -1, "m") == 0


async def test_a_share_session_cannot_start_with_an_acknowledgement(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (_, client):
        await beat_share(client, "g")
        for epoch, code in ((0, Code.INVALID_SHARE_SESSION_EPOCH), (1, Code.SHARE_SESSION_NOT_FOUND)):
            answer = await client.call(
                Api.SHARE_ACKNOWLEDGE, 1, group_id="g", member_id="m", share_session_epoch=epoch, topics=[]
            )
            assert answer.error_code == code


async def test_deleting_offsets_of_a_missing_topic_is_an_error(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (_, client):
        assert await commit(client, "g") == 0
        asked = [{"name": name, "partitions": [{"partition_index": 0}]} for name in ("t", "nowhere")]
        answer = await client.call(Api.OFFSET_DELETE, 0, group_id="g", topics=asked)
        assert [one.partitions[0].error_code for one in answer.topics] == [0, Code.UNKNOWN_TOPIC_OR_PARTITION]


async def test_a_full_member_budget_is_retriable_for_every_kind_of_group(tmp_path: Path) -> None:
    async with topic_at(tmp_path) as (world, client):
        joins: tuple[Join, ...] = (join_classic, beat_consumer, beat_share)
        world.broker.coordination.member_budget.bytes_max = 100
        codes = [(await join(client, f"g{number}")).error_code for number, join in enumerate(joins)]
        assert codes == [Code.COORDINATOR_NOT_AVAILABLE] * 3
        assert await listed(client) == []
        world.broker.coordination.member_budget.bytes_max = 1 << 20
        codes = [(await join(client, f"g{number}")).error_code for number, join in enumerate(joins)]
        assert codes == [Code.MEMBER_ID_REQUIRED, 0, 0]
        held = world.broker.coordination.member_budget.held_bytes()
        assert (await beat_share(client, "g2", -1)).error_code == 0
        assert 0 < world.broker.coordination.member_budget.held_bytes() < held
