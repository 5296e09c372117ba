"""Errors of group members: the codes that Apache Kafka 4.3.1 returned for the same requests."""

import struct
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.listeners.kafka.errors import Code
from headrace.wire.kafka.apis import Api
from tests.listeners.kafka.world import Client, World

pytestmark = pytest.mark.asyncio(loop_scope="module")
JOIN: dict[str, Any] = {"rebalance_timeout": 5000, "subscribed_topic_names": ["t"], "topic_partitions": []}


async def prepare(world: World) -> None:
    await world.topic("t", 2)


async def join(client: Client, group: str, metadata: bytes = b"") -> SimpleNamespace:
    """The only member and leader of a classic group, with its assignment."""
    joined = await client.call(
        Api.JOIN_GROUP, 3, group_id=group, session_timeout=10_000, rebalance_timeout=10_000, member_id="",
        protocol_type="consumer", protocols=[{"name": "range", "metadata": metadata}],
    )  # fmt: skip
    assert await sync(client, group, joined, "consumer", "range") == 0
    return joined


async def sync(client: Client, group: str, joined: Any, kind: str | None, protocol: str | None) -> int:
    answer = await client.call(
        Api.SYNC_GROUP, 5, group_id=group, generation_id=joined.generation_id, member_id=joined.member_id,
        protocol_type=kind, protocol_name=protocol,
        assignments=[{"member_id": joined.member_id, "assignment": b"all"}],
    )  # fmt: skip
    code: int = answer.error_code
    return code


async def beat(client: Client, group: str, member: str, epoch: int, *, version: int = 1, **fields: Any) -> Any:
    usual = {"rebalance_timeout": -1, "subscribed_topic_names": None, "topic_partitions": None}
    return await client.call(
        Api.CONSUMER_GROUP_HEARTBEAT, version, group_id=group, member_id=member, member_epoch=epoch,
        **{**usual, **fields},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("member", "epoch", "fields"),
    [
        ("", 0, JOIN),
        ("m", 0, {**JOIN, "rebalance_timeout": -1}),
        ("m", 0, {**JOIN, "topic_partitions": None}),
        ("m", 0, {**JOIN, "subscribed_topic_names": None}),
        ("m", 0, {**JOIN, "instance_id": ""}),
        ("m", 0, {**JOIN, "rack_id": ""}),
        ("m", -3, JOIN),
        ("m", -2, {}),
    ],
    ids=["no id", "no timeout", "no partitions", "no topics", "no instance", "no rack", "epoch -3", "unknown instance"],
)
async def test_an_invalid_heartbeat_is_refused_and_creates_no_group(
    world: World, client: Client, member: str, epoch: int, fields: dict[str, Any]
) -> None:
    refused = await beat(client, "senseless", member, epoch, **fields)
    assert refused.error_code == Code.INVALID_REQUEST
    assert (refused.member_id, refused.member_epoch) == (None, 0)
    assert world.broker.coordination.groups.find("senseless") is None


async def test_a_group_without_a_name_cannot_be_joined(client: Client) -> None:
    assert (await beat(client, "", "m", 0, **JOIN)).error_code == Code.INVALID_REQUEST
    left = await client.call(Api.LEAVE_GROUP, 5, group_id="", members=[{"member_id": "m"}])
    assert (left.error_code, left.members) == (Code.INVALID_GROUP_ID, [])
    gone = await client.call(Api.OFFSET_DELETE, 0, group_id="", topics=[])
    assert gone.error_code == Code.INVALID_GROUP_ID


async def test_version_0_assigns_a_member_id(client: Client) -> None:
    joined = await beat(client, "of-old", "", 0, version=0, **JOIN)
    assert joined.error_code == 0
    assert joined.member_id
    assert (await beat(client, "of-old", joined.member_id, -1)).error_code == 0


async def test_an_unknown_instance_id_is_an_unknown_member(client: Client) -> None:
    joined = await join(client, "dynamic")
    member = {"group_id": "dynamic", "member_id": joined.member_id, "group_instance_id": "nobody's"}
    beaten = await client.call(Api.HEARTBEAT, 4, generation_id=joined.generation_id, **member)
    assert beaten.error_code == Code.UNKNOWN_MEMBER_ID
    committed = await client.call(
        Api.OFFSET_COMMIT, 8, generation_id_or_member_epoch=joined.generation_id, **member,
        topics=[{"name": "t", "partitions": [{"partition_index": 0, "committed_offset": 1}]}],
    )  # fmt: skip
    assert committed.topics[0].partitions[0].error_code == Code.UNKNOWN_MEMBER_ID


async def test_sync_group_5_must_name_the_protocol(client: Client) -> None:
    joined = await join(client, "says")
    for kind, protocol in ((None, None), ("consumer", None), (None, "range")):
        assert await sync(client, "says", joined, kind, protocol) == Code.INCONSISTENT_GROUP_PROTOCOL
    assert await sync(client, "says", joined, "consumer", "range") == 0


async def commit(client: Client, group: str, member: str, generation: int) -> int:
    answer = await client.call(
        Api.OFFSET_COMMIT, 8, group_id=group, generation_id_or_member_epoch=generation, member_id=member,
        topics=[{"name": "t", "partitions": [{"partition_index": 0, "committed_offset": 1}]}],
    )  # fmt: skip
    code: int = answer.topics[0].partitions[0].error_code
    return code


async def test_a_member_of_a_group_with_offsets_only_is_unknown(client: Client) -> None:
    assert await commit(client, "simple", "m", 3) == Code.ILLEGAL_GENERATION, "the group does not exist"
    assert await commit(client, "simple", "", -1) == 0
    assert await commit(client, "simple", "m", 3) == Code.UNKNOWN_MEMBER_ID


async def test_a_group_named_twice_is_deleted_once(client: Client) -> None:
    assert await commit(client, "twice", "", -1) == 0
    answers = (await client.call(Api.DELETE_GROUPS, 2, groups_names=["twice", "twice"])).results
    assert [(one.group_id, one.error_code) for one in answers] == [("twice", 0)]


def subscription(*topics: str) -> bytes:
    names = b"".join(struct.pack(">h", len(name)) + name.encode() for name in topics)
    return struct.pack(">hi", 0, len(topics)) + names + struct.pack(">i", -1)


@pytest.mark.parametrize(
    ("metadata", "code"),
    [
        (subscription("t"), Code.GROUP_SUBSCRIBED_TO_TOPIC),
        (b"?", Code.GROUP_SUBSCRIBED_TO_TOPIC),
        (subscription("u"), 0),
    ],
    ids=["reads it", "undecidable", "reads another"],
)
async def test_offsets_are_deleted_only_of_existing_unsubscribed_partitions(
    client: Client, metadata: bytes, code: int
) -> None:
    group = f"offsets-{len(metadata)}-{code}"
    await join(client, group, metadata)
    parts = [{"partition_index": 0}, {"partition_index": 9}]
    answer = await client.call(Api.OFFSET_DELETE, 0, group_id=group, topics=[{"name": "t", "partitions": parts}])
    [topic] = answer.topics
    assert [one.error_code for one in topic.partitions] == [code, Code.UNKNOWN_TOPIC_OR_PARTITION]


async def test_the_session_timeout_is_checked_before_the_kind_of_the_group(world: World, client: Client) -> None:
    """A share group answered INCONSISTENT_GROUP_PROTOCOL for every session timeout."""
    shared = {"group_id": "shared", "member_id": "m", "member_epoch": 0, "subscribed_topic_names": ["t"]}
    assert (await client.call(Api.SHARE_GROUP_HEARTBEAT, 1, **shared)).error_code == 0
    for session_timeout, code in ((1, Code.INVALID_SESSION_TIMEOUT), (10_000, Code.INCONSISTENT_GROUP_PROTOCOL)):
        for protocols in ([], [{"name": "range", "metadata": b""}]):
            joined = await client.call(
                Api.JOIN_GROUP, 9, group_id="shared", session_timeout=session_timeout, rebalance_timeout=10_000,
                protocol_type="consumer", protocols=protocols,
            )  # fmt: skip
            assert joined.error_code == code
    unnamed = await client.call(
        Api.JOIN_GROUP, 9, group_id="", session_timeout=1, rebalance_timeout=1, protocol_type="consumer", protocols=[]
    )
    assert unnamed.error_code == Code.INVALID_GROUP_ID
