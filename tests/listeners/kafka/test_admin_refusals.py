"""Errors of admin requests: the codes that Apache Kafka 4.3.1 returned for the same requests."""

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.listeners.kafka.admin.config_types import APPEND, DELETE, GROUP, SUBTRACT, TOPIC
from headrace.listeners.kafka.errors import Code
from headrace.wire.kafka.apis import Api
from headrace.wire.kafka.schema import NO_UUID
from tests.listeners.kafka.world import Client, World

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def create(client: Client, *configs: tuple[str, str], validate_only: bool = True) -> SimpleNamespace:
    topic = {
        "name": "new",
        "num_partitions": 1,
        "replication_factor": 1,
        "configs": [{"name": name, "value": value} for name, value in configs],
    }
    [answer] = (await client.call(Api.CREATE_TOPICS, 7, topics=[topic], validate_only=validate_only)).topics
    result: SimpleNamespace = answer
    return result


async def change(client: Client, kind: int, of: str, name: str, operation: int, value: str | None) -> int:
    one = {"name": name, "config_operation": operation, "value": value}
    resource = {"resource_type": kind, "resource_name": of, "configs": [one]}
    [answer] = (await client.call(Api.INCREMENTAL_ALTER_CONFIGS, 1, resources=[resource])).responses
    code: int = answer.error_code
    return code


async def delete(client: Client, *topics: dict[str, Any]) -> list[int]:
    answers = (await client.call(Api.DELETE_TOPICS, 6, topics=list(topics))).responses
    return [one.error_code for one in answers]


async def test_a_topic_named_twice_in_create_partitions_is_refused(world: World, client: Client) -> None:
    topic = await world.topic("grows", 2)
    twice = [{"name": topic, "count": 3, "assignments": None}, {"name": topic, "count": 4, "assignments": None}]
    answers = (await client.call(Api.CREATE_PARTITIONS, 3, topics=twice)).results
    assert {one.error_code for one in answers} == {Code.INVALID_REQUEST}
    assert len(world.broker.streams.get(topic).partitions) == 2


async def test_delete_topics_takes_a_name_or_an_id_but_each_topic_once(world: World, client: Client) -> None:
    topic = await world.topic("stays")
    topic_id = world.context.topics.id_of(world.broker.streams.get(topic))
    by_name, by_id = {"name": topic, "topic_id": NO_UUID}, {"name": None, "topic_id": topic_id}
    assert await delete(client, {"name": topic, "topic_id": topic_id}) == [Code.INVALID_REQUEST]
    assert await delete(client, {"name": None, "topic_id": NO_UUID}) == [Code.INVALID_REQUEST]
    for pair in ([by_name, by_name], [by_name, by_id], [by_id, by_id]):
        assert set(await delete(client, *pair)) == {Code.INVALID_REQUEST}
    assert world.broker.streams.find(topic) is not None
    assert await delete(client, by_id) == [0]
    assert world.broker.streams.find(topic) is None


async def test_appending_an_invalid_value_to_a_list_is_refused(world: World, client: Client) -> None:
    topic = await world.topic("lists")
    assert await change(client, TOPIC, topic, "cleanup.policy", APPEND, "nonsense") == Code.INVALID_CONFIG
    assert await change(client, TOPIC, topic, "cleanup.policy", APPEND, "compact,nonsense") == Code.INVALID_CONFIG
    assert world.broker.streams.get(topic).settings.cleanup_policy == "delete"
    assert await change(client, TOPIC, topic, "cleanup.policy", APPEND, " compact") == 0
    assert await change(client, TOPIC, topic, "cleanup.policy", APPEND, "compact") == 0
    assert world.broker.streams.get(topic).settings.cleanup_policy == "delete,compact"
    assert await change(client, TOPIC, topic, "cleanup.policy", SUBTRACT, "nonsense, delete") == 0
    assert world.broker.streams.get(topic).settings.cleanup_policy == "compact"
    throttled = "leader.replication.throttled.replicas"
    assert await change(client, TOPIC, topic, throttled, APPEND, "0:1") == 0
    assert await change(client, TOPIC, topic, throttled, APPEND, "x") == Code.INVALID_CONFIG
    assert await change(client, TOPIC, topic, "retention.ms", APPEND, "5") == Code.INVALID_CONFIG


async def test_deleting_an_unknown_config_changes_nothing(world: World, client: Client) -> None:
    topic = await world.topic("taken-back")
    assert await change(client, TOPIC, topic, "nonsense", DELETE, None) == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retention.ms", "9223372036854775808"),
        ("max.message.bytes", "2147483648"),
        ("min.insync.replicas", "0"),
        ("unclean.leader.election.enable", "maybe"),
        ("preallocate", "yes"),
        ("flush.messages", "0"),
        ("flush.ms", "-1"),
        ("segment.jitter.ms", "-1"),
        ("file.delete.delay.ms", "x"),
        ("segment.index.bytes", "3"),
        ("leader.replication.throttled.replicas", "x"),
    ],
)
async def test_an_invalid_value_of_a_config_without_effect_is_refused(client: Client, name: str, value: str) -> None:
    assert (await create(client, (name, value))).error_code == Code.INVALID_CONFIG


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retention.ms", "9223372036854775807"),
        ("min.insync.replicas", "5"),
        ("unclean.leader.election.enable", "TRUE"),
        ("leader.replication.throttled.replicas", "*"),
        ("follower.replication.throttled.replicas", "0:1,1:1"),
        ("follower.replication.throttled.replicas", ""),
    ],
)
async def test_a_valid_value_of_a_config_without_effect_is_accepted(client: Client, name: str, value: str) -> None:
    assert (await create(client, (name, value))).error_code == 0


async def test_validate_only_returns_the_configs_of_the_new_topic(world: World, client: Client) -> None:
    answer = await create(client, ("retention.ms", "5000"), ("compression.type", "producer"))
    told = {one.name: (one.value, one.config_source) for one in answer.configs}
    assert told["retention.ms"] == ("5000", 1)
    assert told["compression.type"] == ("producer", 1)
    assert world.broker.streams.find("new") is None
    made = await create(client, ("retention.ms", "5000"), ("compression.type", "producer"), validate_only=False)
    assert {one.name: (one.value, one.config_source) for one in made.configs} == told


async def test_the_default_group_resource_is_refused(client: Client) -> None:
    asked = [{"resource_type": GROUP, "resource_name": "", "configuration_keys": None}]
    [described] = (await client.call(Api.DESCRIBE_CONFIGS, 4, resources=asked)).results
    assert described.error_code == Code.INVALID_REQUEST
    assert await change(client, GROUP, "", "share.heartbeat.interval.ms", 0, "6000") == Code.INVALID_REQUEST


async def test_a_negative_cursor_is_refused(world: World, client: Client) -> None:
    topic = await world.topic("paged", 3)
    answer = await client.call(
        Api.DESCRIBE_TOPIC_PARTITIONS, 0, topics=[{"name": topic}], response_partition_limit=10,
        cursor={"topic_name": topic, "partition_index": -1},
    )  # fmt: skip
    assert [(one.error_code, one.partitions) for one in answer.topics] == [(Code.INVALID_REQUEST, [])]


async def test_an_unknown_election_type_is_refused(world: World, client: Client) -> None:
    asked = [{"topic": await world.topic("elected"), "partitions": [0]}]
    for kind, code in ((0, 0), (1, 0), (5, Code.INVALID_REQUEST)):
        answer = await client.call(Api.ELECT_LEADERS, 2, election_type=kind, topic_partitions=asked)
        assert answer.error_code == code, kind
