"""Joins members to each kind of group by protocol requests. The expected codes were observed with Kafka 4.3."""

from types import SimpleNamespace

from headrace.wire.kafka.apis import Api
from tests.broker.mixed_clients import subscription
from tests.listeners.kafka.world import Client


async def join_classic(client: Client, group: str, member_id: str = "") -> SimpleNamespace:
    # No test sends heartbeats.
    return await client.call(
        Api.JOIN_GROUP, 5, group_id=group, session_timeout=60_000, rebalance_timeout=60_000, member_id=member_id,
        protocol_type="consumer", protocols=[{"name": "range", "metadata": subscription()}],
    )  # fmt: skip


async def classic_member(client: Client, group: str) -> SimpleNamespace:
    """The leader of a group that waits for its SyncGroup."""
    told = await join_classic(client, group)
    return await join_classic(client, group, told.member_id)


async def sync_classic(client: Client, group: str, joined: SimpleNamespace) -> None:
    mine = {"member_id": joined.member_id, "assignment": b"mine"}
    known = {"generation_id": joined.generation_id, "member_id": joined.member_id}
    assert (await client.call(Api.SYNC_GROUP, 3, group_id=group, **known, assignments=[mine])).error_code == 0


async def beat_consumer(client: Client, group: str, epoch: int = 0) -> SimpleNamespace:
    joins = {"subscribed_topic_names": ["t"], "topic_partitions": [], "rebalance_timeout": 9000} if not epoch else {}
    return await client.call(
        Api.CONSUMER_GROUP_HEARTBEAT, 1, group_id=group, member_id="m", member_epoch=epoch, **joins
    )


async def beat_share(client: Client, group: str, epoch: int = 0) -> SimpleNamespace:
    joins = {"subscribed_topic_names": ["t"]} if not epoch else {}
    return await client.call(Api.SHARE_GROUP_HEARTBEAT, 1, group_id=group, member_id="m", member_epoch=epoch, **joins)


async def commit(client: Client, group: str, generation: int = -1, member_id: str = "") -> int:
    parts = [{"partition_index": 0, "committed_offset": 0, "committed_metadata": ""}]
    who = {"generation_id_or_member_epoch": generation, "member_id": member_id}
    answer = await client.call(Api.OFFSET_COMMIT, 8, group_id=group, **who, topics=[{"name": "t", "partitions": parts}])
    code: int = answer.topics[0].partitions[0].error_code
    return code
