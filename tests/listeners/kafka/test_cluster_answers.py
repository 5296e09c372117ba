"""Topic ids, features and requests about the cluster: the answers that Apache Kafka 4.3.1 gave to the same requests."""

import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.broker.access.users import GUEST
from headrace.listeners.kafka.context import cluster_name
from headrace.listeners.kafka.errors import Code
from headrace.listeners.kafka.listener import new_cluster_id
from headrace.wire.kafka.apis import Api
from headrace.wire.kafka.schema import NO_UUID
from tests.listeners.kafka.logins import add, logged_in
from tests.listeners.kafka.world import Client, World

pytestmark = pytest.mark.asyncio(loop_scope="module")
UNKNOWN = uuid.UUID("11111111-2222-4333-8444-555555555555").bytes


async def prepare(world: World) -> None:
    await world.topic("t", 2)


async def described(client: Client, version: int, *topics: dict[str, Any]) -> list[SimpleNamespace]:
    answer = await client.call(Api.METADATA, version, topics=list(topics), allow_auto_topic_creation=True)
    found: list[SimpleNamespace] = answer.topics
    return found


@pytest.mark.parametrize("version", [12, 13])
@pytest.mark.parametrize("name", [None, "", "t", "another"])
async def test_metadata_finds_a_topic_by_its_id_whatever_its_name(
    world: World, client: Client, version: int, name: str | None
) -> None:
    """The Java client sends an empty name with the id, and got INVALID_TOPIC_EXCEPTION."""
    topic_id = world.context.topics.id_of(world.broker.streams.get("t"))
    [topic] = await described(client, version, {"name": name, "topic_id": topic_id})
    assert (topic.error_code, topic.name, topic.topic_id) == (0, "t", topic_id)
    assert len(topic.partitions) == 2
    [unknown] = await described(client, version, {"name": name, "topic_id": UNKNOWN})
    assert (unknown.error_code, unknown.name) == (Code.UNKNOWN_TOPIC_ID, None)
    assert (unknown.topic_id, unknown.partitions) == (UNKNOWN, [])
    assert world.broker.streams.find("another") is None, "a request by id creates no topic"


async def test_metadata_names_a_topic_once_that_was_asked_for_by_two_spellings_of_its_id(
    world: World, client: Client
) -> None:
    topic_id = world.context.topics.id_of(world.broker.streams.get("t"))
    asked = [{"name": name, "topic_id": topic_id} for name in (None, "", "t")]
    assert [one.name for one in await described(client, 12, *asked)] == ["t"]


@pytest.mark.parametrize("version", [10, 11])
async def test_metadata_refuses_ids_in_versions_that_only_have_a_field_for_them(
    world: World, client: Client, version: int
) -> None:
    topic_id = world.context.topics.id_of(world.broker.streams.get("t"))
    topics = await described(client, version, {"name": "t"}, {"name": "", "topic_id": topic_id})
    assert [(one.error_code, one.name, one.topic_id) for one in topics] == [
        (Code.INVALID_REQUEST, "t", NO_UUID),
        (Code.INVALID_REQUEST, "", topic_id),
    ]
    assert [one.error_code for one in await described(client, version, {"name": None})] == [Code.INVALID_REQUEST]
    assert [one.error_code for one in await described(client, version, {"name": "t"})] == [0]


async def test_a_new_cluster_id_does_not_start_with_a_dash() -> None:
    """`kafka-topics --topic-id -abc` takes such an id for an option; the ids of topics start with the same bytes."""
    drawn = [bytes([first]) + bytes(15) for first in (0xF8, 0xFB, 0xFC)]
    cluster = new_cluster_id(lambda size: drawn.pop(0))
    assert cluster_name(cluster).startswith("_") and drawn == []


async def test_features_are_finalized_as_in_kafka(client: Client) -> None:
    """Only transaction.version was. Tools check share.version before they create share groups."""
    newest = await client.call(Api.API_VERSIONS, 4)
    assert {one.name: (one.min_version_level, one.max_version_level) for one in newest.finalized_features} == {
        "group.version": (1, 1),
        "metadata.version": (30, 30),
        "share.version": (1, 1),
        "transaction.version": (2, 2),
    }
    assert newest.finalized_features_epoch == 0, "without an epoch Java ignores the features"
    assert {one.name: (one.min_version, one.max_version) for one in newest.supported_features} == {
        "group.version": (0, 1),
        "metadata.version": (7, 30),
        "share.version": (0, 1),
        "transaction.version": (0, 2),
    }
    older = await client.call(Api.API_VERSIONS, 3)
    assert len(older.finalized_features) == 4
    assert [one.name for one in older.supported_features] == ["metadata.version"], (
        "older Java clients fail on a feature whose minimum is 0"
    )
    assert (await client.call(Api.API_VERSIONS, 2)).error_code == 0


async def test_a_broker_that_does_not_exist_is_not_unregistered(world: World, client: Client) -> None:
    for broker_id in (99, -1):
        answer = await client.call(Api.UNREGISTER_BROKER, 0, broker_id=broker_id)
        assert answer.error_code == Code.BROKER_ID_NOT_REGISTERED
        assert answer.error_message == f"Broker ID {broker_id} is not currently registered"
    answer = await client.call(Api.UNREGISTER_BROKER, 0, broker_id=world.context.node_id)
    assert answer.error_code == Code.INVALID_REQUEST and "the only broker" in answer.error_message


@pytest.mark.parametrize("version", [1, 2, 3])
async def test_delegation_tokens_are_answered_as_by_a_kafka_without_them(client: Client, version: int) -> None:
    answer = await client.call(Api.DESCRIBE_DELEGATION_TOKEN, version, owners=None)
    assert (answer.error_code, answer.tokens) == (Code.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED, [])


async def test_delegation_tokens_are_disabled_for_a_client_with_a_login(world: World) -> None:
    await add(world, "root", tags="administrator")
    await world.broker.users.remove_user(GUEST)
    answer = await (await logged_in(world, "root")).call(Api.DESCRIBE_DELEGATION_TOKEN, 3, owners=None)
    assert answer.error_code == Code.DELEGATION_TOKEN_AUTH_DISABLED
