"""Authorized operations in responses. Those of an open broker are the ones that Apache Kafka 4.3.1 returns without an
authorizer."""

import pytest

from headrace.listeners.kafka.auth.access import Operation
from headrace.wire.kafka.apis import Api
from headrace.wire.kafka.metadata import UNKNOWN_OPERATIONS
from tests.listeners.kafka.group_members import beat_consumer, beat_share, commit
from tests.listeners.kafka.logins import add, allow, logged_in
from tests.listeners.kafka.world import Client, World

pytestmark = pytest.mark.asyncio(loop_scope="module")
ON_TOPIC, ON_GROUP, ON_CLUSTER = 3576, 3400, 8096


async def prepare(world: World) -> None:
    await world.topic("t")


async def of_topic(client: Client, version: int, *, every: bool = False, ask: bool = True) -> tuple[int, int]:
    """Authorized operations of topic and cluster; the latter are in Metadata up to version 10."""
    asked = {"include_topic_authorized_operations": ask}
    if version <= 10:
        asked["include_cluster_authorized_operations"] = ask
    answer = await client.call(Api.METADATA, version, topics=None if every else [{"name": "t"}], **asked)
    [topic] = answer.topics
    return topic.topic_authorized_operations, getattr(answer, "cluster_authorized_operations", UNKNOWN_OPERATIONS)


async def described_topic(client: Client) -> int:
    answer = await client.call(Api.DESCRIBE_TOPIC_PARTITIONS, 0, topics=[{"name": "t"}], response_partition_limit=9)
    operations: int = answer.topics[0].topic_authorized_operations
    return operations


async def of_cluster(client: Client, *, ask: bool = True) -> int:
    answer = await client.call(Api.DESCRIBE_CLUSTER, 1, include_cluster_authorized_operations=ask)
    operations: int = answer.cluster_authorized_operations
    return operations


async def of_group(client: Client, api: Api, version: int, group: str, *, ask: bool = True) -> int:
    names = "groups" if api is Api.DESCRIBE_GROUPS else "group_ids"
    answer = await client.call(api, version, **{names: [group], "include_authorized_operations": ask})
    operations: int = answer.groups[0].authorized_operations
    return operations


@pytest.mark.parametrize("version", [8, 9, 10, 11, 12, 13])
async def test_authorized_operations_of_a_topic(client: Client, version: int) -> None:
    for every in (False, True):
        topic, cluster = await of_topic(client, version, every=every)
        assert topic == ON_TOPIC
        assert cluster == (ON_CLUSTER if version <= 10 else UNKNOWN_OPERATIONS)
        assert await of_topic(client, version, every=every, ask=False) == (UNKNOWN_OPERATIONS, UNKNOWN_OPERATIONS)
    assert await described_topic(client) == ON_TOPIC


async def test_authorized_operations_of_the_cluster(client: Client) -> None:
    assert await of_cluster(client) == ON_CLUSTER
    assert await of_cluster(client, ask=False) == UNKNOWN_OPERATIONS


async def test_authorized_operations_of_a_group(client: Client) -> None:
    assert await commit(client, "classic") == 0
    assert (await beat_consumer(client, "consumer")).error_code == 0
    assert (await beat_share(client, "share")).error_code == 0
    for api, version, group in (
        (Api.DESCRIBE_GROUPS, 6, "classic"),
        (Api.CONSUMER_GROUP_DESCRIBE, 1, "consumer"),
        (Api.SHARE_GROUP_DESCRIBE, 1, "share"),
    ):
        assert await of_group(client, api, version, group) == ON_GROUP
        assert await of_group(client, api, version, group, ask=False) == UNKNOWN_OPERATIONS
    assert await of_group(client, Api.DESCRIBE_GROUPS, 6, "nobody's") == UNKNOWN_OPERATIONS


async def test_authorized_operations_are_those_of_the_user(world: World) -> None:
    await add(world, "ann")
    looks = Operation.DESCRIBE | Operation.DESCRIBE_CONFIGS
    for right, on_topic, on_group in (
        ("read", Operation.READ | looks, Operation.READ | Operation.DELETE | looks),
        ("write", Operation.WRITE | looks, None),
        ("configure", Operation.CREATE | Operation.DELETE | Operation.ALTER | Operation.ALTER_CONFIGS | looks, None),
    ):
        await allow(world, "ann", **{right: ".*"})
        client = await logged_in(world, "ann")
        assert (await of_topic(client, 12))[0] == on_topic
        assert await described_topic(client) == on_topic
        assert await of_cluster(client) == Operation.DESCRIBE | Operation.IDEMPOTENT_WRITE
        told = await of_group(client, Api.DESCRIBE_GROUPS, 6, "classic")
        assert told == (on_group if on_group is not None else UNKNOWN_OPERATIONS), right
